# SPDX-License-Identifier: Apache-2.0
"""Leases at prefill are renewed while decode makes progress, and no longer: prefill can be paused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from test_vllm_connector import PROMPT
from vllm_server import ASK_PREFILL, Server, gone, request
from waiting import eventually

from kvlink.integrations.vllm.decode.remote_leases import LONGEST_S, STILL_S, RemoteLeases, Renewals
from kvlink.integrations.vllm.prefill.outgoing import Chunk
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff
from kvlink.runtime import supervised

LEASE_S = 30.0
RENEW = "RenewSeats"


class Clock:
    """A clock that does not advance until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handoff() -> Handoff:
    with Server("p", lease_s=LEASE_S) as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    return Handoff.from_params(params)


@pytest.fixture
def servers(clock: Clock) -> Iterator[tuple[Server, Server]]:
    """Leases do not end by themselves. Decode's renewals go by `clock`."""
    with Server("p", lease_s=600) as prefill, Server("d") as decode:
        decode.scheduler.incoming._remote.close()
        decode.scheduler.incoming._remote = RemoteLeases(clock)
        yield prefill, decode


def waits(prefill: Server, decode: Server, name: str = "r") -> Any:
    """Returns a request that waits at decode, without blocks, under a lease that decode takes for one of LEASE_S."""
    params = prefill.hands_off(request(name, PROMPT, ASK_PREFILL), [3, 9, 1])
    params[KEY] = replace(Handoff.from_params(params), ttl_s=LEASE_S).to_params()
    waiting = request(f"{name} at decode", PROMPT, params)
    decode.scheduler.arrived(waiting)
    assert decode.scheduler.num_matched(waiting, 0) == (len(PROMPT), True)
    return waiting


def ticks(server: Server) -> None:
    """Lets the server's renewals do what is due by the clock, and all of it end."""
    remote = server.scheduler.incoming._remote

    async def tick() -> None:
        remote.tick()
        await asyncio.gather(*remote._calls.values(), *remote._releases)

    remote._control.run(tick())


def num_renewals(server: Server) -> int:
    """Returns how many renewals the agent of a server's first rank has answered."""
    durations = server.ranks[0]._worker._membership._agent._server.counts.durations
    return sum(one.count for method, one in durations.items() if RENEW in method)


def passes(clock: Clock, decode: Server, seconds: float, each_s: float = 1.0) -> None:
    """Time passes without a step, and the renewals tick."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += each_s
        ticks(decode)


def test_a_waiting_request_is_renewed_three_times_in_a_lease(handoff: Handoff) -> None:
    renewals = Renewals(0.0)
    renewals.watch("x", handoff, 0.0)
    due = []
    for now in range(31):
        renewals.stepped(now, advanced=True)
        assert not renewals.let_go(now)
        due += [now for _ in renewals.due(now)]
    assert due == [0, 10, 20, 30]


@pytest.mark.parametrize(("lease_s", "patience_s"), [(LEASE_S, LEASE_S), (2.0, STILL_S), (0.0, STILL_S)])
def test_renewals_end_when_steps_do(handoff: Handoff, lease_s: float, patience_s: float) -> None:
    """The last renewal comes in time for the lease to end within two lease times of the last step."""
    renewals = Renewals(0.0)
    renewals.watch("x", replace(handoff, ttl_s=lease_s), 0.0)
    renewals.stepped(5.0, advanced=True)
    assert renewals.still_s(8.0) == 3.0
    due, now = [], 5.0
    while not renewals.let_go(now):
        due += [now for _ in renewals.due(now)]
        now += 0.25
    assert due[-1] <= 5 + patience_s < now <= 5 + patience_s + lease_s / 3 + 0.25
    assert renewals.has_let_go("x")
    renewals.stepped(now, advanced=True)
    assert not renewals.due(now + lease_s), "what was let go is not taken up again"
    renewals.forget("x")
    assert not renewals.has_let_go("x")


def test_steps_without_progress_renew_only_what_is_loaded(handoff: Handoff) -> None:
    """A paused engine steps while others read from it. Two that are paused would renew each other's for ever."""
    renewals = Renewals(0.0)
    for name in ("waits", "loads"):
        renewals.watch(name, handoff, 0.0)
    renewals.loading("loads")
    let_go = []
    for now in range(100):
        renewals.stepped(now, advanced=False)
        let_go += renewals.let_go(now)
        renewals.due(now)
    assert let_go == ["waits"]
    assert renewals.still_s(99) == 99


def test_renewals_of_a_request_end_even_if_the_engine_never_stands_still(handoff: Handoff) -> None:
    renewals = Renewals(0.0)
    renewals.watch("x", handoff, 0.0)
    now = 0.0
    while not renewals.let_go(now):
        renewals.due(now)
        now += 1
        renewals.stepped(now, advanced=True)
    assert LONGEST_S < now <= LONGEST_S + LEASE_S / 3 + 1


def test_a_request_that_comes_to_a_rested_engine_is_renewed(handoff: Handoff) -> None:
    renewals = Renewals(0.0)
    renewals.watch("x", handoff, 10_000.0)
    assert not renewals.let_go(10_000.0)
    assert renewals.due(10_000.0) == {
        owner: [(seat.slot, seat.settle_nonce) for seat in handoff.seats] for owner in handoff.owners
    }


