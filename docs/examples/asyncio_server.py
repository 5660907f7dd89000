# SPDX-License-Identifier: Apache-2.0
"""Runs prefill and decode as coroutines that await pulls, limit their time, and return blocks to an allocator.

Run: python asyncio_server.py
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=4, total_heads=2, row_bytes=128, num_blocks=32))


def planes_of(worker: kvlink.Worker) -> npt.NDArray[np.uint8]:
    """A view of the worker's pool: [K and V of each layer, blocks, bytes]."""
    return worker.pool.numpy().reshape(8, LAYOUT.num_blocks, -1)


class Prefill:
    """Owns a pool. Blocks are free, or belong to an offer."""

    def __init__(self, worker: kvlink.Worker) -> None:
        self.worker = worker
        self.free = list(range(LAYOUT.num_blocks))
        self.offered: dict[str, list[int]] = {}

    def compute(self, request_id: str, num_blocks: int) -> str:
        """Computes a prompt and returns the ticket's text."""
        blocks = [self.free.pop() for _ in range(num_blocks)]
        planes_of(self.worker)[:, blocks] = 1 + len(self.offered)  # stands for the forward pass
        self.offered[request_id] = blocks
        return self.worker.offer(request_id, blocks).to_text()

    async def take_blocks_back(self) -> None:
        """Runs beside the server: an ended offer's blocks may be written again."""
        async for event in self.worker.watch_events():
            self.free += self.offered.pop(event.request_id)
            print(f"{event.request_id} {event.how.value}, {len(self.free)} blocks are free")
            if not self.offered:
                return


async def decode(worker: kvlink.Worker, ticket: str, into: list[int]) -> bool:
    """Pulls one request within a second. Returns False when it has to be computed again."""
    try:
        async with worker.pull(kvlink.Ticket.from_text(ticket), into, timeout_s=1.0) as pull:
            stats = await pull
    except kvlink.TransferError as error:  # after the block, no byte arrives any more
        print(f"computing it here: {error}")
        return False
    print(f"pulled {stats.num_bytes} bytes into blocks {into}")
    return True


async def main() -> None:
    """Hands three requests from one worker to another. One of them is aborted before decode comes for it."""
    with (
        kvlink.Worker(kvlink.BlockPool.allocate(LAYOUT), "prefill-0") as owner,
        kvlink.Worker(kvlink.BlockPool.allocate(LAYOUT), "decode-0") as reader,
    ):
        prefill = Prefill(owner)
        tickets = [prefill.compute(f"request-{number}", 4) for number in range(3)]
        owner.abort("request-2")
        returned = asyncio.create_task(prefill.take_blocks_back())
        valid = await asyncio.gather(
            *(decode(reader, ticket, list(range(4 * n, 4 * n + 4))) for n, ticket in enumerate(tickets))
        )
        await returned
        assert valid == [True, True, False]
        assert (planes_of(reader)[:, :4] == 1).all()
        assert (planes_of(reader)[:, 4:8] == 2).all()
        assert len(prefill.free) == LAYOUT.num_blocks


if __name__ == "__main__":
    asyncio.run(main())
