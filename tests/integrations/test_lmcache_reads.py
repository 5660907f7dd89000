# SPDX-License-Identifier: Apache-2.0
"""Reads of LMCache's objects: one by one, and at random beside evictions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_servers import NUM_PAGES, PAGE, Server, Table, asking, name
from lmcache_servers import result as named_result
from making import making
from waiting import eventually

from kvlink.errors import KVLinkError, PeerUnreachable, TransferError
from kvlink.integrations.lmcache import pages as pages_module
from kvlink.integrations.lmcache.frames import reply_to
from kvlink.integrations.lmcache.messages import Answer
from kvlink.integrations.lmcache.pages import Name, Object, Pages, Wanted
from kvlink.integrations.lmcache.reads import Reads
from kvlink.ticket import Ticket

THEIRS: list[Object] = [(0, 3 * PAGE), (10 * PAGE, PAGE), (20 * PAGE, 2 * PAGE - 100)]
OURS: list[Object] = [(40 * PAGE, 3 * PAGE), (2 * PAGE, PAGE), (5 * PAGE, 2 * PAGE - 100)]


def ticket_of(answer: bytes) -> Ticket:
    ticket = Answer.from_bytes(answer, "the owner", 3).ticket
    assert ticket is not None
    return ticket


def result(reads: Reads, theirs: list[Object], ours: list[Object]) -> list[bool]:
    return named_result(reads, [Wanted(*each) for each in theirs], ours)


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    with making(Server) as start:
        yield start


def test_objects_arrive_whole_and_nothing_else_is_written(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    expected = reader.memory.copy()
    for (offset, size), theirs in zip(OURS, THEIRS, strict=True):
        whole = -(-size // PAGE) * PAGE
        expected[offset : offset + whole] = owner.memory[theirs[0] : theirs[0] + whole]
    assert result(reader.reads_from(asking(owner)), THEIRS, OURS) == [True] * 3
    assert np.array_equal(reader.memory, expected)
    eventually(lambda: not owner.worker.offers.events() and not len(owner.worker.offers))


def test_an_object_that_is_read_twice_lies_at_both_places(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    theirs = [(PAGE, PAGE), (0, PAGE), (PAGE, PAGE)]
    ours = [(30 * PAGE, PAGE), (31 * PAGE, PAGE), (32 * PAGE, PAGE)]
    assert result(reader.reads_from(asking(owner)), theirs, ours) == [True] * 3
    assert [reader.bytes_of(each) for each in ours] == [owner.bytes_of(each) for each in theirs]


def test_a_long_read_takes_several_leases(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "MAX_BLOCKS", 3)
    owner, reader = start("owner"), start("the reader")
    asks: list[bytes] = []

    def counted(message: bytes, timeout_s: float) -> bytes:
        asks.append(message)
        return owner.grants.answer(message)

    assert result(reader.reads_from(counted), THEIRS, OURS) == [True] * 3
    assert len(asks) == 2
    assert [reader.bytes_of(each) for each in OURS] == [owner.bytes_of(each) for each in THEIRS]
    assert result(reader.reads[0], [(0, 4 * PAGE)], [(0, 4 * PAGE)]) == [False]


def test_a_lease_that_ended_before_the_bytes_were_validated(start: Callable[..., Server]) -> None:
    """The owner may have given the memory to another object by then."""
    owner, reader = start("owner"), start("the reader")

    def too_late(message: bytes, timeout_s: float) -> bytes:
        answer = owner.grants.answer(message)
        owner.worker.abort(ticket_of(answer).request_id)
        return answer

    assert result(reader.reads_from(too_late), THEIRS, OURS) == [False] * 3


def test_one_of_several_leases_fails_alone(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "MAX_BLOCKS", 3)
    owner, reader = start("owner"), start("the reader")
    asks: list[bytes] = []

    def second_refused(message: bytes, timeout_s: float) -> bytes:
        asks.append(message)
        return owner.grants.answer(message if len(asks) == 1 else b"")

    assert result(reader.reads_from(second_refused), THEIRS, OURS) == [True, False, False]


def test_an_owner_that_is_gone_and_its_successor(start: Callable[..., Server]) -> None:
    first, reader = start("owner"), start("the reader")
    owners: list[Server] = [first]

    def ask(message: bytes, timeout_s: float) -> bytes:
        if not owners:
            raise PeerUnreachable("nobody answers")
        return owners[0].grants.answer(message)

    reads = reader.reads_from(ask)
    assert result(reads, THEIRS, OURS) == [True] * 3
    owners.clear()
    first.close()
    assert result(reads, THEIRS, OURS) == [False] * 3
    owners.append(start("owner"))
    owners[0].memory[:] = 7
    assert result(reads, THEIRS, OURS) == [True] * 3
    assert set(reader.bytes_of(OURS[0])) == {7}


@pytest.mark.parametrize(
    "theirs", [(NUM_PAGES * PAGE, PAGE), ((NUM_PAGES - 1) * PAGE, 2 * PAGE), (1, PAGE), (-PAGE, PAGE)]
)
def test_what_is_no_object_of_the_owner_is_refused(start: Callable[..., Server], theirs: Object) -> None:
    owner, reader = start("owner"), start("the reader")
    ours = (0, theirs[1])
    assert result(reader.reads_from(asking(owner)), [theirs], [ours]) == [False]
    assert not len(owner.worker.offers)


def test_sizes_and_places_are_checked_before_anything_is_asked(start: Callable[..., Server]) -> None:
    reader = start("the reader")
    reads = reader.reads_from(lambda message, timeout_s: pytest.fail("was asked"))
    for theirs, ours in [
        ([(0, PAGE)], []),
        ([], [(0, PAGE)]),
        ([(0, PAGE)], [(0, 2 * PAGE)]),
        ([(0, PAGE)], [(NUM_PAGES * PAGE, PAGE)]),
        ([(-1, 0)], [(-1, 0)]),
        ([(None, PAGE)], [(0, PAGE)]),
    ]:
        task = reads.begin([Wanted(*each) for each in theirs], ours)  # type: ignore[arg-type]
        assert reads.query(task) == [False] * len(ours)


def test_an_object_that_does_not_fit_is_alone_in_that(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    reads = reader.reads_from(asking(owner))
    theirs, ours = [*THEIRS, (0, PAGE), (NUM_PAGES * PAGE, PAGE)], [*OURS, (0, 9), (50 * PAGE, PAGE)]
    assert result(reads, theirs, ours) == [True, True, True, False, False]
    assert [reader.bytes_of(each) for each in OURS] == [owner.bytes_of(each) for each in THEIRS]


@pytest.mark.parametrize("page_bytes", [PAGE, 2 * PAGE])
def test_a_greeting_says_whether_two_servers_fit_together(
    start: Callable[..., Server], page_bytes: int
) -> None:
    owner, reader = start("owner", page_bytes=page_bytes), start("the reader")
    reads = reader.reads_from(asking(owner))
    if page_bytes == PAGE:
        reads.greet(60)
    else:
        with pytest.raises(TransferError, match="--l1-align-bytes"):
            reads.greet(60)


def test_a_client_that_is_closed_reads_nothing_more(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    reads = reader.reads_from(asking(owner))
    task = reads.begin([Wanted(*each) for each in THEIRS], OURS)
    reads.close()
    reads.close()
    assert reads.query(task) == []
    assert result(reads, THEIRS, OURS) == [False] * 3
    assert not len(reader.places)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b"1",
        b"{}",
        b'{"version": 4, "reader": "r", "page_bytes": 512, "objects": []}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0.0, 512]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, true]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, 512], [0, 2]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, 1e400]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": 7, "page_bytes": 512, "objects": [[0, 512]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "", "page_bytes": 512, "objects": [[0, 512]]}',
        b"[" * 100_000,
    ],
)
def test_what_no_reader_sends_is_refused(start: Callable[..., Server], message: bytes) -> None:
    owner = start("owner")
    assert owner.grants.answer(message).startswith(b"!")
    assert not len(owner.worker.offers)


def test_memory_without_a_page_is_refused() -> None:
    with pytest.raises(KVLinkError, match="--l1-size-gb"):
        Pages(PAGE, PAGE - 1).pool(1)


SLOTS = [
    (slot * 4 * PAGE, size * PAGE - odd)
    for slot, (size, odd) in enumerate([(1, 0), (3, 0), (2, 7), (4, 1)] * 2)
]
"""Where objects lie, at the owner as at the reader."""

ASKED = -1
"""In place of a slot: the first one that the read concerns."""

slots = st.integers(0, len(SLOTS) - 1)
events = st.tuples(
    st.sampled_from(["nothing"] * 8 + ["free", "replace", "lapse", "clear", "store", "free ours", "message"]),
    st.one_of(slots, st.just(ASKED), st.just(ASKED)),
)
answers = st.sampled_from(
    ["right"] * 16 + ["garbage", "empty", "cut", "flipped", "stale", "raises", "unreachable", "refused"]
)
wanted = st.tuples(slots, st.sampled_from(["now"] * 6 + ["before", "unnamed", "moved", "other size"]), slots)
reads = st.tuples(
    st.just("read"),
    st.lists(wanted, min_size=1, max_size=4),
    answers,
    st.lists(events, min_size=4, max_size=4),
)
steps = st.lists(
    st.one_of(
        reads, reads, st.tuples(st.just("event"), events), st.tuples(st.sampled_from(["reopen", "restart"]))
    ),
    min_size=2,
    max_size=5,
)
frames = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.just(b""),
        st.just(
            b'{"version": 3, "models": {}, "reader": "r", "page_bytes": 512, "owners": [], "objects": []}'
        ),
        st.just(
            b'{"version": 3, "models": {}, "reader": "r", "page_bytes": 512, "owners": [], "objects": [[0, 512]]}'
        ),
        st.just(b"[" * 50_000),
    ),
    max_size=5,
)


class World:
    """An owner, a reader, and what each object's bytes are."""

    def __init__(self) -> None:
        self.reader = Server("the reader", transports="tcp")
        self.numbers = 0
        self.open: Reads | None = None
        self.restart()

    def restart(self) -> None:
        """Starts the owner, or its successor: the same memory and lookups, another worker."""
        if hasattr(self, "owner"):
            self.owner.close()
        self.table = Table()
        self.owner = Server("owner", objects=self.table, transports="tcp")
        self.was: dict[int, tuple[Name, int]] = {}
        self.now: dict[int, tuple[Name, int]] = {}
        for slot in range(len(SLOTS)):
            self.store(slot)

    def store(self, slot: int) -> None:
        self.numbers += 1
        self.now[slot] = name(self.numbers), self.numbers % 251 + 2
        self.owner.memory[SLOTS[slot][0] : sum(SLOTS[slot])] = self.now[slot][1]
        self.table.places[self.now[slot][0]] = SLOTS[slot]

    def free(self, slot: int) -> None:
        """Frees an object in the order in which LMCache does it, and scribbles over its memory."""
        if slot in self.now:
            self.was[slot] = self.now.pop(slot)
            self.table.places.pop(self.was[slot][0])
            self.owner.places.freed(*SLOTS[slot])
            self.owner.memory[SLOTS[slot][0] : sum(SLOTS[slot])] = 0

    def happen(self, event: tuple[str, int], taken: set[int], first: tuple[int, int] = (0, 0)) -> None:
        """`taken` are the reader's slots that it has freed, `first` the slots that ASKED means at both."""
        kind, slot = event
        if slot == ASKED:
            slot = first[kind == "free ours"]
        if kind in ("free", "replace"):
            self.free(slot)
        if kind == "clear":
            for each in range(len(SLOTS)):
                self.free(each)
        if kind in ("replace", "store") and slot not in self.now:
            self.store(slot)
        if kind == "lapse" and slot in self.now:
            self.table.unlocked.add(self.now[slot][0])
        if kind == "free ours":
            self.reader.places.freed(*SLOTS[slot])
            self.reader.memory[SLOTS[slot][0] : sum(SLOTS[slot])] = 1
            taken.add(slot)
        if kind == "message":
            message(self, [b"id", b"", b"x" * slot])


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.reader.close()
    made.owner.close()