def test_a_seat_is_renewed_once_however_often_its_owner_is_named(handoff: Handoff) -> None:
    renewals = Renewals(0.0)
    for name in "xy":
        renewals.watch(name, replace(handoff, owners=handoff.owners * 1024), 0.0)
    (seats,) = renewals.due(0.0).values()
    assert len(seats) == len(handoff.seats)


def test_a_paused_decode_gives_prefill_its_blocks_back(servers: tuple[Server, Server], clock: Clock) -> None:
    prefill, decode = servers
    waiting = waits(prefill, decode)
    decode.step()
    passes(clock, decode, LEASE_S * 4 / 3 + 1)
    renewed = num_renewals(prefill)
    assert renewed == 3
    passes(clock, decode, 10 * LEASE_S)
    assert num_renewals(prefill) == renewed
    assert decode.scheduler.num_matched(waiting, 0) == (0, False)  # it is resumed
    assert decode.scheduler.take_counts() == {"not_renewed": 1}
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)
    decode.scheduler.allocated(waiting, ([5, 6, 7],), 0)
    decode.step()
    assert not decode.received


def test_an_engine_that_asks_for_waiting_requests_or_computes_is_not_paused(
    servers: tuple[Server, Server], clock: Clock
) -> None:
    prefill, decode = servers
    waiting = waits(prefill, decode)
    decode.step()
    for chunks in ({}, {"another": Chunk((), 1)}):
        for _ in range(10):
            passes(clock, decode, LEASE_S - 1)
            if not chunks:
                decode.scheduler.num_matched(waiting, 0)
            decode.step(chunks)
    assert decode.scheduler.num_matched(waiting, 0) == (len(PROMPT), True)


def test_an_engine_that_only_steps_is_paused(servers: tuple[Server, Server], clock: Clock) -> None:
    """vLLM steps a paused engine whose own handoffs others read."""
    prefill, decode = servers
    waiting = waits(prefill, decode)
    for _ in range(5):
        decode.step()
        passes(clock, decode, LEASE_S / 2)
    assert decode.scheduler.num_matched(waiting, 0) == (0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"agent": "\ud800:1"},
        {"agent": "a\0b:1"},
        {"agent": "xds:///x"},
        {"agent": "a" * 100_000},
        {"agent": "127.0.0.1:1"},
        {"worker_id": "\ud800"},
        {"worker_id": "w" * 10_000},
        {"epoch": -1},
        {"epoch": 2**64},
    ],
    ids=repr,
)
def test_a_handoff_that_cannot_be_renewed_stops_no_other(
    servers: tuple[Server, Server], clock: Clock, handoff: Handoff, change: dict[str, Any]
) -> None:
    prefill, decode = servers
    remote = decode.scheduler.incoming._remote
    bad = replace(handoff, owners=(replace(handoff.owners[0], **change),))
    remote.watch("bad", bad)
    waits(prefill, decode)
    for _ in range(2):
        before = num_renewals(prefill)
        clock.now += LEASE_S / 3 + 1
        decode.step({"another": Chunk((), 1)})
        ticks(decode)
        assert num_renewals(prefill) == before + 1
    remote.release(bad, [0])
    remote.release_later(bad)
    clock.now += 10
    ticks(decode)
    assert not remote._ticking.done()


def test_the_tick_goes_on_after_an_error_that_nobody_expects(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked: list[int] = []

    def tick(self: RemoteLeases) -> None:
        ticked.append(1)
        if len(ticked) == 1:
            raise UnicodeError("nobody expects it")

    monkeypatch.setattr(RemoteLeases, "tick", tick)
    monkeypatch.setattr("kvlink.integrations.vllm.decode.remote_leases._TICK_S", 0.0)
    before = supervised.failures().get("vllm-leases", 0)
    leases = RemoteLeases(clock)
    eventually(lambda: len(ticked) > 1)
    assert supervised.failures()["vllm-leases"] == before + 1
    leases.close()


def test_a_reset_releases_handoffs_that_other_weights_may_have_made(
    servers: tuple[Server, Server],
) -> None:
    prefill, decode = servers
    waiting = waits(prefill, decode)
    refused = request("refused", PROMPT, {"do_remote_prefill": True, KEY: {"ticket": "AAAA"}})
    decode.scheduler.arrived(refused)
    loading = waits(prefill, decode, "loading")
    decode.scheduler.allocated(loading, ([5, 6, 7],), len(PROMPT))
    assert decode.scheduler.reset()
    assert decode.scheduler.num_matched(waiting, 0) == (0, False)
    prefill.step_until(lambda: "r" in prefill.sent)
    decode.step_until(lambda: decode.received)
    assert not decode.failed
    assert decode.scheduler.take_counts() == {"released": 1, "malformed": 1}
    assert decode.scheduler.num_matched(refused, 0) == (len(PROMPT), True), "it fails by vLLM's policy"


@pytest.mark.verify
def test_prefill_is_free_in_real_time_though_decode_stands_still() -> None:
    with Server("p", lease_s=2.0) as prefill, Server("d") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        decode.scheduler.arrived(request("x", PROMPT, json.loads(json.dumps(params))))
        decode.step()
        began = time.monotonic()
        prefill.step_until(lambda: "r" in prefill.sent)
        assert STILL_S - 2 < time.monotonic() - began < STILL_S + 2 * 2.0 + 2
