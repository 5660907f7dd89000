# SPDX-License-Identifier: Apache-2.0
"""Messages that servers, ranks and the two sides of the connector exchange."""
