# SPDX-License-Identifier: Apache-2.0
"""An owner of LMCache's objects leases objects and not places, and both sides let go of memory before it is freed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from lmcache_servers import NUM_PAGES, PAGE, Server, Table, asking, name, result
from waiting import eventually

from kvlink.errors import ConfigError, KVLinkError, TransferError
from kvlink.integrations.lmcache import pages as pages_module
from kvlink.integrations.lmcache.frames import reply_to
from kvlink.integrations.lmcache.messages import MOST_ASK_BYTES, Answer, Ask
from kvlink.integrations.lmcache.pages import MOST_OBJECTS, Object, Pages, Wanted
from kvlink.integrations.lmcache.places import Places
from kvlink.integrations.lmcache.reads import DEFAULT_S, Reads, read_timeout_s
from kvlink.integrations.models import named_model

HERE: Object = (8 * PAGE, 2 * PAGE)
A, B = name(1), name(2)


class Pair:
    """An owner whose object A lies at HERE, and a reader."""

    def __init__(self) -> None:
        self.table = Table()
        self.owner = Server("owner", objects=self.table, transports="tcp")
        self.reader = Server("the reader", transports="tcp")
        self.reads = self.reader.reads_from(asking(self.owner))
        self.store(A, 0xAA)

    def store(self, name: tuple[str, str, int, int, str], value: int, where: Object = HERE) -> None:
        self.owner.memory[where[0] : sum(where)] = value
        self.table.places[name] = where

    def free(self, name: tuple[str, str, int, int, str]) -> None:
        self.owner.places.freed(*self.table.places.pop(name))

    def replace(self) -> None:
        """Gives A's place to B, as LMCache does after an eviction."""
        if A in self.table.places:
            self.free(A)
            self.store(B, 0xBB)

    def read(self, *wanted: Wanted, reads: Reads | None = None) -> list[bool]:
        ours = [(index * 4 * PAGE, each.size) for index, each in enumerate(wanted)]
        return result(self.reads if reads is None else reads, list(wanted), ours)

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_an_object_is_read_by_its_key(pair: Pair) -> None:
    pair.store(B, 0xBB, (0, PAGE))
    assert pair.read(Wanted(*HERE, A), Wanted(0, PAGE, B)) == [True, True]
    assert set(pair.reader.bytes_of((0, 2 * PAGE))) == {0xAA}
    assert set(pair.reader.bytes_of((4 * PAGE, PAGE))) == {0xBB}
    eventually(lambda: pair.owner.grants.collect() is None and not len(pair.owner.places))


def test_what_took_its_place_is_not_read(pair: Pair) -> None:
    pair.replace()
    assert pair.read(Wanted(*HERE, A), Wanted(*HERE, B)) == [False, True]
    assert set(pair.reader.bytes_of((4 * PAGE, 2 * PAGE))) == {0xBB}


def test_an_object_without_a_read_lock_is_not_read(pair: Pair) -> None:
    pair.table.unlocked.add(A)
    assert pair.read(Wanted(*HERE, A)) == [False]


def test_an_ask_without_a_key_gets_only_the_first_object_of_a_place(pair: Pair) -> None:
    assert pair.read(Wanted(*HERE)) == [True]
    pair.replace()
    assert pair.read(Wanted(*HERE)) == [False]


def test_an_object_that_is_replaced_between_lookup_and_lease_is_not_read(pair: Pair) -> None:
    pair.table.between = pair.replace
    assert pair.read(Wanted(*HERE, A)) == [False]
    assert not len(pair.owner.places)
    assert pair.owner.grants.guard.counts["refused Cancelled"] == 1


@pytest.mark.parametrize("freed", [HERE, (0, NUM_PAGES * PAGE), (9 * PAGE, 1)])
def test_a_lease_ends_before_its_memory_is_freed(pair: Pair, freed: Object) -> None:
    def late(message: bytes, timeout_s: float) -> bytes:
        answer = pair.owner.grants.answer(message)
        pair.owner.places.freed(*freed)
        pair.owner.memory[HERE[0] : sum(HERE)] = 0xBB
        return answer

    assert pair.read(Wanted(*HERE, A), reads=pair.reader.reads_from(late)) == [False]
    pair.owner.grants.collect()
    assert not len(pair.owner.places)


