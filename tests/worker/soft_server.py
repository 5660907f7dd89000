# SPDX-License-Identifier: Apache-2.0
"""An owner that offers softly, and readers in the same process."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, Geometry, Ticket, Worker, WorkerConfig, dense
from kvlink.errors import StaleBlocks, StaleReason

LAYOUT = dense(Geometry(num_layers=2, total_heads=2, row_bytes=16, num_blocks=64, block_tokens=4))
TURN, HERE = [9, 3, 30, 4], [1, 8, 2, 40]


def blocks_of(worker: Worker) -> npt.NDArray[np.uint8]:
    """The pool by plane, block and byte."""
    return worker.pool.numpy().view(np.uint8).reshape(-1, LAYOUT.num_blocks, LAYOUT.block_stride)


class Server:
    """An owner whose blocks hold their generation, and readers."""

    def __init__(self, opened: ExitStack, transport: str, num_readers: int = 2, **config: object) -> None:
        options = WorkerConfig(transports=transport, port=0, **config)  # type: ignore[arg-type]

        def worker(name: str) -> Worker:
            return opened.enter_context(Worker(BlockPool.allocate(LAYOUT), name, config=options))

        self.owner = worker("owner")
        self.readers = [worker(f"reader-{number}") for number in range(num_readers)]

    def write(self, blocks: list[int], generation: int) -> None:
        blocks_of(self.owner)[:, blocks] = generation

    def outcome(self, pull_of: Worker, ticket: Ticket, generation: int) -> StaleReason | None:
        """Pulls, and returns why it was stale. A pull that succeeds must have brought this generation."""
        blocks_of(pull_of)[:, HERE] = 0xEE
        try:
            pull_of.pull(ticket, HERE[: len(ticket.block_ids)], timeout_s=20).wait()
        except StaleBlocks as stale:
            return stale.why
        assert (blocks_of(pull_of)[:, HERE[: len(ticket.block_ids)]] == generation).all()
        return None
