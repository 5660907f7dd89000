# SPDX-License-Identifier: Apache-2.0
"""Memory windows of type 2B: a part of a memory, for the reader at the other end of one connection alone."""

from __future__ import annotations

from typing import NamedTuple

import pyverbs.enums as e
from pyverbs.mr import MW, MWBindInfo
from pyverbs.wr import SendWR
from softroce.pyverbs_peer.nic import Memory, Nic

_SOFT_ROCE = 0xFFFFFF  # RXE_VENDOR_ID

OPENED_BY_WINDOWS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_MW_BIND
"""For a memory that has no key of its own."""


class Limits(NamedTuple):
    """Holds limits of a device. `has_windows`: of this type. `is_soft_roce`: is the kernel's own."""

    has_windows: bool
    is_soft_roce: bool
    max_windows: int
    max_regions: int

    @classmethod
    def of(cls, nic: Nic) -> Limits:
        limits = nic.context.query_device()
        has_windows = bool(limits.device_cap_flags & e.IBV_DEVICE_MEM_WINDOW_TYPE_2B)
        return cls(has_windows, limits.vendor_id == _SOFT_ROCE, limits.max_mw, limits.max_mr)


class Window:
    """`bind` and `revoke` are to be posted on the owner's connection, in this order; `rkey` holds in between.

    Opens once: pyverbs gives no way to tell the window its new key, which binding it again would have to name.
    """

    def __init__(self, nic: Nic, memory: Memory, offset: int, num_bytes: int) -> None:
        self._window = MW(nic.pd, e.IBV_MW_TYPE_2)
        part = MWBindInfo(memory.regions[0], memory.address + offset, num_bytes, e.IBV_ACCESS_REMOTE_READ)
        self.bind = SendWR(opcode=e.IBV_WR_BIND_MW)
        self.bind.set_bind_wr(self._window, part)
        self.rkey = self.bind.rkey
        # The field is a union of the two.
        self.revoke = SendWR(opcode=e.IBV_WR_LOCAL_INV, imm_data=self.rkey)

    def close(self) -> None:
        """Before the connection that it was bound on."""
        self._window.close()
