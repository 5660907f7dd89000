# SPDX-License-Identifier: Apache-2.0
"""A warm pull with its ticket in hand calls nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from transports.pairs import Pair
from transports.processes import Peer, eventually

NewPair = Callable[..., Pair]


def test_a_hundred_warm_pulls_make_no_call(
    transport: str, peer: Peer, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = new_pair(transport)
    control = pair.reader._control
    submitted: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(type(control), name)

        def call(self: Any, job: Any, *rest: Any) -> Any:
            submitted.append(name)
            return original(self, job, *rest)

        return call

    for name in ("submit", "run"):
        monkeypatch.setattr(type(control), name, counting(name))
    answered = peer.call("agent_calls")
    pair.works()
    assert submitted, "the first pull connects: the count counts"
    assert peer.call("agent_calls") > answered

    tickets = [pair.offer([index % 64]) for index in range(99)] + [pair.offer(range(60))]
    submitted.clear()
    answered = peer.call("agent_calls")
    for index, ticket in enumerate(tickets):
        assert pair.pull(ticket, [index % 64] if index < 99 else range(60)).stats.settled
    assert submitted == []
    assert peer.call("agent_calls") == answered


def test_warm_pulls_do_without_the_readers_control_loop(distant: str, new_pair: NewPair) -> None:
    pair = new_pair(distant)
    pair.works()
    tickets = [pair.offer([3, 1, 4]) for _ in range(20)]
    release = threading.Event()
    pair.reader._control.loop.call_soon_threadsafe(release.wait)
    try:
        for ticket in tickets:
            pair.pull(ticket, [5, 6, 7])
    finally:
        release.set()


def test_small_warm_pulls_run_on_the_callers_thread(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    # Not at once: the progress thread may still hold the lane for a moment.
    eventually(lambda: pair.pull(pair.offer([1]), [2]).stats.ran_inline)


def test_pulls_that_take_longer_do_only_where_posting_them_is_a_launch(
    transport: str, new_pair: NewPair
) -> None:
    pair = new_pair(transport, inline_us=1)
    pair.works()

    def ran_inline() -> bool:
        return pair.pull(pair.offer(range(32)), range(32)).stats.ran_inline  # 512 KiB

    if transport == "cuda":
        eventually(ran_inline)
    else:
        assert not ran_inline()


def test_a_pull_is_predicted_by_the_last_ones_of_its_shape(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    took_us: list[float] = []

    def predicted() -> bool:
        stats = pair.pull(pair.offer(range(5)), range(5)).stats
        (peer,) = pair.reader.peers()
        took_us.append(stats.total_us)
        return peer.predict_us(stats.num_ops, stats.num_bytes) in [pytest.approx(us) for us in took_us]

    # Not at once: a pull that starts while the lane still has the one before it does not count.
    eventually(predicted)
    (path,) = pair.pull(pair.offer(range(5)), range(5)).explain()
    assert path.predicted_us in [pytest.approx(us) for us in took_us]