def message(world: World, parts: list[bytes]) -> None:
    answer = reply_to(parts, world.owner.grants)
    assert answer is None or (len(answer) == 3 and len(answer[2]) < 4096)


def changed(answer: bytes, how: str, earlier: list[bytes]) -> bytes:
    if how == "garbage":
        return bytes(range(256))
    if how == "cut":
        return answer[:-3]
    if how == "flipped":
        return answer[:-1] + bytes([answer[-1] ^ 1]) if answer else b"?"
    if how == "stale":
        return earlier[0] if earlier else b"="
    return {"empty": b"", "refused": b"!\xff\xff"}.get(how, answer)


def read(world: World, step: tuple[Any, ...], earlier: list[bytes]) -> None:
    _, asked, how, (before, between, after, late) = step
    taken: set[int] = set()
    theirs, ours, expected = [], [], []
    first = asked[0][0], asked[0][2]
    for slot, which, room in asked:
        if room in (each for each, _ in ours):
            continue
        named = (world.was if which == "before" else world.now).get(slot, (name(0), -1))
        where, size = SLOTS[slot]
        theirs.append(
            Wanted(
                where + 4 * PAGE * (which == "moved"),
                size,
                None if which == "unnamed" else named[0],
            )
        )
        ours.append((room, (SLOTS[room][0], size + (which == "other size"))))
        expected.append(named[1])

    def exchange(blob: bytes, timeout_s: float) -> bytes:
        if how == "raises":
            raise ZeroDivisionError("nobody expects it")
        if how == "unreachable":
            raise PeerUnreachable("nobody answers")
        world.happen(before, taken, first)
        happens = [between]
        world.table.between = lambda: happens and world.happen(happens.pop(), taken, first)
        answer = world.owner.grants.answer(blob)
        world.table.between = lambda: None
        world.happen(after, taken, first)
        found = changed(answer, how, earlier)
        earlier.append(answer)
        return found

    for room, (offset, _) in ours:
        world.reader.memory[offset : offset + 4 * PAGE] = 1
        assert SLOTS[room][0] == offset
    if world.open is None:
        world.open = world.reader.reads_from(exchange)
    peer = world.open._peer
    world.open._peer = type(peer)(peer.reader, peer.owner, exchange)
    arrived = named_result(
        world.open, theirs, [each for _, each in ours], lambda: world.happen(late, taken, first)
    )
    assert len(arrived) == len(ours)
    for (room, place), value, each, has_arrived in zip(ours, expected, theirs, arrived, strict=True):
        assert type(has_arrived) is bool
        if room in taken:
            assert not has_arrived
            assert set(world.reader.bytes_of(SLOTS[room])) == {1}, "written after it was freed"
        elif has_arrived:
            assert set(world.reader.bytes_of(place)) == {value}, each


