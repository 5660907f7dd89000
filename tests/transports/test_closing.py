# SPDX-License-Identifier: Apache-2.0
"""Workers that are closed, forked or dropped at the worst moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from transports.pairs import Pair

from kvlink.errors import KVLinkError

NewPair = Callable[..., Pair]

BLOCKS = range(128)  # 2 MiB


def test_closing_while_pulls_connect_or_run(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, num_blocks=130, inline_bytes=0)
    pauses = random.Random(6)
    ended = {True: 0, False: 0}
    for number in range(60):
        reader = pair.another_reader(f"brief-{number}")
        ticket = pair.offer(BLOCKS)
        pull = pair.start(ticket, BLOCKS, reader)
        time.sleep(pauses.uniform(0, 0.006))
        reader.close()
        blocks = pair.blocks(reader)
        blocks[:] = 0x77
        try:
            ended[pull.wait(20)] += 1
        except KVLinkError:
            ended[False] += 1
            pair.owner.do("abort", request_id=ticket.request_id)
        time.sleep(0.001)
        assert (blocks == 0x77).all(), "a byte landed in the pool of a closed worker"
    assert ended[False] > 5
    pair.works()
