# SPDX-License-Identifier: Apache-2.0
"""A pull that is planned once reads the same blocks under other leases, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transports.pairs import POISON, Pair

from kvlink import StaleBlocks

NewPair = Callable[..., Pair]

OWNER, HERE = [9, 3, 30, 4], [1, 8, 2, 40]


def test_it_reads_the_blocks_of_each_further_ticket(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    for _ in range(4):
        pair.blocks()[HERE] = POISON
        pull = prepared.pull(pair.offer(OWNER))
        assert pull.wait(30)
        assert pair.holds(HERE, OWNER)
        assert pull.stats.settled
        assert pull.stats.num_bytes == len(OWNER) * pair.blocks().shape[1]


def test_it_validates_the_lease_of_its_own_ticket(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    first, ended = pair.offer(OWNER), pair.offer(OWNER)
    prepared = pair.reader.prepare(first, HERE)
    pair.owner.do("abort", request_id=ended.request_id)
    with pytest.raises(StaleBlocks):
        prepared.pull(ended).wait(30)
    assert prepared.pull(first).wait(30)
    assert pair.holds(HERE, OWNER)


def test_it_plans_again_for_a_new_connection(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    for _ in range(2):
        for peer in pair.reader.peers():
            peer.connection.close()
        pair.blocks()[HERE] = POISON
        assert prepared.pull(pair.offer(OWNER)).wait(30)
        assert pair.holds(HERE, OWNER)


def test_blocks_that_are_not_written_yet_are_waited_for(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    ticket = pair.offer(OWNER, ready=0)
    pair.blocks()[HERE] = POISON
    pull = prepared.pull(ticket)
    assert not pull.done()
    pair.owner.do("set_ready", request_id=ticket.request_id, ready=len(OWNER))
    assert pull.wait(30)
    assert pair.holds(HERE, OWNER)
