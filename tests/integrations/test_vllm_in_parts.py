# SPDX-License-Identifier: Apache-2.0
"""Handoffs in parts: decode pulls what is written while prefill computes the rest, or nothing of it is used."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from making import making
from waiting import eventually

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import vllm_server

from vllm_server import ASK_PREFILL, Server, gone, request  # isort: skip
from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.decode import remote_leases
from kvlink.integrations.vllm.prefill import announcements
from kvlink.integrations.vllm.prefill.outgoing import Chunk
from kvlink.integrations.vllm.wire.handoff_parts import ANNOUNCED, STREAM
from kvlink.integrations.vllm.wire.stream_timing import (
    LoadCost,
    Remaining,
    Share,
    Start,
    cost_of,
    slowest,
    start,
)
from kvlink.runtime.background import ControlThread
from kvlink.transfer.cost_model import Cost

PROMPT = list(range(100, 110))  # blocks of 4: two whole ones and a half
PREFILL = ASK_PREFILL | {STREAM: "s"}
DECODE = {"do_remote_prefill": True, STREAM: "s"}
LAYERS = ("layer.0", "layer.1")

NewServer = Callable[..., Server]


@pytest.fixture
def new(coordinator: Coordinator) -> Iterator[NewServer]:

    def server(name: str, *args: Any, **options: Any) -> Server:
        return Server(name, *args, **{"coordinator": coordinator.address, **options})

    with making(server) as new:
        yield new


def same(decode: Server, prefill: Server, *pairs: tuple[int, int], layers: tuple[str, ...] = LAYERS) -> bool:
    return vllm_server.same(decode, prefill, pairs, layers)


def half_announced(prefill: Server, decode: Server, waits_for: list[int] = PROMPT) -> tuple[Any, Any]:
    """Prefill has computed 6 tokens of request r into blocks 3 and 9; decode loads x into 5, 6 and 7."""
    asks, waits = request("r", PROMPT, PREFILL), request("x", waits_for, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9])
    prefill.compute(asks, 6)
    decode.load_when_announced(waits, [5, 6, 7])
    return asks, waits


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 1), (1, 2)])
def test_what_is_written_comes_while_the_rest_is_computed(new: NewServer, theirs: int, ours: int) -> None:
    prefill, decode = new("p", theirs), new("d", ours)
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    assert decode.awaits(waits)
    prefill.begin(asks, [3, 9])
    prefill.compute(asks, 6, writes=[3, 9])
    assert decode.load_when_announced(waits, [5, 6, 7]) == 10
    decode.step_until(lambda: same(decode, prefill, (5, 3)))
    assert not same(decode, prefill, (6, 9)), "it is not full, and will be written again"
    prefill.compute(asks, 4, [1], writes=[9, 1])
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert same(decode, prefill, (5, 3), (6, 9), (7, 1))
    answer = prefill.end(asks, [3, 9, 1])
    assert answer
    assert answer[ANNOUNCED] == "s"
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)
    stats = [rank.take_stats() for rank in decode.ranks]
    assert sum(tally["early_bytes"] for tally in stats if tally) == decode.block("layer.0", 5).nbytes * 2


def test_nothing_that_is_being_computed_is_taken_for_written(new: NewServer) -> None:
    """A chunk's blocks are announced before it runs."""
    prefill, decode = new("p"), new("d")
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9])
    prefill.compute(asks, 4)
    decode.load_when_announced(waits, [5, 6, 7])

    def meanwhile() -> None:
        decode.step_until(lambda: same(decode, prefill, (5, 3)))
        before = decode.block("layer.0", 6).clone()
        for _ in range(50):
            decode.step()
        assert decode.block("layer.0", 6).equal(before)
        assert not decode.received

    prefill.step({"r": Chunk(([1],), 6)}, compute=meanwhile)
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert same(decode, prefill, (5, 3), (6, 9), (7, 1))


