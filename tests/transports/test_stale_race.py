# SPDX-License-Identifier: Apache-2.0
"""Blocks that are freed and overwritten while they are read: provoked on purpose, thousands of times.

Every block of an offer is full of its generation; the moment its lease ends it is full of the next. A pull that
reports success must hold its ticket's generation and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from transports.pools import wide
from transports.processes import RemoteWorker

from kvlink import Ticket, Worker
from kvlink.errors import PeerUnreachable, StaleBlocks

NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

ATTEMPTS = 2_500
MOST_ATTEMPTS = 4 * ATTEMPTS  # on a machine where one outcome is rare
ENOUGH = ATTEMPTS // 50  # of each outcome
OFFERS = 50
BLOCKS_EACH = 4
POOL = wide(num_blocks=OFFERS * BLOCKS_EACH)
FIRST_PACE_US = 150.0


@pytest.mark.usefixtures("quick_turns")
@pytest.mark.parametrize("expire", [False, True], ids=["abort", "expire"])
def test_no_stale_byte_is_ever_accepted(
    transport: str, expire: bool, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(POOL, transports=transport), new_reader(POOL, transports=transport)
    words = reader.pool.numpy().view(np.uint64).reshape(POOL.num_blocks, -1)
    into = list(range(BLOCKS_EACH))
    seen: Counter[str] = Counter()
    pace_us = FIRST_PACE_US
    while (done := sum(seen.values())) < MOST_ATTEMPTS:
        if done >= ATTEMPTS and min(seen["valid"], seen["stale"]) >= ENOUGH:
            break
        batch: Counter[str] = Counter()
        tickets = owner.do(
            "churn",
            count=OFFERS,
            blocks_each=BLOCKS_EACH,
            pace_us=pace_us,
            expire=expire,
            seed=done,
        )
        for generation, text in tickets:
            batch[_pull(reader, Ticket.from_text(text), into, words, generation)] += 1
        seen += batch
        # The race is tightest where about half of the leases end too early.
        pace_us *= 1.3 if batch["stale"] > OFFERS // 2 else 0.8
    assert seen["wrong"] == 0
    assert seen["valid"] >= ENOUGH
    assert seen["stale"] >= ENOUGH


def _pull(
    reader: Worker, ticket: Ticket, into: list[int], words: npt.NDArray[np.uint64], generation: int
) -> str:
    words[into] = 0
    try:
        reader.pull(ticket, into, settle=False, timeout_s=10).wait()
    except (StaleBlocks, PeerUnreachable):  # expired readers of tcp are cut off as well
        return "stale"
    return "valid" if (words[into] == generation).all() else "wrong"