def settle(world: World) -> None:
    """Ends the leases that nobody took, as LMCache does by freeing, and looks for what is left."""
    for slot in range(len(SLOTS)):
        world.free(slot)
        world.store(slot)

    def nothing_left() -> bool:
        world.owner.grants.collect()
        return not (len(world.owner.worker.offers) or len(world.owner.places) or world.owner.grants._held)

    eventually(nothing_left)
    assert not len(world.reader.places)
    assert world.open is None or world.open.num_tasks == 0
    unexpected = [
        kind for kind in world.owner.grants.guard.counts if not kind.startswith(("refused", "lease"))
    ]
    assert not unexpected
    assert world.owner.grants.answer(b"x").startswith(b"!"), "it still answers"


def run(world: World, plan: list[tuple[Any, ...]], parts: list[bytes]) -> None:
    earlier: list[bytes] = []
    message(world, parts)
    for step in plan:
        if step[0] == "read":
            read(world, step, earlier)
        elif step[0] == "event":
            world.happen(step[1], set())
        elif step[0] == "reopen" and world.open is not None:
            world.open.close()
            world.reader.reads.remove(world.open)
            world.open = None
        elif step[0] == "restart":
            world.restart()
    settle(world)


@settings(max_examples=1000)
@given(steps, frames)
def test_reads_are_right_or_fail(world: World, plan: list[tuple[Any, ...]], parts: list[bytes]) -> None:
    run(world, plan, parts)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=int(os.environ.get("KVLINK_TEST_LMCACHE_EXAMPLES") or 100_000))
@given(steps, frames)
def test_reads_are_right_or_fail_for_long(
    world: World, plan: list[tuple[Any, ...]], parts: list[bytes]
) -> None:
    run(world, plan, parts)
