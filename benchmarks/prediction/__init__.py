# SPDX-License-Identifier: Apache-2.0
"""`kvlink predict`: what the move of a request costs, from its geometry and the machine's figures. Pure.

Time = start-up + the slowest of: bytes over the wire, bytes over PCIe, posting, the NICs' operations, and the window
of reads under way. The terms overlap, so the slowest of them is the bottleneck.
"""
