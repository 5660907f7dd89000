# SPDX-License-Identifier: Apache-2.0
"""Selects the NIC ports that serve a place in memory on this machine, with a weight for each.

csrc/transports/verbs/rails.h pairs the ports of two workers.
"""

from kvlink.hardware.nics.candidates import best_gid
from kvlink.hardware.nics.choice import choose, weigh
from kvlink.hardware.nics.local import select_ports
from kvlink.hardware.nics.values import MemoryPlace, NicSelection, RefusedNic, port_name

__all__ = [
    "MemoryPlace",
    "NicSelection",
    "RefusedNic",
    "best_gid",
    "choose",
    "port_name",
    "select_ports",
    "weigh",
]
