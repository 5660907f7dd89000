# SPDX-License-Identifier: Apache-2.0
"""Adapts Open MPI's one-sided communication: one Get of an indexed type for all blocks, then Flush.

mpiexec starts both ends. The owner waits in MPI all the time, because Open MPI does not move bytes without it.
"""

from __future__ import annotations

import threading
from typing import Any

import mpi4py
from mpi4py import MPI

from . import Transfer
from .blocks import Blocks, Ids

_OWNER, _READER = 0, 1


class OpenMPI:
    """A window on the blocks of both ends, locked by the reader for the whole contest."""

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = f"{'.'.join(map(str, MPI.get_vendor()[1]))}, mpi4py {mpi4py.__version__}"
        self._blocks, self._memory = blocks, blocks.as_bytes()
        if MPI.COMM_WORLD.Get_rank() == _OWNER:
            threading.Thread(target=self._serve, name="bench-owner", daemon=True).start()

    def card(self) -> str:
        """Returns nothing: mpiexec has made the ends known to each other."""
        return ""

    def connect(self, card: str) -> None:
        """Makes the window, together with the owner's thread."""
        self._window = MPI.Win.Create(self._memory, 1, comm=MPI.COMM_WORLD)
        self._window.Lock_all()
        MPI.COMM_WORLD.Barrier()

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Commits the types of both lists, which are not timed."""
        starts, sizes = self._blocks.starts(), self._blocks.sizes()
        theirs, ours = (
            MPI.BYTE.Create_hindexed(sizes[ids].tolist(), starts[ids].tolist()).Commit()
            for ids in (there, here)
        )

        def release() -> None:
            theirs.Free()
            ours.Free()

        return Transfer(
            lambda: self._window.Get([self._memory, 1, ours], _OWNER, [0, 1, theirs]),
            lambda: self._window.Flush(_OWNER),
            release,
        )

    def _serve(self) -> None:
        self._window = MPI.Win.Create(self._memory, 1, comm=MPI.COMM_WORLD)
        MPI.COMM_WORLD.Barrier()
        MPI.COMM_WORLD.recv(source=_READER)  # never comes


make = OpenMPI
