# SPDX-License-Identifier: Apache-2.0
"""A pull may be prepared for some requests, and takes some tickets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvlink import BlockPool, Geometry, ReadyUnit, StaleBlocks, Ticket, Worker, dense
from kvlink.errors import ConfigError

OWNER, HERE = [9, 3, 30, 4], [1, 8, 2, 40]
LAYOUT = dense(Geometry(num_layers=2, total_heads=2, row_bytes=16, num_blocks=64, block_tokens=4))


class Pair:
    """An owner and a reader in this process."""

    def __init__(self) -> None:
        self.owner = Worker(BlockPool.allocate(LAYOUT), "owner", transports="loopback")
        self.reader = Worker(BlockPool.allocate(LAYOUT), "reader", transports="loopback")
        owner = self.owner.pool.numpy()
        owner[:] = np.random.default_rng(7).integers(0, 256, owner.shape, np.uint8)
        self._count = 0

    def offer(self, blocks: list[int], **options: Any) -> Ticket:
        self._count += 1
        return self.owner.offer(f"request {self._count}", blocks, **options)

    def expect(self, blocks: list[int], layers: tuple[int, int] = (0, 2)) -> None:
        """Asserts that exactly `blocks` of `layers` are in HERE, and nothing is elsewhere."""
        planes = [np.asarray(pool.numpy()).view(np.uint8) for pool in (self.owner.pool, self.reader.pool)]
        theirs, ours = (plane.reshape(-1, LAYOUT.num_blocks, LAYOUT.block_stride) for plane in planes)
        wanted = np.zeros_like(ours)
        first, end = (2 * layer for layer in layers)
        wanted[first:end, HERE] = theirs[first:end, blocks]
        assert np.array_equal(ours, wanted)

    def clear(self) -> None:
        self.reader.pool.numpy()[:] = 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    with made.owner, made.reader:
        yield made


def test_each_ticket_of_the_same_blocks_is_read(pair: Pair) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    for _ in range(3):
        pair.clear()
        pull = prepared.pull(pair.offer(OWNER))
        pull.wait()
        pair.expect(OWNER)
        assert pull.stats.settled
    assert {event.how.name for event in pair.owner.events()} == {"SETTLED"}


def test_only_the_layers_it_was_prepared_for_are_read(pair: Pair) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE, layers=(1, 2))
    prepared.pull(pair.offer(OWNER), settle=False).wait()
    pair.expect(OWNER, (1, 2))
    assert pair.owner.events() == []


def test_a_lease_that_has_ended_is_stale(pair: Pair) -> None:
    first, ended = pair.offer(OWNER), pair.offer(OWNER)
    prepared = pair.reader.prepare(first, HERE)
    pair.owner.abort(ended.request_id)
    with pytest.raises(StaleBlocks):
        prepared.pull(ended).wait()
    prepared.pull(first).wait()


@pytest.mark.parametrize("others", [[9, 3, 30, 5], OWNER[::-1], OWNER[:3], [*OWNER, 6]])
def test_a_ticket_of_other_blocks_is_refused(pair: Pair, others: list[int]) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    with pytest.raises(ConfigError, match="offers other blocks"):
        prepared.pull(pair.offer(others))
    assert not pair.reader.pool.numpy().any()


def test_a_ticket_of_fewer_tokens_is_refused(pair: Pair) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    with pytest.raises(ConfigError, match="offers other blocks"):
        prepared.pull(pair.offer(OWNER, num_tokens=15))


def test_a_ticket_of_another_owner_is_refused(pair: Pair) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    with (
        Worker(BlockPool.allocate(LAYOUT), "other", transports="loopback") as other,
        pytest.raises(ConfigError, match="offers other blocks"),
    ):
        prepared.pull(other.offer("its own", OWNER))


def test_an_owner_that_restarted_is_planned_for_again(pair: Pair) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    contents = pair.owner.pool.numpy().copy()
    pair.owner.close()
    pair.owner = Worker(BlockPool.allocate(LAYOUT), "owner", transports="loopback")
    with pair.owner:
        pair.owner.pool.numpy()[:] = contents[::-1]
        for _ in range(2):  # the first one connects
            pair.clear()
            prepared.pull(pair.offer(OWNER)).wait()
            pair.expect(OWNER)
        assert [prepared._planned[0]] == pair.reader.peers()


@pytest.mark.parametrize(("unit", "ready"), [("BLOCKS", 4), ("LAYERS", 2), ("TOKENS", 16)])
def test_blocks_that_are_not_written_yet_are_waited_for(pair: Pair, unit: str, ready: int) -> None:
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    ticket = pair.offer(OWNER, ready=ready - 1, ready_unit=ReadyUnit[unit])
    pull = prepared.pull(ticket)
    assert not pull.wait(0)
    pair.owner.set_ready(ticket.request_id, ready)
    pull.wait()
    pair.expect(OWNER)


def test_the_list_is_copied(pair: Pair) -> None:
    here = list(HERE)
    prepared = pair.reader.prepare(pair.offer(OWNER), here)
    here.reverse()
    prepared.pull(pair.offer(OWNER)).wait()
    pair.expect(OWNER)


@pytest.mark.parametrize(
    ("into", "more", "says"),
    [
        ([], {}, "one cache group from one owner"),
        ([1, 2], {}, "block"),
        ([1, 8, 2, 64], {}, "64"),
        ([1, 1, 2, 3], {}, "1"),
        (HERE, {"tokens": (0, 10**6)}, "tokens"),
        (HERE, {"layers": (0, 99)}, "layers"),
    ],
)
def test_what_cannot_be_pulled_cannot_be_prepared(
    pair: Pair, into: list[int], more: dict[str, tuple[int, int]], says: str
) -> None:
    ticket = pair.offer(OWNER)
    with pytest.raises(ConfigError, match=says):
        pair.reader.prepare(ticket, into, **more)
    pair.reader.pull(ticket, into=HERE).wait()


def test_a_text_is_no_ticket(pair: Pair) -> None:
    ticket = pair.offer(OWNER)
    prepared, text = pair.reader.prepare(ticket, HERE), ticket.to_text()
    for call in (prepared.pull, lambda given: pair.reader.prepare(given, HERE)):
        with pytest.raises(ConfigError, match=r"Ticket\.from_text") as refused:
            call(text)  # type: ignore[operator]
        assert text not in str(refused.value)