@pytest.mark.verify
def test_nobody_is_told_before_every_worker_holds_the_lease(new: NewServer) -> None:
    """A reader finds a slot that is not taken yet stale."""
    prefill, decode = new("p", 2), new("d")
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9, 1])
    prefill.scheduler.scheduled({"r": Chunk((), 10)}, ())
    commands = prefill.scheduler.take_commands()
    for rank in prefill.ranks:
        time.sleep(0.05)
        assert decode.awaits(waits)
        rank.carry_out(commands)
        prefill.scheduler.held(Counter(rank.take_held()))
    decode.load_when_announced(waits, [5, 6, 7])
    for rank in prefill.ranks:
        rank.computed(commands.written, lambda: None)
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed


def test_windows_come_with_the_last_part(new: NewServer) -> None:
    groups = (("full.0", "full.1"), ("window.0",))
    prefill, decode = new("p", groups=groups), new("d", groups=groups)
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9], [10, 11])
    prefill.compute(asks, 8, writes=[3, 9, 10, 11])
    decode.load_when_announced(waits, [5, 6, 7], [0, 0, 8])
    decode.step_until(lambda: same(decode, prefill, (5, 3), (6, 9), layers=groups[0]))
    prefill.compute(asks, 2, [1], [2], writes=[1, 2])
    assert not decode.received
    answer = prefill.end(asks, [3, 9, 1], [0, 11, 2])
    assert answer
    assert answer[ANNOUNCED] == "s"
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert same(decode, prefill, (5, 3), (6, 9), (7, 1), layers=groups[0])
    assert same(decode, prefill, (8, 2), layers=groups[1])
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)


def test_short_prompts_are_handed_off_by_the_answer(new: NewServer) -> None:
    prefill, decode = new("p", streaming_from=11), new("d")
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9, 1])
    prefill.compute(asks, 10)
    answer = prefill.end(asks, [3, 9, 1])
    assert answer
    assert ANNOUNCED not in answer
    assert answer["kvlink_streams_from"] == 11
    assert decode.awaits(waits)
    decode.scheduler.finished(waits, ([],), False)
    assert decode.load(request("y", PROMPT, answer), [5, 6, 7]) == (10, True)
    decode.step_until(lambda: "y" in decode.received)
    assert not decode.failed


def test_another_prompt_is_refused(new: NewServer) -> None:
    prefill, decode = new("p"), new("d")
    half_announced(prefill, decode, waits_for=[*PROMPT[:-1], 1])
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}
    assert decode.scheduler.take_counts() == {"another_prompt": 1}
    assert decode.scheduler.take_counts() == {}


def test_a_prompt_whose_first_part_is_cached_here_is_settled(new: NewServer) -> None:
    """One pull brings the rest, and ends the lease."""
    prefill, decode = new("p"), new("d")
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    incoming = decode.scheduler.incoming
    incoming.arrived(waits)
    prefill.begin(asks, [3, 9])
    prefill.compute(asks, 6, writes=[3, 9])
    decode.step_until(lambda: incoming.num_matched(waits, 4) == (6, True))
    decode.scheduler.allocated(waits, ([5, 6, 7],), 6)
    decode.step()
    eventually(prefill.scheduler._outgoing._requests["r"].goes_well)
    prefill.compute(asks, 4, [1], writes=[9, 1])
    assert decode.ranks[0]._loads._loading["x"].pulls == []
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert same(decode, prefill, (6, 9), (7, 1))
    assert decode.ranks[0].guard.take_counts() == {}
    prefill.end(asks, [3, 9, 1])
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)


def test_parts_of_another_layout_are_refused_and_the_lease_ends(
    new: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_leases, "_AGAIN_S", 0.0)
    prefill, decode = new("p"), new("d", groups=(("layer.0",), ("window.1",)))
    half_announced(prefill, decode)
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}
    assert decode.scheduler.take_counts() == {"another_layout": 1}
    assert decode.scheduler.guard.take_counts() == {}
    prefill.step_until(lambda: prefill.ranks[0]._worker.events() or not len(prefill.ranks[0]._worker.offers))


