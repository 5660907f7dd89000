# SPDX-License-Identifier: Apache-2.0
"""Whatever clients, routers, peers and operators do, in any order: transformers' loop lives, other requests' tokens are
right, no block is left, every future ends, and every refusal has a reason.

The manager, its loop, scheduler, cache and model are transformers' own. See `stepped_batching`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from stepped_batching import MAX_NEW, VOCABULARY, reference
from transformers_world import PROMPTS, World

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


@pytest.fixture(scope="module", autouse=True)
def with_reference() -> Iterator[None]:
    with reference():
        yield


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
