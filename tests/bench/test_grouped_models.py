# SPDX-License-Identifier: Apache-2.0
"""Models with several kinds of caches: their bytes, and requests that are moved and compared."""

from __future__ import annotations

import pytest

from kvlink.benchmarks.measurements import migrate
from kvlink.benchmarks.workloads.grouped_models import GROUPED_MODELS, CacheRows
from kvlink.errors import ConfigError

BYTES = {
    # a page of 64 rows of 4 tokens and one of an indexer, one of 2 rows of 128, two of the last 128 tokens, and what is
    # not compressed yet
    "deepseek-v4": 30 * 64 * (584 + 132) + 31 * 2 * 584 + 61 * 128 * 584
    + 30 * 8 * (8192 + 2048) + 31 * 128 * 4096,
    "glm-5": 78 * 256 * (1152 + 132),
    "kimi-k3": 24 * 256 * 1152 + 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2) // 8,
    "qwen3-next": 12 * 256 * 2 * 512 + 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) // 8,
}  # fmt: skip


@pytest.mark.verify
@pytest.mark.parametrize("name", GROUPED_MODELS)
def test_every_kind_is_moved_and_compared(name: str) -> None:
    """256 tokens at TP 8, where Qwen3-Next's ranks have one of its two KV heads."""
    cold, row = migrate.rows(name, 256, "loopback", tp="8", iters=3)
    assert (cold["kind"], row["model"], row["tokens"]) == ("cold", name, 256)
    assert (row["verified"], row["failed"], row["groups"]) == (True, 0, len(GROUPED_MODELS[name].groups))
    assert row["bytes"] == BYTES[name]
    assert row["limit_us"] > 0


@pytest.mark.parametrize(("tokens", "pages"), [(3, 1), (256, 1), (257, 2)])
def test_a_page_that_is_begun_is_moved_as_a_whole(tokens: int, pages: int) -> None:
    """As the connector for vLLM does where scales may be behind the values: `LayerGroup.paged`."""
    sparse = GROUPED_MODELS["deepseek-v4"].groups[0]
    assert (sparse.rows(tokens), sparse.blocks(tokens)) == (pages, pages)
    assert sparse.geometry("m", 8, 1).row_bytes == 64 * 584


@pytest.mark.parametrize(("tokens", "rows"), [(3, 0), (4, 1), (127, 31), (131, 32)])
def test_a_row_that_is_begun_is_none(tokens: int, rows: int) -> None:
    compressed = CacheRows(1, 512, row_tokens=4)
    assert (compressed.rows(tokens), compressed.blocks(tokens)) == (rows, min(rows, 1))


@pytest.mark.verify
def test_requests_of_odd_lengths_are_moved() -> None:
    """Fewer tokens than a row stands for, and a block that is not full."""
    for tokens in (3, 1037):
        _, row = migrate.rows("deepseek-v4", tokens, "loopback", iters=2)
        assert row["verified"] is True


@pytest.mark.parametrize(
    "options",
    [{"tp": "2:4"}, {"tp": "7"}, {"slots": 2}, {"pp": "2:1"}, {"layout": "HND"}, {"prefills": 2}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_not_measured_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        next(migrate.rows("kimi-k3", 256, "loopback", **{"tp": "8", **options}))  # type: ignore[arg-type]
