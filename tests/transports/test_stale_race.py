# SPDX-License-Identifier: Apache-2.0
"""Blocks that are overwritten while they are read, and pulls that were given up: no wrong byte is ever taken."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from transports.pairs import Pair
from transports.pools import wide
from transports.processes import PeerProcess, RemoteWorker

from kvlink import Ticket, Worker
from kvlink.errors import Cancelled, PeerUnreachable, StaleBlocks, StaleReason, TransferError, TransferTimeout

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


READERS = 3
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


NewPair = Callable[..., Pair]

_OVERWRITTEN = 0x77
_EACH = 128  # blocks of one pull, 2 MiB
_PLACES = 16  # pulls whose destinations are watched at the same time


class Watch:
    """Overwrites what pulls wrote or did not write, and sees later whether it stayed so."""

    def __init__(self, pair: Pair) -> None:
        self._blocks = pair.blocks()
        self._next = 0
        self._watched: list[range] = []

    def next_place(self) -> range:
        self._next = (self._next + 1) % _PLACES
        if self._next == 0:
            self.check()
        return range(self._next * _EACH, (self._next + 1) * _EACH)

    def overwrite(self, place: range) -> None:
        self._blocks[place.start : place.stop] = _OVERWRITTEN
        self._watched.append(place)

    def check(self) -> None:
        for place in self._watched:
            assert (self._blocks[place.start : place.stop] == _OVERWRITTEN).all(), "a late byte landed"
        self._watched.clear()


def wide_pair(transport: str, new_pair: NewPair, **options: object) -> Pair:
    return new_pair(transport, num_blocks=_EACH * _PLACES + 2, **options)


def test_cancelled_pulls_write_no_more(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0, fault="delay-data=300us@every:1")
    pair.works()
    pauses = random.Random(1)
    watch = Watch(pair)
    num_cancelled = 0
    for _ in range(300):
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place)
        time.sleep(pauses.uniform(0, 0.001))
        pull.cancel()
        watch.overwrite(place)
        try:
            pull.wait()
        except Cancelled:
            num_cancelled += 1
            pair.owner.do("abort", request_id=ticket.request_id)
    time.sleep(0.1)
    watch.check()
    assert num_cancelled > 20


def test_pulls_cancelled_while_they_connect_write_nothing(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0)
    pauses = random.Random(2)
    watch = Watch(pair)
    pace_s = 0.005
    num_cancelled = 0
    for _ in range(300):
        for known in pair.reader.peers():
            known.connection.close()
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place)
        time.sleep(pauses.uniform(0.3, 1.0) * pace_s)
        pull.cancel()
        watch.overwrite(place)
        try:
            pull.wait()
            pace_s *= 0.9
        except Cancelled:
            num_cancelled += 1
            pace_s *= 1.1  # about half of them are to be in time
            pair.owner.do("abort", request_id=ticket.request_id)
    time.sleep(0.1)
    watch.check()
    assert num_cancelled > 20


def test_pulls_that_time_out_write_no_more(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0, fault="delay=1ms@every:2")
    pair.works()
    pauses = random.Random(3)
    watch = Watch(pair)
    num_failed = 0
    for _ in range(200):
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place, timeout_s=pauses.uniform(0.0001, 0.003))
        try:
            pull.wait(20)
        except TransferError as error:
            assert isinstance(error, (TransferTimeout, PeerUnreachable))
            num_failed += 1
            pair.owner.do("abort", request_id=ticket.request_id)
        watch.overwrite(place)
    time.sleep(0.1)
    watch.check()
    assert num_failed > 20
    pair.works()


def test_an_owner_that_was_stopped_brings_nothing_when_it_goes_on(
    new_process: Callable[..., PeerProcess], new_pair: NewPair
) -> None:
    """tcp: what was asked for before the stop is still under way when the owner wakes up."""
    process = new_process()
    pair = wide_pair("tcp", new_pair, at=process, inline_us=0)
    pauses = random.Random(4)
    watch = Watch(pair)
    num_timeouts = 0
    for count in range(100):
        pair.works()  # connected again
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        if count % 2:
            process.stop()
        pull = pair.start(ticket, place, timeout_s=0.03)
        process.stop()
        try:
            pull.wait(20)
        except TransferTimeout:
            num_timeouts += 1
        watch.overwrite(place)
        process.go_on()
        time.sleep(pauses.uniform(0, 0.005))
    time.sleep(0.1)
    watch.check()
    assert num_timeouts >= 50