def test_a_lease_outlives_what_is_freed_beside_it(pair: Pair) -> None:
    def beside(message: bytes, timeout_s: float) -> bytes:
        answer = pair.owner.grants.answer(message)
        pair.owner.places.freed(0, HERE[0])
        pair.owner.places.freed(sum(HERE), PAGE)
        return answer

    assert pair.read(Wanted(*HERE, A), reads=pair.reader.reads_from(beside)) == [True]


def test_an_object_whose_lookup_raises_is_alone_in_that(pair: Pair) -> None:
    pair.store(B, 0xBB, (0, PAGE))
    looked_up = pair.table.problem

    def problem(wanted: Wanted) -> str:
        if wanted.name == A:
            raise LookupError("nobody expects it")
        return looked_up(wanted)

    pair.table.problem = problem  # type: ignore[method-assign]
    assert pair.read(Wanted(*HERE, A), Wanted(0, PAGE, B)) == [False, True]
    assert pair.owner.grants.guard.counts == {"lookup of an object": 1}


@pytest.mark.parametrize("moment", ["before the pull", "while it waits"])
def test_nothing_arrives_in_memory_that_the_reader_has_freed(pair: Pair, moment: str) -> None:
    ours, asked, freed = (0, 2 * PAGE), threading.Event(), threading.Event()

    def answer(message: bytes, timeout_s: float) -> bytes:
        asked.set()
        if moment == "while it waits":
            freed.wait()
        found = pair.owner.grants.answer(message)
        if moment == "before the pull":
            pair.reader.places.freed(*ours)
        return found

    reads = pair.reader.reads_from(answer)
    pair.reader.memory[: 2 * PAGE] = 7
    task = reads.begin([Wanted(*HERE, A)], [ours])
    if moment == "while it waits":
        asked.wait()
        pair.reader.places.freed(*ours)
    freed.set()
    eventually(lambda: reads.query(task) == [False])
    assert set(pair.reader.bytes_of(ours)) == {7}
    assert not len(pair.reader.places)


def test_memory_whose_reads_cannot_be_ended_is_not_freed() -> None:
    places = Places(Pages(PAGE, PAGE * NUM_PAGES))

    def fails(_: object) -> None:
        raise RuntimeError("nobody expects it")

    hold = places.hold(np.array([1, 2, 2], np.uint32))
    hold.begin(lambda: None, fails)
    with pytest.raises(RuntimeError):
        places.freed(PAGE, 1)
    places.release(hold)
    places.release(hold)
    places.freed(PAGE, 1)


def test_an_owner_that_never_answers_ends_no_later_than_the_read(pair: Pair) -> None:
    """Whatever the socket does: the result does not depend on it."""
    released = threading.Event()

    def silent(message: bytes, timeout_s: float) -> bytes:
        released.wait()
        return pair.owner.grants.answer(message)

    reads = pair.reader.reads_from(silent, timeout_s=0)
    tasks = [reads.begin([Wanted(*HERE, A)], [(0, 2 * PAGE)]) for _ in range(2)]
    assert [reads.query(task) for task in tasks] == [[False], [False]]
    assert not len(pair.reader.places)
    released.set()


def test_a_read_that_nobody_asks_for_is_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlink.integrations.lmcache import reads as module

    monkeypatch.setattr(module, "_FORGOTTEN_S", -1e9)
    reads = pair.reader.reads_from(asking(pair.owner))
    forgotten = reads.begin([Wanted(*HERE, A)], [(0, 2 * PAGE)])
    reads.begin([], [])
    assert (reads.query(forgotten), reads.num_tasks, len(pair.reader.places)) == ([], 1, 0)


