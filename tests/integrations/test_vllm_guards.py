# SPDX-License-Identifier: Apache-2.0
"""Requests of other servers and of clients harm only themselves: guards around each step, and hostile stories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from answered_turns import offered
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_engine import Engine
from vllm_hostile import EVENTS, STORIES, Story, honest
from vllm_server import ASK_PREFILL, Server, request
from vllm_stage import LAYOUTS, SETTINGS, Pair, Pairs, left, plays
from waiting import eventually

from kvlink.integrations.vllm.prefill.announcements import Following
from kvlink.integrations.vllm.wire.handoff_parts import STREAM
from kvlink.transfer.pull import Pull


class Strange(Exception):
    """No code names this type."""


RANK = {
    "_worker.offers": ["grant_at", "hand_off", "set_ready"],
    "_worker": ["events", "pull", "lease_counts", "peers", "grant_soft_at"],
    "_loads": ["_pull", "_start", "_range", "_conclude", "_report", "_add", "_predict"],
}
SCHEDULER = {
    "incoming": [
        "arrived",
        "num_matched",
        "allocated",
        "ended",
        "_take",
        "_left",
        "forward_parts",
        "_num_tokens",
    ],
    "incoming._announcements": ["follow"],
    "incoming._remote": ["watch", "forget", "release", "release_later"],
    "incoming._shared_leases": ["join", "settles", "has_read", "must_wait", "is_spent", "spend"],
    "turns": ["arrived", "num_matched", "begins", "ended", "share", "step_began", "withdraw_ended"],
    "turns.answers": ["offer"],
    "turns.earlier": ["_take", "ended"],
    "_outgoing": [
        "begin",
        "cancel",
        "finish",
        "advance",
        "_advance",
        "_all_hold",
        "_announce",
        "_send",
        "advice",
    ],
    "_announcements": ["announce"],
    "_slots": ["take"],
    "_traces": ["of"],
    "_stateful": ["holding"],
    "_sent": ["add"],
    "": ["_handoff", "_digest", "_select", "_grant"],
}
PLACES = [
    *((side, "rank", path, name) for side in "pd" for path, names in RANK.items() for name in names),
    *(
        (side, "scheduler", path, name)
        for side in "pd"
        for path, names in SCHEDULER.items()
        for name in names
    ),
    *(("", "class", "pull", name) for name in ("done", "wait", "explain")),
    *(("", "class", "following", name) for name in ("take", "stop", "_add")),
]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


def owner_of(pair: Pair, side: str, kind: str, path: str) -> Any:
    """The object that has the method, or None if this pair has none. Of the ranks it is the last one's."""
    if kind == "class":
        return {"pull": Pull, "following": Following}[path]
    server = pair.prefill if side == "p" else pair.decode
    found: Any = server.ranks[-1] if kind == "rank" else server.scheduler
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found


def failing(place: tuple[str, str, str, str], number: int, fired: list[int]) -> Callable[[Pair], Any]:
    """Returns what lets call number `number` of a method raise, once."""

    @contextmanager
    def broken(pair: Pair) -> Iterator[None]:
        owner, name = owner_of(pair, *place[:3]), place[3]
        if owner is None:
            yield
            return
        method = getattr(owner, name)
        calls = 0

        def raises(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                fired.append(calls)
                raise Strange(name)
            return method(*args, **kwargs)

        before = owner.__dict__.get(name) if place[1] != "class" else method
        setattr(owner, name, raises)
        try:
            yield
        finally:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return broken


CHAT = [
    *[("handoff", "p", 0), ("decode", "d", 0), ("decode", "d", 0), ("step", "d", 2), ("step", "d", 2)],
    *[("turn", "p", 0), ("prefill", "p", 1), ("decode", "d", 1), ("step", "p", 0), ("step", "d", 0)],
    *[("step", "p", 0), ("step", "d", 2), ("prefill", "p", 2), ("decode", "d", 2), ("step", "p", 0)],
    *[("step", "d", 2), ("abort", "d", 2), ("preempt", "p", 2), ("step", "d", 2), ("step", "p", 2)],
    *[("reset", "p", 0), ("step", "p", 2)],
]
HONEST = [
    Story("a", {STREAM: "s"}, honest),
    Story("b", {STREAM: "s2"}, honest),
    Story("c", {STREAM: "s3"}, honest),
]
STREAMING = {"streaming": True, "prefill_tp": 2, "decode_tp": 2}
WITH_ALL = [LAYOUTS.index(one) for one in (STREAMING, {"bidirectional": True})]


FOLLOWED = ("class", "following", "_add")
"""How far a reader follows parts depends on how fast the coordinator answers."""
REACHED: set[tuple[str, str, str, str]] = set()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(filter(None, place)))
def test_one_request_pays(pairs: Pairs, place: tuple[str, str, str, str]) -> None:
    for layout in WITH_ALL:
        for number in (1, 2, 3):
            fired: list[int] = []
            scene = plays(pairs, layout, list(HONEST), CHAT, failing(place, number, fired))
            assert sum(scene.guarded.values()) >= len(fired) or place[1] == "class"
            if fired:
                REACHED.add(place)


