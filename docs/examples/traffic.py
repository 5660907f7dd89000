# SPDX-License-Identifier: Apache-2.0
"""Runs one of two workers that hand off requests until they are stopped, so that metrics show something.

Start `kvlink coordinator`, set KVLINK_COORDINATOR=127.0.0.1:7400, and run `python traffic.py prefill-0` and
`python traffic.py decode-0`. The compose file runs both with `--profile demo`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=8, total_heads=8, row_bytes=256, num_blocks=256))
EVERY_S = 0.25
GRACE_S = 3.0
BLOCKS = list(range(16))
HandOff = Callable[[kvlink.Worker, str], None]


def main(worker_id: str) -> None:
    """Offers or pulls one request after another until SIGTERM, and goes on after a failure. Then it drains."""
    hand_off = offer if worker_id.startswith("prefill") else pull
    done = 0
    with (
        kvlink.Worker(kvlink.BlockPool.allocate(LAYOUT), worker_id) as worker,
        kvlink.Termination() as ending,
    ):
        print(f"{worker_id} has joined", flush=True)
        while not ending.wait(EVERY_S - time.time() % EVERY_S):
            done += went_well(hand_off, worker, f"traffic-{time.time() / EVERY_S:.0f}")
        worker.drain(GRACE_S)  # what was offered can still be read
    print(f"{worker_id} ends after {done} requests")


def went_well(hand_off: HandOff, worker: kvlink.Worker, request_id: str) -> bool:
    """Returns whether the request was handed off, and prints why not."""
    try:
        hand_off(worker, request_id)
    except kvlink.KVLinkError as error:
        print(f"{worker.worker_id}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def offer(worker: kvlink.Worker, request_id: str) -> None:
    """Publishes the blocks of a request under its id."""
    worker.offer(request_id, BLOCKS, publish=True)


def pull(worker: kvlink.Worker, request_id: str) -> None:
    """Waits until the request is offered, and pulls it."""
    worker.pull(request_id=request_id, into=BLOCKS, timeout_s=2.0).wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
