# SPDX-License-Identifier: Apache-2.0
"""Offers one request in a prefill process and pulls it in a decode process. Run: python two_processes.py"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

import kvlink

GEOMETRY = kvlink.Geometry(num_layers=4, total_heads=2, row_bytes=128, num_blocks=64)
LAYOUT = kvlink.dense(GEOMETRY)
PLANES = 2 * GEOMETRY.num_layers  # K and V of each layer


def blocks_of(pool: kvlink.BlockPool) -> npt.NDArray[np.uint8]:
    """A view of the pool: [planes, blocks, bytes of a block in one plane]."""
    return pool.numpy().reshape(PLANES, LAYOUT.num_blocks, -1)


def decode(connection: Connection) -> None:
    """Receives a ticket, pulls the request into blocks of its own, and sends their bytes back."""
    pool = kvlink.BlockPool.allocate(LAYOUT)
    with kvlink.Worker(pool, "decode-0") as worker:
        pull = worker.pull(kvlink.Ticket.from_text(connection.recv()), into=[0, 1, 2])
        pull.wait()  # raises kvlink.StaleBlocks, kvlink.TransferTimeout, ... when the bytes are not valid
        print(pull.explain()[0])
        connection.send(blocks_of(pool)[:, [0, 1, 2]].copy())


def main() -> None:
    """The prefill side."""
    pool = kvlink.BlockPool.allocate(LAYOUT)
    written = np.random.default_rng(0).integers(
        256, size=blocks_of(pool)[:, [7, 3, 11]].shape, dtype=np.uint8
    )
    blocks_of(pool)[:, [7, 3, 11]] = written  # in a server, the forward pass writes them

    processes = multiprocessing.get_context("spawn")  # gRPC's threads do not survive a fork
    ours, theirs = processes.Pipe()
    child = processes.Process(target=decode, args=(theirs,), daemon=True)
    child.start()
    theirs.close()  # so that `ours` ends if the child does
    with kvlink.Worker(pool, "prefill-0") as worker:
        ticket = worker.offer("request-42", [7, 3, 11], num_tokens=48)
        ours.send(ticket.to_text())  # in a server, the router passes it on
        assert (ours.recv() == written).all()
        event = next(worker.watch_events_blocking())
        print(f"{event.request_id} {event.how.value}: its blocks may be written again")
    child.join()


if __name__ == "__main__":
    main()
