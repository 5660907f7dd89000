# SPDX-License-Identifier: Apache-2.0
"""kvlink inside inference servers. Installed as `kvlink.integrations`; nothing in kvlink imports it."""
