# SPDX-License-Identifier: Apache-2.0
"""Prefill says how long it still takes, and decode waits with its pull as long as that costs nothing."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from making import making

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from vllm_server import ASK_PREFILL, Server, request  # isort: skip

from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError
from kvlink.integrations.request_guard import RequestGuard
from kvlink.integrations.vllm.model.caches import TokenUnit
from kvlink.integrations.vllm.prefill.outgoing import Chunk, Outgoing
from kvlink.integrations.vllm.stream_decisions import StreamDecisions
from kvlink.integrations.vllm.wire.handoff import Handoff, Owner, RankInfo
from kvlink.integrations.vllm.wire.handoff_parts import ANNOUNCED, STREAM, Part
from kvlink.integrations.vllm.wire.stream_timing import LoadCost, Remaining
from kvlink.ticket import LeaseSeat

PROMPT = list(range(100, 114))  # three whole blocks of 4 and a half
PREFILL = ASK_PREFILL | {STREAM: "s"}
DECODE = {"do_remote_prefill": True, STREAM: "s"}
OWNER = Owner("p-0", 1, "127.0.0.1:1")
GUARD = RequestGuard(logging.getLogger(__name__))
OWN = [RankInfo(OWNER, (4,), (1,), ((TokenUnit(),),))]
SEATS = (LeaseSeat(1, 1000, 2000),)
AT_ONCE, NEVER = LoadCost(0, 0), LoadCost(1e6, 0)


def handoff(num_blocks: int, num_tokens: int) -> Handoff:
    blocks = (array("I", range(1, num_blocks + 1)),)
    return Handoff("r", (OWNER,), SEATS, blocks, (4,), num_tokens, "0" * 32, 30.0)


class Announced:
    """Takes the place of the coordinator."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def announce(self, name: str, number: int, owner: Owner, ttl_s: float, part: bytes, trace: Any) -> Any:
        self.parts.append(Part.from_bytes(part))
        accepted: Future[None] = Future()
        accepted.set_result(None)
        return accepted


class Prefill:
    """The announcing side at times that the test gives."""

    def __init__(self, from_tokens: int = 0) -> None:
        self.now = 0.0
        self.told = Announced()
        self.decisions = StreamDecisions()
        self.request = request("r", PROMPT, PREFILL)
        told: Any = self.told
        self.outgoing = Outgoing(told, from_tokens, [True], 30.0, self.decisions, GUARD, lambda: self.now)
        self.outgoing.begin(self.request, SEATS, ([1, 2, 3, 4],), OWN[0], lambda: "0" * 32)

    def schedule(self, num_tokens: int, now: float) -> None:
        self.now = now
        self.outgoing.advance({"r": Chunk((), num_tokens)}, OWN, self._write)
        self.request.num_computed_tokens += num_tokens

    def held(self, now: float) -> None:
        self.now = now
        self.outgoing.held({"r": 1}, OWN, self._write)

    def _write(self, asked: Any, seats: Any, blocks: Any, num_tokens: int, prompt: str) -> Handoff:
        return handoff(len(blocks[0]), num_tokens)


def test_prefill_says_how_long_it_still_takes() -> None:
    prefill = Prefill()
    prefill.schedule(6, now=10)
    prefill.held(now=13)  # half a second a token
    prefill.schedule(4, now=14)  # by then two thirds
    prefill.schedule(4, now=15)  # a quarter
    after_6, after_10, whole = [part.remaining for part in prefill.told.parts]
    assert after_6 == Remaining(8 * 3 / 6, 0)
    assert after_10 == Remaining(8 * 4 / 6, 4 * 4 / 6)
    assert whole == Remaining(4 * 1 / 4, 4 * 1 / 4)


def test_a_chunk_that_is_scheduled_ahead_is_not_taken_for_computed() -> None:
    """Asynchronous scheduling: the second chunk is scheduled before the first one's end is known."""
    prefill = Prefill()
    prefill.schedule(6, now=0)
    prefill.schedule(4, now=3)
    prefill.held(now=3.5)
    assert [part.remaining for part in prefill.told.parts] == [Remaining(4.0, 2.0)]


@pytest.mark.parametrize(("from_tokens", "expected"), [(0, "one_chunk"), (100, "short")])
def test_prefill_says_why_it_announced_nothing(from_tokens: int, expected: str) -> None:
    prefill = Prefill(from_tokens)
    prefill.schedule(len(PROMPT), now=0)
    assert prefill.outgoing.finish("r", OWN[0], handoff(4, 14)) == ""
    assert prefill.decisions.take() == {expected: 1}
    assert prefill.decisions.take() == {}


def test_nothing_is_announced_behind_the_last_chunk() -> None:
    """The next step computes the second token of an answer."""
    prefill = Prefill()
    prefill.schedule(6, now=0)
    prefill.held(now=1)
    prefill.schedule(8, now=2)
    assert [part.last for part in prefill.told.parts] == [False, True]
    assert prefill.outgoing.advance({"r": Chunk((), 1)}, OWN, prefill._write) == {}
    assert len(prefill.told.parts) == 2


@pytest.mark.parametrize("remaining", [None, Remaining(3.5, 1.25)])
def test_times_travel_with_a_part(remaining: Remaining | None) -> None:
    part = Part(handoff(2, 8), 14, last=False, written=False, remaining=remaining)
    assert Part.from_bytes(part.to_bytes()) == part


