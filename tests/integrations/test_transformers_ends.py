# SPDX-License-Identifier: Apache-2.0
"""Every call of a transformers handoff ends, in any order of events, and no error of one request reaches another."""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from stepped_batching import MAX_NEW, VOCABULARY, Stepped, expected, reference
from transformers_world import PROMPTS, World
from waiting import eventually

from kvlink.errors import Cancelled, ConfigError, TransferError
from kvlink.integrations.transformers import Prefix

pytestmark = pytest.mark.timeout(120)

LONG, OTHER = tuple(range(20)), tuple(range(30, 45))


class Pair:
    """`there` has offered LONG, as a handoff and as a prefix, and `here` runs one request of its own."""

    def __init__(self) -> None:
        self.here, self.there = Stepped("here"), Stepped("there", page_size=8, num_blocks=12)
        self.handoff = self.resolved(self.there, self.there.handoff.prefill(LONG))
        self.there.manager.add_request(list(LONG), max_new_tokens=2)  # the prompt of a prefill is not cached
        self.there.until(lambda: self.there.outputs)
        self.prefix = self.resolved(self.there, self.there.handoff.share(LONG[:16]))
        self.here.manager.add_request(list(OTHER), "own", max_new_tokens=MAX_NEW)
        self.here.step()

    @staticmethod
    def resolved(peer: Stepped, future: Any) -> Any:
        peer.until(future.done)
        return future.result()

    def calls(self) -> dict[str, Callable[[], Any]]:
        handoff = self.here.handoff
        return {
            "move": partial(handoff.move, "own"),
            "share": partial(handoff.share, "own"),
            "fetch": partial(handoff.fetch, self.prefix),
            "prefill": partial(handoff.prefill, LONG, "prefilled"),
            "submit": partial(handoff.submit, self.handoff, "submitted", max_new_tokens=3),
        }

    def answer(self, request_id: str) -> Any:
        answers = [output for output in self.here.outputs if output.request_id == request_id]
        assert len(answers) == 1, (request_id, answers)
        return answers[0]

    def hold_pulls(self) -> threading.Event:
        """Keeps pulls from starting until the event is set."""
        released, held = threading.Event(), threading.Event()

        async def block() -> None:
            held.set()
            released.wait()

        self.here.handoff._background.in_background(block(), "the test's block")
        held.wait()
        return released

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
    for peer in (pair.here, pair.there):
        assert peer.used() == 0
        assert peer.handoff.stats().held_tables == 0


@pytest.fixture(scope="module", autouse=True)
def with_reference() -> Iterator[None]:
    with reference():
        yield


@pytest.mark.parametrize("name", ["move", "share", "fetch", "prefill"])
def test_a_future_ends_when_the_model_raises_before_its_job_runs(pair: Pair, name: str) -> None:
    futures: list[Any] = []
    pair.here.in_forward = lambda: futures.append(pair.calls()[name]())
    pair.here.fails_next = True
    pair.here.step()
    assert not pair.here.manager.is_running()
    with pytest.raises(TransferError, match=r"ModelFailed.*close this KVLinkHandoff, restart the manager"):
        futures[0].result(0)
    with pytest.raises(ConfigError, match="the manager accepts no requests"):
        pair.calls()[name]()


def test_a_submitted_request_is_answered_when_the_model_raises_before_it_begins(pair: Pair) -> None:
    pair.here.in_forward = pair.calls()["submit"]
    pair.here.fails_next = True
    pair.here.step()
    pair.here.outputs += pair.here._drained()
    assert "ModelFailed" in pair.answer("submitted").error


def test_a_fetch_ends_when_the_model_raises_while_it_pulls(pair: Pair) -> None:
    released = pair.hold_pulls()
    future = pair.here.handoff.fetch(pair.prefix)
    pair.here.step()
    assert pair.here.handoff.stats().held_tables == 1
    pair.here.fails_next = True
    pair.here.step()
    with pytest.raises(TransferError, match="ModelFailed"):
        future.result(0)
    released.set()


def test_a_stopping_manager_waits_for_a_fetch_and_for_queued_calls(pair: Pair) -> None:
    released = pair.hold_pulls()
    future = pair.here.handoff.fetch(pair.prefix)
    pair.here.step()
    stopping = threading.Thread(target=pair.here.manager.stop)
    stopping.start()
    eventually(lambda: pair.here.manager.background_thread_status.local_status)
    for _ in range(3 * MAX_NEW):
        pair.here.step()
    assert pair.here.manager.is_running(), "it left the fetch"
    released.set()
    pair.here.until(lambda: False)
    stopping.join()
    assert future.result(0) == 16


def test_a_hard_stop_ends_a_fetch_at_once(pair: Pair) -> None:
    released = pair.hold_pulls()
    future = pair.here.handoff.fetch(pair.prefix)
    pair.here.step()
    pair.here.stop(hard_stop=True)
    with pytest.raises(TransferError, match="the manager was stopped"):
        future.result(0)
    released.set()