@pytest.mark.parametrize("last", [True, False])
def test_a_pull_that_waits_for_its_time_begins_with_a_part_or_the_end(
    new: NewServer, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """Asked again, it still waits. Once no part can come any more, it begins with those that came."""
    prefill, decode = new("p"), new("d")
    monkeypatch.setattr(decode.scheduler.decisions, "begins", lambda _, part: part.last)
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9])
    prefill.compute(asks, 6, writes=[3, 9])
    awaited = decode.scheduler.incoming._requests["x"]
    decode.step_until(lambda: decode.awaits(waits) and awaited.parts)
    for _ in range(3):
        assert decode.awaits(waits)
    if last:
        prefill.compute(asks, 4, [1], writes=[9, 1])
    else:
        prefill.end(asks, [3, 9], complete=False)
    assert decode.load_when_announced(waits, [5, 6, 7]) == 10
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == (set() if last else {"x"})
    assert decode.scheduler.take_counts() == {}
    assert not last or same(decode, prefill, (5, 3), (6, 9), (7, 1))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_preempted_prefill_is_not_read_any_further(new: NewServer, at_once: bool) -> None:
    """Others write into its blocks in that very step. What it is given later, or in that step, goes with its answer."""
    prefill, decode = new("p"), new("d")
    asks, _ = half_announced(prefill, decode)
    decode.step_until(lambda: same(decode, prefill, (5, 3)))
    if not at_once:
        prefill.step(preempted=["r"])
    asks.num_computed_tokens, asks.num_preemptions = 0, 1
    prefill.scheduler.allocated(asks, ([2, 4, 10],), 0)
    if at_once:
        prefill.step(preempted=["r"])
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}
    prefill.compute(asks, 10, writes=[2, 4, 10])
    answer = prefill.end(asks, [2, 4, 10])
    assert answer
    assert ANNOUNCED not in answer
    decode.loads(request("y", PROMPT, answer), [8, 11, 12])
    assert decode.failed == {"x"}
    assert same(decode, prefill, (8, 2), (11, 4), (12, 10))


@pytest.mark.parametrize("how", ["aborted", "dead"])
def test_a_prefill_that_ends_early_fails_the_load(new: NewServer, how: str) -> None:
    prefill, decode = new("p"), new("d")
    asks, _ = half_announced(prefill, decode)
    decode.step_until(lambda: same(decode, prefill, (5, 3)))
    if how == "aborted":
        prefill.end(asks, [3, 9], complete=False)
    else:
        prefill.close()
    decode.step_until(lambda: decode.failed == {"x"})


