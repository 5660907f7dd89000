# SPDX-License-Identifier: Apache-2.0
"""Pulls blocks while others are still being written. Run: python streaming.py"""

from __future__ import annotations

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=4, total_heads=2, row_bytes=128, num_blocks=32))
OWNED, INTO = [3, 1, 4, 15, 9, 2], [0, 1, 2, 3, 4, 5]


def main() -> None:
    """Offers six blocks of which none is written, and writes one after the other."""
    cache = kvlink.BlockPool.allocate(LAYOUT)
    planes = cache.numpy().reshape(8, LAYOUT.num_blocks, -1)
    pool = kvlink.BlockPool.allocate(LAYOUT)
    with kvlink.Worker(cache, "prefill-0") as owner, kvlink.Worker(pool, "decode-0") as reader:
        ticket = owner.offer("request-42", OWNED, ready=0)
        pull = reader.pull(ticket, INTO)  # begins now, and reads each block once it is ready
        for number, block in enumerate(OWNED):
            planes[:, block] = number + 1  # stands for a chunk of the forward pass
            owner.set_ready("request-42", number + 1)
        pull.wait()
    pulled = pool.numpy().reshape(8, LAYOUT.num_blocks, -1)
    assert all((pulled[:, block] == number + 1).all() for number, block in enumerate(INTO))
    print(f"all {len(INTO)} blocks are right: {pull.stats.num_bytes} bytes")


if __name__ == "__main__":
    main()
