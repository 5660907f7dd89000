# SPDX-License-Identifier: Apache-2.0
"""Offers a pool on the GPU: python pool_owner.py KIND SEED. Each line of input is a command with its answer.

KIND: torch (what its allocator gives) or kvlink (BlockPool.allocate). Commands: `offer ID`, of all blocks, `fill SEED`,
`abort ID`.
"""

from __future__ import annotations

import sys

import torch
from test_cuda_pools import BLOCKS, LAYOUT

from kvlink import BlockPool, Worker, WorkerConfig


def pool_of(kind: str) -> BlockPool:
    """Zeroed, on GPU 0."""
    if kind == "kvlink":
        return BlockPool.allocate(LAYOUT, gpu=0)
    return BlockPool.from_tensors(
        [torch.zeros(size, dtype=torch.uint8, device="cuda:0") for size in LAYOUT.region_bytes], LAYOUT
    )


def fill(pool: BlockPool, seed: int) -> None:
    """The same bytes in every process, in place on return."""
    for region in range(len(pool.regions)):
        random = torch.Generator(device="cuda:0").manual_seed(seed * 1000 + region)
        pool.torch(region).random_(0, 256, generator=random)
    torch.cuda.synchronize()


def main() -> None:
    kind, seed = sys.argv[1], int(sys.argv[2])
    pool = pool_of(kind)
    fill(pool, seed)
    with Worker(pool, "owner", config=WorkerConfig.from_env(transports="cuda")) as worker:
        print("ready", flush=True)
        for line in sys.stdin:
            command, argument = line.split()
            answer = "done"
            if command == "offer":
                answer = worker.offer(argument, range(BLOCKS)).to_text()
            elif command == "abort":
                worker.abort(argument)
            else:
                fill(pool, int(argument))
            print(answer, flush=True)


if __name__ == "__main__":
    main()
