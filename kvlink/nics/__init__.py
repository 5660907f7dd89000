# SPDX-License-Identifier: Apache-2.0
"""Which NIC ports carry whose bytes: `choose` for the memory on this machine, `pair` for two machines."""

from kvlink.nics.candidates import best_gid
from kvlink.nics.choice import choose
from kvlink.nics.local import select_nics, select_ports
from kvlink.nics.pairing import pair
from kvlink.nics.values import MemoryPlace, NicChoice, NicOffer, NicSelection, Rail, RefusedNic, port_name

__all__ = [
    "MemoryPlace",
    "NicChoice",
    "NicOffer",
    "NicSelection",
    "Rail",
    "RefusedNic",
    "best_gid",
    "choose",
    "pair",
    "port_name",
    "select_nics",
    "select_ports",
]
