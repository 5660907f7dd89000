# SPDX-License-Identifier: Apache-2.0
"""Whatever comes to two vLLM servers, in any order: engines live, nothing is left, other requests' bytes are right.

KVLINK_HOSTILE_EXAMPLES sets the number of examples of the lane.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_hostile import EVENTS, STORIES, Story
from vllm_stage import LAYOUTS, SETTINGS, Pairs, plays


@pytest.fixture(scope="module")
def pairs(unsigned: None) -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


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
