# SPDX-License-Identifier: Apache-2.0
"""Which NIC ports serve which memory on this machine, and with which weight. csrc/verbs_rails.h pairs them."""

from kvlink.nics.candidates import best_gid
from kvlink.nics.choice import choose, weigh
from kvlink.nics.local import select_nics, select_ports
from kvlink.nics.values import MemoryPlace, NicChoice, NicSelection, RefusedNic, port_name

__all__ = [
    "MemoryPlace",
    "NicChoice",
    "NicSelection",
    "RefusedNic",
    "best_gid",
    "choose",
    "port_name",
    "select_nics",
    "select_ports",
    "weigh",
]
