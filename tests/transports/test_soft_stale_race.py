# SPDX-License-Identifier: Apache-2.0
"""Softly offered blocks get new content while several readers read them: provoked on purpose, thousands of times.

Every block of an offer is full of its generation. When the owner has revoked a block, it fills it with another one. A
pull that reports success must hold its ticket's generation and nothing else. Transports that compare guards send no
later generation at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transports.pools import wide
from transports.processes import RemoteWorker

from kvlink import Ticket, Worker
from kvlink.errors import StaleBlocks, StaleReason

NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

READERS = 3
BLOCKS_EACH = 4
FIRST_PACE_US = 150.0
GUARDED = ("loopback", "tcp")


@pytest.mark.usefixtures("quick_turns")
@pytest.mark.parametrize(
    ("attempts", "offers", "block_bytes"),
    [(12_000, 50, 16 << 10), (1_500, 12, 512 << 10)],
    ids=["small", "large"],
)
def test_no_byte_of_new_content_is_ever_accepted(
    transport: str, new_owner: NewOwner, new_reader: NewReader, attempts: int, offers: int, block_bytes: int
) -> None:
    # As many slots as offers: one that pins blocks ends the oldest soft one.
    pool = wide(num_blocks=offers * BLOCKS_EACH, block_bytes=block_bytes)
    owner = new_owner(pool, transports=transport, lease_slots=offers)
    readers = [new_reader(pool, transports=transport) for _ in range(READERS)]
    enough = attempts // 50
    seen: Counter[str] = Counter()
    pace_us = FIRST_PACE_US
    with ThreadPoolExecutor(READERS) as threads:
        while (done := sum(seen.values())) < 4 * attempts:  # more if one outcome is rare here
            if done >= attempts and min(seen["valid"], seen["evicted"]) >= enough:
                break
            tickets = [
                (generation, Ticket.from_text(text))
                for generation, text in owner.do(
                    "churn_soft", count=offers, blocks_each=BLOCKS_EACH, pace_us=pace_us, seed=done
                )
            ]
            batch: Counter[str] = Counter()
            for outcomes in threads.map(_pull_all, readers, [tickets] * READERS, [transport] * READERS):
                batch += outcomes
            seen += batch
            pace_us *= 0.8 if batch["valid"] > READERS * offers // 2 else 1.3
    assert seen["wrong"] == seen["late"] == 0, seen
    assert seen["valid"] >= enough
    assert seen["evicted"] >= enough


def _pull_all(reader: Worker, tickets: list[tuple[int, Ticket]], transport: str) -> Counter[str]:
    words = reader.pool.numpy().view(np.uint64).reshape(reader.pool.layout.num_blocks, -1)
    into = list(range(BLOCKS_EACH))
    outcomes: Counter[str] = Counter()
    for generation, ticket in tickets:
        words[into] = 0
        try:
            reader.pull(ticket, into, timeout_s=10).wait()
        except StaleBlocks as stale:
            outcomes["evicted" if stale.why is StaleReason.EVICTED else "displaced"] += 1
            later = (words[into] > generation) & (words[into] < generation + (1 << 30))
            outcomes["late"] += transport in GUARDED and bool(later.any())
        else:
            outcomes["valid" if (words[into] == generation).all() else "wrong"] += 1
    return outcomes
