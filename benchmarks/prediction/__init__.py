# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink predict`: the cost to move a request, from its geometry and the machine's figures. Pure.

Time = start-up + the slowest of: bytes over the wire, bytes over PCIe, posting, the NICs' operations, and the window of
reads in flight. The terms overlap, so the slowest of them is the bottleneck.
"""