@pytest.mark.parametrize("fails", [False, True])
def test_a_decode_request_that_ends_lets_go(
    new: NewServer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also if its end cannot be handled: the load would wait for parts for ever."""
    prefill, decode = new("p"), new("d")
    asks, waits = half_announced(prefill, decode)
    decode.step()
    if fails:
        decode.step_until(lambda: same(decode, prefill, (5, 3)))
        decode.step_until(lambda: all(pull.done() for pull in decode.ranks[0]._loads._loading["x"].pulls))
        monkeypatch.setattr(decode.scheduler.incoming, "ended", lambda *_: 1 // 0)
    decode.scheduler.finished(waits, ([5, 6, 7],), False)
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}
    prefill.compute(asks, 4, [1])
    prefill.end(asks, [3, 9, 1])
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_answer_hands_off_what_decode_has_followed(
    new: NewServer, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """Decode knew of the parts before prefill knew that they were taken: the router comes again with the answer."""
    offer = announcements.Announcements._offer

    async def answers_late(*args: Any) -> None:
        await offer(*args)
        await asyncio.Event().wait()

    monkeypatch.setattr(announcements.Announcements, "_offer", answers_late)
    monkeypatch.setattr(remote_leases, "_AGAIN_S", 60.0)
    prefill, decode = new("p"), new("d")
    asks, waits = half_announced(prefill, decode)
    decode.step_until(lambda: same(decode, prefill, (5, 3)))
    prefill.compute(asks, 4, [1], writes=[9, 1])
    if loaded:
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
    answer = prefill.end(asks, [3, 9, 1])
    assert answer
    assert ANNOUNCED not in answer
    decode.scheduler.finished(waits, ([5, 6, 7],), False)
    decode.step_until(lambda: "x" in decode.received)
    assert decode.loads(request("y", PROMPT, answer), [8, 11, 12])
    assert same(decode, prefill, (8, 3), (11, 9), (12, 1))
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)


def test_without_a_coordinator_it_is_computed_here(new: NewServer) -> None:
    decode = new("d", coordinator="")
    waits = request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    assert decode.scheduler.incoming.num_matched(waits, 0) == (0, False)
    assert decode.scheduler.take_counts() == {"not_offered": 1}


def test_when_the_coordinator_dies_the_answer_still_hands_off(
    new: NewServer, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "_CLAIM_S", 0.2)
    prefill, decode = new("p"), new("d")
    ControlThread.shared().run(coordinator.close())
    asks, waits = request("r", PROMPT, PREFILL), request("x", PROMPT, DECODE)
    decode.scheduler.incoming.arrived(waits)
    prefill.begin(asks, [3, 9, 1])
    prefill.compute(asks, 10)
    answer = prefill.end(asks, [3, 9, 1])
    assert answer
    assert ANNOUNCED not in answer
    eventually(lambda: not decode.awaits(waits))
    assert decode.scheduler.incoming.num_matched(waits, 0) == (0, False)
    assert decode.loads(request("y", PROMPT, answer), [5, 6, 7])


SLOW, FAST = LoadCost(0.01, 0.5e-3), LoadCost(0.001, 0.05e-3)  # 4,000 tokens in 2 s and in 0.2 s


@pytest.mark.parametrize(
    ("cost", "prompt_s", "part_s", "expected"),
    [
        (SLOW, 9.0, 1.0, Start.WAIT),
        (SLOW, 3.0, 1.0, Start.PAYS),
        (SLOW, 9.0, 7.0, Start.PAYS),  # the next chunk is long
        (SLOW, 3.5, 0.0, Start.WAIT),  # the next part follows at once
        (SLOW, 2.8, 0.0, Start.PAYS),  # it would fit, if the prediction were exact
        (FAST, 3.0, 1.0, Start.WAIT),
        (FAST, 1.2, 1.0, Start.PAYS),
        (FAST, 0.0, 0.0, Start.PAYS),
    ],
)
def test_it_waits_as_long_as_the_transfer_still_fits(
    cost: LoadCost, prompt_s: float, part_s: float, expected: Start
) -> None:
    assert start(4000, Remaining(prompt_s, part_s), cost, last=False) is expected


def test_longer_prompts_begin_earlier() -> None:
    begins = [start(num, Remaining(3.0, 1.0), SLOW, last=False) for num in (1000, 2000, 4000)]
    assert begins == [Start.WAIT, Start.WAIT, Start.PAYS]


def test_nothing_is_waited_for_after_the_last_part() -> None:
    assert start(4000, Remaining(9.0, 1.0), FAST, last=True) is Start.LAST_CHUNK
    assert start(4000, None, None, last=True) is Start.LAST_CHUNK


def test_it_does_not_wait_by_guess() -> None:
    assert start(4000, Remaining(9.0, 1.0), None, last=False) is Start.UNKNOWN
    assert start(4000, None, FAST, last=False) is Start.UNKNOWN


def test_the_cost_is_what_the_path_predicts() -> None:
    path = Cost(start_us=500, op_ns=1000, gib_per_s=1)
    cost = cost_of([Share(path.predict_us, 0.125, 2**16)])
    for num_tokens in (1000, 4000, 32_000):
        expected_us = path.predict_us(num_tokens // 8, num_tokens << 16)
        assert cost.predict_s(num_tokens) == pytest.approx(expected_us / 1e6, rel=1e-6)


def test_owners_of_one_server_share_its_link() -> None:
    share = Share(Cost(0, 0, 1).predict_us, 1, 2**16)
    assert cost_of([share, share]).predict_s(4096) == pytest.approx(2 * cost_of([share]).predict_s(4096))


def test_a_load_ends_with_the_slowest_rank() -> None:
    merged = slowest({"p": SLOW, "q": FAST}, {"p": FAST, "r": SLOW})
    assert merged == {"p": SLOW, "q": FAST, "r": SLOW}
    assert slowest({"p": LoadCost(1, 2)}, {"p": LoadCost(2, 1)}) == {"p": LoadCost(2, 2)}


def test_a_path_that_predicts_no_slope_is_taken_as_proportional() -> None:
    assert cost_of([Share(lambda ops, num_bytes: 8192.0, 1, 1)]) == LoadCost(0.0, 1e-6)