def test_calls_end_when_the_handoff_closes_before_their_jobs_run(pair: Pair) -> None:
    """A submitted request is computed here instead. No pull starts on a closed thread."""
    futures = {name: call() for name, call in pair.calls().items() if name != "move"}
    submitted = futures.pop("submit")
    pair.here.during(pair.here.handoff.close)
    for name, future in futures.items():
        if name == "fetch" and future.exception() is None:
            continue  # its pull was over first
        assert future.done(), name
    pair.here.until(lambda: len(pair.here.outputs) == 2)
    assert list(pair.answer(submitted).generated_tokens) == expected(LONG, 3)
    assert list(pair.answer("own").generated_tokens) == expected(OTHER)
    for call in pair.calls().values():
        with pytest.raises(ConfigError):
            call()


def test_a_handoff_closes_although_nothing_was_started() -> None:
    peer = Stepped("idle")
    peer.stop(keep_for_next_session=True)
    peer.manager.background_thread_status.clear()  # as before a start
    future = peer.handoff.prefill(LONG)
    peer.handoff.close()
    with pytest.raises(Cancelled, match="the handoff was closed"):
        future.result(0)


def test_a_loop_that_dies_while_the_handoff_closes_does_not_leave_it_open(pair: Pair) -> None:
    """The pause that `close` asks for never comes then."""
    future = pair.here.handoff.prefill(LONG)
    status = pair.here.manager.background_thread_status
    pair.here.in_forward = lambda: eventually(status.is_pause_requested)
    pair.here.fails_next = True
    pair.here.during(pair.here.handoff.close)
    assert future.done()
    assert not pair.here.manager.is_running()
    assert "closed" in repr(pair.here.handoff)


def test_a_callback_on_the_generation_thread_may_not_wait_for_it(pair: Pair) -> None:
    raised: list[BaseException] = []

    def close(_: object) -> None:
        try:
            pair.here.handoff.close()
        except ConfigError as error:
            raised.append(error)

    future = pair.here.handoff.prefill(LONG)
    future.add_done_callback(close)
    pair.here.until(lambda: raised)
    assert "another thread" in str(raised[0])


@pytest.mark.parametrize("where", ["search_prefix_match", "can_store_request_tokens", "mark_complete_blocks"])
def test_an_unexpected_error_fails_the_request_it_concerns_and_no_other(
    pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, original = pair.here.handoff._batching.cache, getattr(pair.here.handoff._batching.cache, where)

    def raise_for_one(subject: Any, *arguments: Any) -> Any:
        name = subject if isinstance(subject, str) else subject.request_id
        if name == "submitted" and pair.here.manager._generation_thread is threading.current_thread():
            monkeypatch.undo()
            raise RuntimeError("nobody expects this")
        return original(subject, *arguments)

    monkeypatch.setattr(cache, where, raise_for_one)
    pair.calls()["submit"]()
    pair.here.until(lambda: len(pair.here.outputs) == 2)
    assert "nobody expects this" in pair.answer("submitted").error
    assert list(pair.answer("own").generated_tokens) == expected(OTHER)
    assert pair.here.handoff.stats().guarded == 1
    pair.here.handoff.submit(pair.handoff, "submitted", max_new_tokens=3)  # its id is free again
    pair.here.until(lambda: len(pair.here.outputs) == 3)
    assert list(pair.here.outputs[2].generated_tokens) == expected(LONG, 3)


@pytest.mark.parametrize("where", ["search_prefix_match", "can_store_request_tokens", "mark_complete_blocks"])
def test_an_unexpected_error_ends_the_fetch_it_concerns(
    pair: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("nobody expects this")

    pair.here.until(lambda: pair.here.outputs)  # so that only the fetch comes here
    monkeypatch.setattr(pair.here.handoff._batching.cache, where, fail)
    future = pair.here.handoff.fetch(pair.prefix)
    pair.here.until(future.done)
    with pytest.raises(RuntimeError, match="nobody expects this"):
        future.result(0)
    assert pair.here.manager.is_running()


def test_an_offer_that_cannot_be_made_fails_its_prefill_and_frees_its_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nobody expects this")

    monkeypatch.setattr(pair.here.handoff.worker, "offer", fail)
    future = pair.calls()["prefill"]()
    pair.here.until(future.done)
    with pytest.raises(RuntimeError, match="nobody expects this"):
        future.result(0)
    moved = pair.here.handoff.move("own")
    pair.here.until(moved.done)
    pair.here.until(lambda: pair.here.outputs)
    assert list(pair.answer("own").generated_tokens) == expected(OTHER)


def test_one_lease_whose_end_raises_does_not_stop_the_watch_of_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing, original = pair.there.handoff._outgoing, pair.there.handoff._outgoing.ended
    seen: list[Any] = []

    def ended(event: Any) -> None:
        seen.append(event)
        original(event)
        if len(seen) == 1:
            raise RuntimeError("nobody expects this")

    monkeypatch.setattr(outgoing, "ended", ended)
    for message in (pair.handoff, pair.prefix):
        pair.there.handoff.abort(message)
        pair.there.until(lambda: len(seen) > 0)
    pair.there.until(lambda: len(seen) == 2)
    assert pair.there.handoff.stats().held_tables == 0


def test_a_client_whose_event_loop_is_closed_costs_nobody_else_an_answer(pair: Pair) -> None:
    async def register() -> None:
        pair.here.manager.register_result_handler("gone", print)

    asyncio.run(register())  # and its loop is closed
    pair.here.manager.add_request(list(LONG), "gone", max_new_tokens=2)
    pair.here.until(lambda: pair.here.outputs)
    assert list(pair.answer("own").generated_tokens) == expected(OTHER)
    assert pair.here.handoff.stats().guarded == 1


def test_a_share_of_a_request_without_a_whole_block_gives_an_empty_prefix(pair: Pair) -> None:
    pair.here.until(lambda: pair.here.outputs)
    pair.here.manager.add_request([1], "short", max_new_tokens=MAX_NEW)
    pair.here.step()
    prefix = Prefix.from_json(pair.resolved(pair.here, pair.here.handoff.share("short")).to_json())
    assert prefix == Prefix("", ())
    assert pair.there.handoff.fetch(prefix).result(0) == 0
    pair.here.handoff.abort(prefix)
    with pytest.raises(TransferError, match="no whole block"):
        pair.resolved(pair.here, pair.here.handoff.share((60, 61)))


_SIDES = st.sampled_from(["a", "b"])
_IDS = st.sampled_from(
    ["x", "y", "z", "", "i" * 600, "\ud800", "a\nb", "kvlink-0", "prefill-0", "handoff-0", "S1ZUM" + "a" * 95]
)
_PROMPTS = st.sampled_from(PROMPTS)
_COUNTS = st.integers(1, MAX_NEW)
_NUMBERS = st.integers(0, 9)
_CHANGES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {},
        {},
        {"prompt": (VOCABULARY,)},
        {"prompt": (2**31 - 1,) * 3},
        {"prompt": ()},
        {"first_token": VOCABULARY},
        {"first_token": 2**31 - 1},
        {"num_generated": 1},
        {"num_generated": 5},
        {"ticket": {"num_tokens": 0}},
        {"ticket": {"num_tokens": 2**32 - 1}},
        {"ticket": {"block_ids": array("I")}},
        {"ticket": {"block_ids": array("I", [2**32 - 1] * 3)}},
        {"ticket": {"block_ids": array("I", [9, 8, 7]), "group_sizes": (1, 2)}},
        {"ticket": {"block_ids": array("I", [9, 8, 7]), "group_sizes": (0, 3)}},
        {"ticket": {"epoch": 2**64 - 1}},
        {"ticket": {"rank": 65535, "num_ranks": 1}},
        {"ticket": {"rank": 7, "num_ranks": 9}},
        {"ticket": {"num_ranks": 0}},
        {"ticket": {"ready": 2**32 - 1}},
    ]
)


