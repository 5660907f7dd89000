# SPDX-License-Identifier: Apache-2.0
"""This package holds gRPC channels, streams and servers, and the statistics of their calls."""
