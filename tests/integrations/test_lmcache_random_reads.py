# SPDX-License-Identifier: Apache-2.0
"""Random messages, reads and events between two of LMCache's servers, over real workers and loopback.

Whatever happens, in whatever order: every message is answered or dropped, every read ends with a result for each of its
objects, what is reported as read has the bytes of its object, freed memory is not written to, and no lease is left.
KVLINK_TEST_LMCACHE_EXAMPLES sets the number of examples of the long run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_servers import PAGE, Server, Table, name, result
from waiting import eventually

from kvlink.errors import PeerUnreachable
from kvlink.integrations.lmcache.frames import reply_to
from kvlink.integrations.lmcache.pages import Name, Wanted
from kvlink.integrations.lmcache.reads import Reads

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
    arrived = result(world.open, theirs, [each for _, each in ours], lambda: world.happen(late, taken, first))
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