BAD_ANSWERS = {
    "nothing": b"",
    "garbage": b"\xff" * 40,
    "no ticket": b"=" + bytes(4),
    "too many refused": b"=" + (9).to_bytes(4, "little") + bytes(36),
    "a number of refused that is not there": b"=\xff\xff\xff\xff",
    "an object that was not asked for is refused": b"=\x01\0\0\0\x05\0\0\0",
    "half a number": b"=\x01",
    "surrogates": b"!\xed\xa0\x80",
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_of_another_kind_fails_the_read(pair: Pair, answer: bytes) -> None:
    reads = pair.reader.reads_from(lambda message, timeout_s: answer)
    assert pair.read(Wanted(*HERE, A), reads=reads) == [False]


@pytest.mark.parametrize("raised", [OSError("no socket"), KVLinkError("no owner"), RecursionError()])
def test_an_exchange_that_raises_fails_the_read(pair: Pair, raised: Exception) -> None:
    def exchange(message: bytes, timeout_s: float) -> bytes:
        raise raised

    assert pair.read(Wanted(*HERE, A), reads=pair.reader.reads_from(exchange)) == [False]


def test_a_ticket_for_other_objects_fails_the_read(pair: Pair) -> None:
    pair.store(B, 0xBB, (0, PAGE))
    answers: list[bytes] = []

    def stale(message: bytes, timeout_s: float) -> bytes:
        answers.append(pair.owner.grants.answer(message))
        return answers[0]

    reads = pair.reader.reads_from(stale)
    assert pair.read(Wanted(*HERE, A), reads=reads) == [True]
    eventually(lambda: pair.owner.grants.collect() is None and not len(pair.owner.places))
    assert pair.read(Wanted(*HERE, A), reads=reads) == [False], "settled, so its lease has ended"
    assert pair.read(Wanted(0, PAGE, B), reads=reads) == [False], "another number of pages"


def test_an_answer_is_what_was_written() -> None:
    everything = Answer(frozenset({0, 1}), None)
    assert Answer.from_bytes(everything.to_bytes(), "the owner", 2) == everything
    with pytest.raises(TransferError, match="refused"):
        Answer.from_bytes(b"!why", "the owner", 2)
    with pytest.raises(ConfigError, match="no answer of kvlink"):
        Answer.from_bytes(everything.to_bytes(), "the owner", 3)


def test_an_ask_is_what_was_written() -> None:
    wanted = [Wanted(0, PAGE), Wanted(PAGE, PAGE, A), Wanted(2 * PAGE, PAGE, ("ff", "other", 3, 1, "salt"))]
    ask = Ask("10.0.0.1:7600", PAGE, wanted)
    read = Ask.from_bytes(ask.to_bytes())
    assert replace(read, models={}) == ask
    assert read.models == {name: named_model(name) for name in (A[1], "other")}


def ask_with(**changed: object) -> bytes:
    body: dict[str, object] = json.loads(Ask("r", PAGE, [Wanted(*HERE, A)]).to_bytes())
    return json.dumps(body | changed).encode()


@pytest.mark.parametrize("models", [{A[1]: "0" * 16}, {}], ids=["another", "none"])
def test_objects_of_another_model_under_the_same_name_are_refused(pair: Pair, models: dict[str, str]) -> None:
    whole = Answer.from_bytes(pair.owner.grants.answer(ask_with()), "owner", 1)
    assert not whole.refused
    answer = Answer.from_bytes(pair.owner.grants.answer(ask_with(models=models)), "owner", 1)
    assert answer.refused == {0}
    assert pair.owner.grants.guard.counts["another model"] == 1


BAD_ASKS = {
    "a version that is none": ask_with(version=None),
    "a field of a later version": ask_with(later=1),
    "deep": ask_with().replace(b'"r"', b"[" * 60_000),
    "deep and closed": ask_with(reader=None).replace(b"null", b"[" * 5000 + b"]" * 5000),
    "surrogate": ask_with(reader="\ud800"),
    "the text of a ticket": ask_with(reader="S1ZUM" + "A" * 95),
    "an index that is none": ask_with(objects=[[0, 1, "0", "aa"]]),
    "an index of no owner": ask_with(objects=[[0, 1, 9, "aa"]]),
    "a negative index": ask_with(objects=[[0, 1, -1, "aa"]]),
    "a hash that is none": ask_with(objects=[[0, 1, 0, "no hash"]]),
    "a hash of other letters": ask_with(objects=[[0, 1, 0, "\ud800"]]),
    "a long hash": ask_with(objects=[[0, 1, 0, "aa" * 9999]]),
    "an offset beyond 64 bits": ask_with(objects=[[1 << 70, 1]]),
    "an offset of many digits": ask_with().replace(b"[[", b"[[" + b"9" * 5000),
    "infinity": ask_with(objects=[[float("inf"), 1]]),
    "more objects than an ask has": ask_with(objects=[[0, PAGE]] * (MOST_OBJECTS + 1)),
    "more owners than an ask has": ask_with(owners=[["m", 0, 0, ""]] * (MOST_OBJECTS + 1)),
    "more bytes than an ask has": b" " * (MOST_ASK_BYTES + 1),
    "models that are none": ask_with(models=[]),
    "a model without digits": ask_with(models={"m": 7}),
    "an owner that is none": ask_with(owners=[7]),
    "NUL": b"\0" * 8,
}


@pytest.mark.parametrize("message", BAD_ASKS.values(), ids=BAD_ASKS)
def test_what_no_reader_sends_is_refused(pair: Pair, message: bytes) -> None:
    answer = pair.owner.grants.answer(message)
    assert answer.startswith(b"!"), answer
    assert b"S1ZUM" not in answer
    assert not len(pair.owner.worker.offers)
    assert not len(pair.owner.places)
    assert {kind.split()[0] for kind in pair.owner.grants.guard.counts} == {"refused"}


def test_an_ask_of_all_memory_many_times_is_refused_without_that_memory() -> None:
    pages = Pages(1, 1 << 40)  # as a server of 1 TiB would have it: no page of it is touched

    class Never:
        def __getattr__(self, name: str) -> object:
            return {"events": list}.get(name) or pytest.fail(f"{name} was used")

    from kvlink.integrations.lmcache.grants import Grants

    grants = Grants(Never(), pages, Never(), None)  # type: ignore[arg-type]
    ask = Ask("r", 1, [Wanted(0, 1 << 20)] * MOST_OBJECTS)
    assert b"pages" in grants.answer(ask.to_bytes())


@pytest.mark.parametrize(
    ("frames", "answered"),
    [
        ([], False),
        ([b"id"], False),
        ([b"id", b"x"], False),
        ([b"id", b"x", b"y"], False),
        ([b"id", b"", b"{}"], True),
        ([b"id", b"", b"{}", b"{}"], True),
        ([b"id", b""] + [b""] * 1000, True),
    ],
)
def test_frames_of_any_number_are_answered_or_dropped(
    pair: Pair, frames: list[bytes], answered: bool
) -> None:
    answer = reply_to(frames, pair.owner.grants)
    assert (answer is not None) == answered
    if answer is not None:
        assert answer[:2] == [b"id", b""]
        assert answer[2].startswith(b"!")


def test_a_read_that_cannot_be_ended_keeps_its_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is there all the same, and the other parts of it are ended."""
    monkeypatch.setattr(pages_module, "MOST_OBJECTS", 1)
    pair.store(B, 0xBB, (0, PAGE))
    task = pair.reads.begin([Wanted(*HERE, A), Wanted(0, PAGE, B)], [(0, 2 * PAGE), (4 * PAGE, PAGE)])
    first = pair.reads._tasks[task].parts[0]
    eventually(lambda: first.has_ended())

    def fails() -> None:
        raise RuntimeError("nobody expects it")

    first.hold._end = fails
    eventually(lambda: pair.reads.query(task) == [True, True])
    assert pair.reads.guard.counts == {"end of a read": 1}
    assert len(pair.reader.places) == 1
    with pytest.raises(RuntimeError):
        pair.reader.places.freed(0, PAGE)
    first.hold._end = None


def test_refusals_are_counted_and_logged_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        pair.owner.grants.answer(b"x")
    assert pair.owner.grants.guard.counts == {"refused ConfigError": 5}
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


@pytest.mark.parametrize(
    ("load_timeout_s", "configured_s", "expected_s"), [(30, None, DEFAULT_S), (5, None, 4), (30, 29, 29)]
)
def test_a_read_ends_before_lmcache_gives_up(
    load_timeout_s: float, configured_s: float | None, expected_s: float
) -> None:
    assert read_timeout_s(load_timeout_s, configured_s) == expected_s


@pytest.mark.parametrize(
    ("load_timeout_s", "configured_s"),
    [(5, 20), (5, 5), (5, 4.5), (1, None), (0, None), (float("nan"), None)],
)
def test_times_that_cannot_be_kept_are_refused(load_timeout_s: float, configured_s: float | None) -> None:
    with pytest.raises(ConfigError, match="--p2p-load-timeout"):
        read_timeout_s(load_timeout_s, configured_s)
