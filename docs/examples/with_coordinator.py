# SPDX-License-Identifier: Apache-2.0
"""Finds a request by its id at a coordinator, without passing a ticket. Run: python with_coordinator.py"""

from __future__ import annotations

import subprocess
import sys

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=4, total_heads=2, row_bytes=128, num_blocks=32))


def main() -> None:
    """Starts `kvlink coordinator` on a free port, joins two workers to it, and hands off one request."""
    command = [sys.executable, "-m", "kvlink", "coordinator", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as coordinator:
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().split()[-1]  # "kvlink coordinator on 127.0.0.1:34567"
        try:
            transfer(address)
        finally:
            coordinator.terminate()


def transfer(address: str) -> None:
    """Offers by id in one worker, pulls by id in another. The pull waits until the request is offered."""
    cache, pool = kvlink.BlockPool.allocate(LAYOUT), kvlink.BlockPool.allocate(LAYOUT)
    cache.numpy()[:] = 7
    with (
        kvlink.Worker(cache, "prefill-0", coordinator=address) as owner,
        kvlink.Worker(pool, "decode-0", coordinator=address) as reader,
    ):
        pull = reader.pull(request_id="request-42", into=[0, 1, 2])
        owner.offer("request-42", [10, 20, 30], publish=True)
        pull.wait()
        assert pool.numpy().reshape(8, LAYOUT.num_blocks, -1)[:, :3].min() == 7
        print(f"pulled {pull.stats.num_bytes} bytes by request id, over {pull.explain()[0].transport}")


if __name__ == "__main__":
    main()
