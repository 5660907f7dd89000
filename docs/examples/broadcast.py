# SPDX-License-Identifier: Apache-2.0
"""Brings one request to four workers through each other. Run: python broadcast.py"""

from __future__ import annotations

from contextlib import ExitStack

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=4, total_heads=2, row_bytes=128, num_blocks=64))
BLOCKS = list(range(48))
READERS = 4


def main() -> None:
    """Offers 48 blocks to four workers, each of which forwards what it has validated."""
    with ExitStack() as opened:
        owner, *workers = [
            opened.enter_context(kvlink.Worker(kvlink.BlockPool.allocate(LAYOUT), name))
            for name in ("owner", *(f"reader-{number}" for number in range(READERS)))
        ]
        owner.pool.numpy()[:] = 7
        seats = owner.split(owner.offer("prefix", BLOCKS, readers=READERS))
        parents = kvlink.broadcast_parents(
            READERS
        )  # reader 0 reads from the owner, reader 1 from reader 0, ...
        relays: list[kvlink.Relay] = []
        for number, parent in enumerate(parents):
            source = seats[number] if parent < 0 else relays[parent].ticket
            assert source is not None
            relays.append(
                workers[number].relay(
                    source,
                    into=BLOCKS,
                    readers=parents.count(number),
                    fallback=None if parent < 0 else seats[number],
                )
            )
        for relay in relays:
            relay.wait()
        assert all((worker.pool.numpy().reshape(8, 64, -1)[:, BLOCKS] == 7).all() for worker in workers)
        event = next(owner.watch_events_blocking())
        print(f"{READERS} workers have {event.request_id}, and its offer is {event.how.value}")


if __name__ == "__main__":
    main()
