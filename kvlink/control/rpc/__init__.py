# SPDX-License-Identifier: Apache-2.0
"""Channels, streams and servers of gRPC, and the accounting of their calls."""
