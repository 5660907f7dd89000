# SPDX-License-Identifier: Apache-2.0
"""Caches whose rows stand for several tokens, beside others: decode has every written row, and no byte of others."""

from __future__ import annotations

import logging
import os

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from compressed_world import Case, Group, Layer, Result, cases, moved
from hypothesis import given, seed, settings

from kvlink.integrations.vllm.model import caches

V4 = (
    Group((Layer(4, 12, 2), Layer(4, 3, 1), Layer(128, 12, 2)), 256, 256),
    Group((Layer(1, 12, 2),), 64, 64, window=128),
    Group((Layer(1, 12),), 4, 4, window=8),
    Group((Layer(1, 12),), 8, 8, window=128),
)
"""As DeepSeek-V4's: 4 tokens a row beside an indexer, 128 tokens a row, a window, and what is not compressed yet."""

SEEDS = (5801, 5802, 5803, 5804)
"""The seeds of 10,000 pairs."""


@pytest.fixture(scope="module", autouse=True)
def by_rows() -> object:
    """As on a GPU, where kernels do not interleave tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "_interleaves", lambda tensor: False)
        yield


@given(case=cases())
@settings(max_examples=60)
def test_every_row_that_is_written_and_nothing_else(case: Case) -> None:
    assert moved(case).wrong == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("number", [*SEEDS, *filter(None, [os.environ.get("KVLINK_TEST_SEED")])])
def test_many_pairs(number: int | str, caplog: pytest.LogCaptureFixture) -> None:
    """A load that fails is logged with its error, and what keeps the log keeps the memory of the workers."""

    @seed(int(number))
    @given(case=cases())
    @settings(max_examples=2500, derandomize=False)
    def each_pair(case: Case) -> None:
        assert moved(case).wrong == []

    with caplog.at_level(logging.CRITICAL, logger="vllm.kvlink"):
        each_pair()


@pytest.mark.parametrize(("prompt", "window"), [(5, 0), (127, 0), (128, 1)])
def test_a_load_of_no_row_ends_the_lease(prompt: int, window: int) -> None:
    """The prompt is shorter than a row, or its window has the next token alone."""
    result = moved(Case((Group((Layer(128, 4),), 128, 128, window),), prompt, 0, (1, 1), (True, True), 1))
    assert result == Result(True, prompt - window, False, [])


@pytest.mark.parametrize(("prompt", "cached", "chunk"), [(84, 0, 15), (212, 128, 130)])
def test_a_load_in_parts_of_no_row_may_end_before_the_last_chunk(
    prompt: int, cached: int, chunk: int
) -> None:
    """The last part reads nothing, so the load ends at once. The second one settles the lease, too."""
    groups = (Group((Layer(128, 4),), 128, 128),)
    result = moved(Case(groups, prompt, cached, (1, 1), (True, True), 1, chunks=(chunk,)))
    assert result == Result(True, prompt, True, [])


@pytest.mark.parametrize("prompt", [1, 3, 4, 127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("tps", [(1, 1), (2, 4), (4, 2)])
def test_caches_as_deepseek_v4_has_them(prompt: int, tps: tuple[int, int]) -> None:
    result = moved(Case(V4, prompt, 0, tps, (True, True), 1))
    assert result.wrong == []


@pytest.mark.parametrize("tps", [(1, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("chunks", [(), (64, 70)], ids=["at once", "in parts"])
def test_scales_behind_the_values_of_a_page_come_along(tps: tuple[int, int], chunks: tuple[int, ...]) -> None:
    """The prompt ends within a page, as do an indexer's beside MLA (GLM-5)."""
    glm = (Group((Layer(1, 12), Layer(1, 5, 1)), 64, 64),)
    for packed in (True, False):
        result = moved(Case(glm, 75, 0, tps, (packed, packed), 1, chunks))
        assert result == Result(True, 75, bool(chunks), [])


@pytest.mark.parametrize("tps", [(1, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize(
    "layers", [(Layer(1, 12), Layer(1, 5, 1)), (Layer(4, 12), Layer(4, 3), Layer(128, 12))]
)
def test_cached_blocks_of_several_kinds_are_offered_until_they_get_new_content(
    layers: tuple[Layer, ...], tps: tuple[int, int]
) -> None:
    """As answers to the next turn, and as prefixes to peers: whole blocks, and so whole rows."""
    groups = (Group(layers, 128, 128),)
    taken = moved(Case(groups, 300, 128, tps, (True, False), 1, offer="soft"))
    assert taken == Result(True, 256, False, [])
    gone = moved(Case(groups, 300, 0, tps, (False, True), 1, offer="evicted"))
    assert gone == Result(False, 256, False, [])
