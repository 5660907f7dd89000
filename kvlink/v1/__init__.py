# SPDX-License-Identifier: Apache-2.0
"""Messages generated from protos/kvlink/v1; only kvlink.control.codec imports them."""