def _event(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


_STEPS = _event("step", _SIDES, st.integers(1, 4))
_EVENTS = st.one_of(
    _STEPS,
    _STEPS,
    _event("own", _SIDES, _IDS, _PROMPTS, _COUNTS),
    _event("prefill", _SIDES, _IDS | st.none(), _PROMPTS),
    _event("prefill", _SIDES, _IDS | st.none(), _PROMPTS),
    _event("submit", _SIDES, _IDS | st.none(), _NUMBERS, _COUNTS, _CHANGES),
    _event("submit", _SIDES, _IDS | st.none(), _NUMBERS, _COUNTS, st.just({})),
    _event("share", _SIDES, _IDS | _PROMPTS),
    _event("fetch", _SIDES, _NUMBERS),
    _event("move", _SIDES, _IDS),
    _event("cancel", _SIDES, _IDS),
    _event("abort", _NUMBERS),
)
_ENDS = _event("end", _SIDES, st.sampled_from(["stop", "hard stop", "fail", "close", "pause"]))
_HISTORIES = st.tuples(
    st.lists(_EVENTS, max_size=25),
    st.just([]) | st.just([]) | st.lists(_ENDS, min_size=1, max_size=1),
    st.lists(_EVENTS, max_size=6),
)


class Worlds:
    """Plays histories in one world, until one fails."""

    def __init__(self) -> None:
        self._world: World | None = None

    def play(self, history: tuple[list[tuple[Any, ...]], ...]) -> None:
        world, self._world = self._world or World(), None
        before, ends, after = history
        try:
            for name, *arguments in [*before, *ends, *after]:
                getattr(world, name)(*arguments)
            world.settled()
        except BaseException:
            world.close()
            raise
        world.forget()
        self._world = world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.mark.timeout(300)
@settings(max_examples=1000)
@given(history=_HISTORIES)
def test_any_order_of_events_is_survived(worlds: Worlds, history: tuple[list[tuple[Any, ...]], ...]) -> None:
    worlds.play(history)


@pytest.mark.slow
@pytest.mark.timeout(36_000)
@settings(max_examples=int(os.environ.get("KVLINK_TRANSFORMERS_EXAMPLES", "100000")), derandomize=False)
@given(history=_HISTORIES)
def test_more_orders_of_events_are_survived(
    worlds: Worlds, history: tuple[list[tuple[Any, ...]], ...]
) -> None:
    worlds.play(history)