@pytest.mark.parametrize("times", [(1.0, 2.0), (-1.0, -1.0), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_impossible_times_are_refused(times: tuple[float, float]) -> None:
    part = Part(handoff(2, 8), 14, last=False, written=False, remaining=Remaining(*times))
    with pytest.raises(ConfigError, match="malformed"):
        Part.from_bytes(part.to_bytes())


def part_of(num_tokens: int, *, last: bool = False, remaining: Remaining | None = None) -> Part:
    return Part(handoff(2, num_tokens), 14, last=last, written=False, remaining=remaining)


def test_decisions_are_counted_and_the_oldest_server_is_forgotten() -> None:
    decisions = StreamDecisions()
    lasting = part_of(8, remaining=Remaining(5.0, 1.0))
    assert decisions.begins("x", lasting)
    decisions.learn({"p-0": AT_ONCE})
    assert not decisions.begins("x", lasting)
    assert decisions.begins("x", part_of(14, last=True, remaining=Remaining(1.0, 1.0)))
    decisions.learn({"p-0": NEVER})
    assert decisions.begins("x", lasting)
    assert decisions.take() == {"unknown": 1, "last_chunk": 1, "pays": 1}
    decisions.learn({f"q-{number}": AT_ONCE for number in range(2000)})
    assert decisions.begins("x", lasting)
    assert decisions.take() == {"unknown": 1}


def test_always_does_not_wait() -> None:
    decisions = StreamDecisions(always=True)
    decisions.learn({"p-0": AT_ONCE})
    assert decisions.begins("x", part_of(8, remaining=Remaining(5.0, 1.0)))
    assert decisions.take() == {"always": 1}


# The following tests have real workers and a coordinator.

NewServer = Callable[..., Server]


@pytest.fixture
def new(coordinator: Coordinator) -> Iterator[NewServer]:
    with making(partial(Server, coordinator=coordinator.address)) as new:
        yield new


def same(decode: Server, prefill: Server, ours: int, theirs: int) -> bool:
    return decode.block("layer.0", ours).equal(prefill.block("layer.0", theirs))


def asked_twice(prefill: Server, decode: Server) -> tuple[Any, Any]:
    """Decode waits for a request of which prefill has announced 6 and 10 of 14 tokens."""
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9, 1, 2])
    prefill.scheduler._outgoing._clock = iter(range(0, 100, 10)).__next__
    prefill.compute(asks, 6, writes=[3, 9])
    prefill.compute(asks, 4, writes=[9, 1])
    return asks, waits


def heard_parts(decode: Server, waits: Any, number: int) -> bool:
    awaits = decode.awaits(waits)
    return awaits and len(decode.scheduler.incoming._requests["x"].parts) == number


def test_decode_waits_for_the_last_chunk_if_all_comes_in_time_then(new: NewServer) -> None:
    prefill, decode = new("p"), new("d")
    decode.scheduler.decisions.learn({"p-0": AT_ONCE})
    asks, waits = asked_twice(prefill, decode)
    decode.step_until(lambda: heard_parts(decode, waits, 2))
    prefill.compute(asks, 4, writes=[1, 2])
    assert decode.load_when_announced(waits, [5, 6, 7, 8]) == 14
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert all(same(decode, prefill, *pair) for pair in ((5, 3), (6, 9), (7, 1), (8, 2)))
    answer = prefill.end(asks, [3, 9, 1, 2])
    assert answer
    assert answer[ANNOUNCED] == "s"
    assert decode.scheduler.decisions.take() == {"last_chunk": 1}
    costs = decode.ranks[0].take_costs()
    assert set(costs) == {"p-0"}
    assert costs["p-0"].predict_s(14) > 0
    assert not decode.ranks[0].take_costs()


def test_decode_begins_early_if_the_transfer_takes_long(new: NewServer) -> None:
    prefill, decode = new("p"), new("d")
    decode.scheduler.decisions.learn({"p-0": NEVER})
    _, waits = asked_twice(prefill, decode)
    assert decode.load_when_announced(waits, [5, 6, 7, 8]) == 14
    decode.step_until(lambda: same(decode, prefill, 5, 3))
    assert decode.scheduler.decisions.take() == {"pays": 1}


def test_a_request_that_ends_while_it_waits_gives_the_blocks_back(
    new: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = new("p"), new("d")
    left: list[Handoff] = []
    monkeypatch.setattr(decode.scheduler.incoming._remote, "release_later", left.append)
    decode.scheduler.decisions.learn({"p-0": AT_ONCE})
    _, waits = asked_twice(prefill, decode)
    decode.step_until(lambda: heard_parts(decode, waits, 2))
    decode.scheduler.finished(waits, ([],), False)
    assert [handoff.request_id for handoff in left] == ["r"]


def test_a_prefill_that_ends_while_decode_waits_fails_the_load(new: NewServer) -> None:
    prefill, decode = new("p"), new("d")
    decode.scheduler.decisions.learn({"p-0": AT_ONCE})
    asks, waits = asked_twice(prefill, decode)
    decode.step_until(lambda: heard_parts(decode, waits, 2))
    prefill.end(asks, [3, 9, 1], complete=False)
    decode.load_when_announced(waits, [5, 6, 7, 8])
    decode.step_until(lambda: decode.failed == {"x"})
