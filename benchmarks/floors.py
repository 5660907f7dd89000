# SPDX-License-Identifier: Apache-2.0
"""What the machine does on the same path without kvlink. csrc/floors.h does the work and takes the time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvlink import BlockPool, _core

from .contents import Ids
from .draws import Order, pieces_of
from .processes import OwnerSide

CONTIGUOUS = None
"""A floor that takes the same bytes in one piece."""


@dataclass(frozen=True, slots=True)
class Floor:
    """One bare way of moving blocks: (blocks at the owner, blocks here) -> us. `order` None: in one piece."""

    name: str
    order: Order | None
    run: Callable[[Ids, Ids], float]


def floors(transport: str, owner: OwnerSide, pool: BlockPool, order: Order, block_bytes: int, blocks: int) -> list[Floor]:
    """Those of a transport; the fastest of them is the limit."""
    name = transport.removeprefix("fault+")
    memory = owner.call("memory")
    to = pool.regions[0].address
    if name == "tcp":
        sink = _core.FloorSink(owner.call("listen")["port"], block_bytes * blocks)
        return [
            Floor(
                "socket ping-pong" if blocks == 1 else "socket stream",
                CONTIGUOUS,
                lambda from_ids, to_ids: sink.read(int(from_ids[0]) * block_bytes, to + int(to_ids[0]) * block_bytes) / 1000,
            )
        ]

    def over(copy: Callable[[np.ndarray], int], base: int) -> Callable[[Ids, Ids], float]:
        return lambda from_ids, to_ids: copy(pieces_of(from_ids, to_ids, block_bytes, base, to)) / 1000

    if name == "cma":
        return [Floor("process_vm_readv", order, over(lambda pieces: _core.floor_process_vm_readv(owner.pid, pieces), memory["address"]))]
    base = memory["address"] if name == "loopback" else _mapped(owner.pid, memory["memfd"])
    return [
        Floor("memcpy", order, over(_core.floor_memcpy, base)),
        Floor("non-temporal copy", order, over(_core.floor_streamed_copy, base)),
    ]