def test_the_chat_reaches_every_place_at_one_server() -> None:
    """Needs the tests above. A place that none of them reaches tests nothing."""
    missed = {place[1:] for place in PLACES} - {place[1:] for place in REACHED}
    assert missed <= {
        ("rank", "_loads", "_add"),
        ("scheduler", "incoming._remote", "release_later"),
        FOLLOWED,
    }


@settings(SETTINGS, max_examples=500)
@given(
    st.integers(0, len(LAYOUTS) - 1),
    st.lists(STORIES, min_size=1, max_size=3),
    EVENTS,
    st.sampled_from(PLACES),
    st.integers(1, 4),
)
def test_one_of_any_requests_pays(
    pairs: Pairs,
    layout: int,
    stories: list[Story],
    events: list[tuple[str, str, int]],
    place: tuple[str, str, str, str],
    number: int,
) -> None:
    plays(pairs, layout, stories, events, failing(place, number, []))


def test_a_lease_that_cannot_be_ended_now_is_ended_later(pairs: Pairs) -> None:
    """One rank of two fails, and the blocks stay until both have said so."""
    with Server("p", tp_size=2) as server:
        engine = Engine(server)
        engine.add(request("r", list(range(9)), ASK_PREFILL), ask=True)
        for _ in range(3):
            engine.step()
        offers, calls = server.ranks[1]._worker.offers, iter(range(3))
        abort = offers.abort

        def fails_twice(request_id: str) -> None:
            if next(calls) < 2:
                raise Strange
            abort(request_id)

        offers.abort = fails_twice  # type: ignore[method-assign]
        assert not server.scheduler.reset()
        engine.step()
        assert engine.live.keys() == {"r"}
        eventually(lambda: engine.step() or engine.quiet())
        assert left(engine, 15) == {}
        assert engine.guarded == {"retire": 2}
        offers.abort = abort  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["revoke", "offers"])
def test_what_ends_an_offer_may_end_the_step(name: str) -> None:
    """Else readers would take what the step writes for what was offered."""
    with Server("d", answer_s=600.0) as server:
        offered(server, [3, 9, 1, 7])
        server.pool.give_away(9)
        server.scheduler.scheduled({}, ())
        commands = server.scheduler.take_commands()
        worker = server.ranks[0]._worker

        def raises(*_: object) -> None:
            raise Strange

        if name == "revoke":
            worker.revoke = raises  # type: ignore[method-assign]
        else:
            worker.offers.abort = raises  # type: ignore[method-assign]
            commands.withdrawn.append("r")
        for _ in range(2):  # neither does a second call continue the step
            with pytest.raises(Strange):
                server.ranks[0].carry_out(commands)
        del (worker if name == "revoke" else worker.offers).__dict__[
            "revoke" if name == "revoke" else "abort"
        ]


def test_blocks_that_are_given_away_unseen_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server("d", answer_s=600.0) as server:
        offered(server, [3, 9, 1, 7])
        cache = server.scheduler.turns.answers._cache  # type: ignore[union-attr]

        def raises(*_: object) -> None:
            raise Strange

        monkeypatch.setattr(cache, "take", raises)
        server.pool.give_away(9)
        with pytest.raises(Strange):
            server.step()
        monkeypatch.undo()
        monkeypatch.setattr(cache, "_give_away", raises)
        with pytest.raises(Strange):
            server.pool.give_away(3)


EXAMPLES = (
    st.integers(0, len(LAYOUTS) - 1),
    st.lists(STORIES, min_size=1, max_size=3),
    EVENTS,
)


@settings(SETTINGS, max_examples=1000)
@given(*EXAMPLES)
def test_nothing_from_outside_ends_an_engine(
    pairs: Pairs, layout: int, stories: list[Story], events: list[tuple[str, str, int]]
) -> None:
    assert not plays(pairs, layout, stories, events).guarded, "an error that a parser should have named"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@settings(SETTINGS, derandomize=False, max_examples=int(os.environ.get("KVLINK_HOSTILE_EXAMPLES", "100000")))
@given(*EXAMPLES)
def test_nothing_from_outside_ends_an_engine_at_length(
    pairs: Pairs, layout: int, stories: list[Story], events: list[tuple[str, str, int]]
) -> None:
    assert not plays(pairs, layout, stories, events).guarded, "an error that a parser should have named"
