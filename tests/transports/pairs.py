# SPDX-License-Identifier: Apache-2.0
"""An owner somewhere and a reader here, both with pools of plain wide blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transports.pools import PoolSpec, random_contents, wide
from transports.processes import Peer, RemoteWorker

from kvlink import Pull, Ticket, Worker, WorkerConfig

SEED = 20_25
POISON = 0xEE


class Pair:
    """`fault` is a plan for the reader's side. Blocks of the reader are poisoned whenever they are given to a pull."""

    def __init__(
        self, peer: Peer, name: str, transport: str, fault: str = "", num_blocks: int = 64, **config: Any
    ) -> None:
        self.spec: PoolSpec = wide(num_blocks)
        self._reader_config = {
            "transports": f"fault+{transport}" if fault else transport,
            "fault": fault,
            "lanes": 1,
            **config,
        }
        coordinator = config.get("coordinator")
        self.owner = RemoteWorker(
            peer, f"{name}-owner", self.spec, transports=transport, coordinator=coordinator
        )
        self.owner.do("fill", seed=SEED)
        self.contents = random_contents(self.spec.layout(), SEED)[0].reshape(num_blocks, -1)
        self.reader = self.another_reader(f"{name}-reader")

    def another_reader(self, name: str, **config: Any) -> Worker:
        return Worker(
            self.spec.make(), name, config=WorkerConfig.from_env(**{**self._reader_config, **config})
        )

    def blocks(self, reader: Worker | None = None) -> npt.NDArray[np.uint8]:
        """The reader's blocks, shape [block, bytes]."""
        return (reader or self.reader).pool.numpy().reshape(len(self.contents), -1)

    def offer(self, blocks: Sequence[int], **options: Any) -> Ticket:
        return self.owner.offer(blocks, **options)

    def start(
        self, ticket: Ticket, into: Sequence[int], reader: Worker | None = None, **options: Any
    ) -> Pull:
        self.blocks(reader)[list(into)] = POISON
        return (reader or self.reader).pull(ticket, into, **options)

    def pull(self, ticket: Ticket, into: Sequence[int], reader: Worker | None = None, **options: Any) -> Pull:
        """Waits for the bytes and compares them."""
        pull = self.start(ticket, into, reader, **options)
        assert pull.wait(30)
        assert self.holds(into, list(ticket.block_ids), reader)
        return pull

    def holds(self, into: Sequence[int], blocks: Sequence[int], reader: Worker | None = None) -> bool:
        return np.array_equal(self.blocks(reader)[list(into)], self.contents[list(blocks)])

    def works(self) -> None:
        """A further pull succeeds. Into the last two blocks."""
        num_blocks = len(self.contents)
        self.pull(self.offer([7, 2]), [num_blocks - 1, num_blocks - 2], timeout_s=20)

    def close(self) -> None:
        self.reader.close()
        del self.reader  # pytest keeps the pair, and with it the reader's memory
        self.owner.close()
