# SPDX-License-Identifier: Apache-2.0
"""Rings of sliding windows move between caches of transformers. Each token's row says its position, so that every
position that a step reads can be compared. Nothing generates here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
pytest.importorskip("transformers", reason="pip install 'kvlink[demo]'")
batching = pytest.importorskip(
    "transformers.generation.continuous_batching.cache", reason="transformers is older than 5.19"
)

from window_models import MIXED_LAYERS, config_of  # noqa: E402

from kvlink import Ticket, Worker, WorkerConfig  # noqa: E402
from kvlink.errors import ConfigError, LayoutMismatch  # noqa: E402
from kvlink.integrations.transformers.attention import (  # noqa: E402
    attention_caches,
    blocks_of,
    by_group,
    check_served,
    layouts_of,
)
from kvlink.integrations.transformers.handoff import pool_of  # noqa: E402

WINDOW, PAGE, OTHER_PAGE = 20, 8, 6  # the last block of a ring is never full


class Cache:
    """A cache of transformers in a worker, with one request. Rows hold 1 + their token's position + layer / 100."""

    def __init__(self, model: str, name: str, window: int = WINDOW, page: int = PAGE, busy: int = 0) -> None:
        from transformers.generation import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState

        torch.set_num_threads(1)
        config = config_of(model, window)
        settings = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=64,
            max_batch_tokens=16,
            max_memory_percent=0.9,
            max_blocks_per_request=0,
        )
        self.paged = batching.PagedAttentionCache(
            config, settings, "cpu", DistributedHelper(None, None), torch.float32
        )
        self.caches = attention_caches(self.paged.cache_allocators)
        self.worker = Worker(
            pool_of(self.paged, layouts_of(self.caches, self.paged.cache_tensor, "m")),
            name,
            config=WorkerConfig(transports="loopback", port=0, inline_us=0),
        )
        for number in range(busy):  # so that the two ends have different blocks
            assert self.paged.can_store_request_tokens(RequestState(f"busy {number}", [0]), 3)
        self.state = RequestState("r", [0])

    def write(self, first: int, end: int) -> None:
        """Computes these tokens as one chunk."""
        self.state.position_offset = first
        assert self.paged.can_store_request_tokens(self.state, end - first)
        for cache in self.caches:
            at = torch.tensor(cache.allocator.get_write_indices("r", first, end - first))
            for layer in cache.allocator.layer_indices:
                rows = torch.arange(first, end, dtype=torch.float32) + 1 + layer / 100
                shape = (end - first, cache.allocator.num_key_value_heads, cache.allocator.head_dim)
                rows = rows.view(-1, 1, 1).expand(shape).contiguous()
                cache.allocator.update(rows, -rows, layer, torch.empty(0, dtype=torch.long), at)

    def allocate(self, num_tokens: int) -> None:
        assert self.paged.can_store_request_tokens(self.state, num_tokens)

    def table(self) -> tuple[list[int], ...]:
        return tuple(cache.allocator.block_table["r"] for cache in self.caches)

    def read(self, position: int) -> dict[int, list[float]]:
        """Returns, by layer, the tokens that the step at a position reads before it writes its own."""
        found = {}
        self.state.position_offset = position
        self.allocate(1)
        for cache in self.caches:
            at = cache.allocator.get_read_indices("r", position, 1)[:-1]
            for layer in cache.allocator.layer_indices:
                keys, values = (view[at] for view in cache.allocator._kv_token_views[layer])
                assert torch.equal(keys, -values)
                assert torch.equal(keys, keys[:, :1, :1].expand(keys.shape))
                found[layer] = (keys[:, 0, 0] - layer / 100 - 1).round().int().tolist()
        return found

    def offer(self, num_tokens: int, table: tuple[list[int], ...] | None = None) -> Ticket:
        return self.worker.offer(
            "r",
            by_group(blocks_of(self.caches, table or self.table(), num_tokens)),
            num_tokens=[cache.num_slots(num_tokens) for cache in self.caches],
        )

    def pull(self, ticket: Ticket, num_tokens: int) -> int:
        blocks = by_group(blocks_of(self.caches, self.table(), num_tokens))
        ranges = by_group([(0, cache.num_slots(num_tokens)) for cache in self.caches])
        pull = self.worker.pull(ticket, blocks, tokens=ranges)
        assert pull.wait(20)
        return pull.stats.num_bytes


def expected(caches: Cache, position: int) -> dict[int, list[int]]:
    first = {cache: 0 if cache.window is None else max(position - WINDOW + 1, 0) for cache in caches.caches}
    return {
        layer: list(range(first[cache], position))
        for cache in caches.caches
        for layer in cache.allocator.layer_indices
    }


@pytest.fixture
def made() -> Iterator[Any]:
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Cache:
            cache = Cache(*args, **options)
            stack.callback(cache.worker.close)
            return cache

        yield make


def compute(cache: Cache, num_tokens: int, chunk: int = 7) -> None:
    for first in range(0, num_tokens, chunk):
        cache.write(first, min(first + chunk, num_tokens))


LENGTHS = [1, PAGE, WINDOW - 1, WINDOW, WINDOW + 1, 24, 3 * WINDOW, 3 * WINDOW + 11]


@pytest.mark.parametrize("pages", [(PAGE, PAGE), (PAGE, OTHER_PAGE), (OTHER_PAGE, PAGE)])
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("model", ["mixed", "sliding"])
def test_every_step_after_the_handoff_reads_the_window(
    made: Any, model: str, num_tokens: int, pages: tuple[int, int]
) -> None:
    prefill, decode = made(model, "p", page=pages[0]), made(model, "d", page=pages[1], busy=2)
    compute(prefill, num_tokens)
    decode.allocate(num_tokens)
    num_bytes = decode.pull(prefill.offer(num_tokens), num_tokens)
    kept = {"mixed": 4 * min(num_tokens, WINDOW) + 2 * num_tokens, "sliding": 4 * min(num_tokens, WINDOW)}
    assert num_bytes == kept[model] * 2 * 4 * 64 * 4  # layers and slots, K and V, heads, dimension, float32
    for position in range(num_tokens, num_tokens + 2 * WINDOW):
        assert decode.read(position) == expected(decode, position), position
        decode.write(position, position + 1)


@pytest.mark.parametrize("num_tokens", [WINDOW - 1, 3 * WINDOW + 11])
@pytest.mark.parametrize("model", ["mixed", "sliding"])
def test_a_ring_shifted_by_a_block_is_read_wrongly(made: Any, model: str, num_tokens: int) -> None:
    """So that equal positions prove the ring."""
    prefill, decode = made(model, "p"), made(model, "d")
    compute(prefill, num_tokens)
    decode.allocate(num_tokens)
    shifted = tuple(
        blocks if cache.window is None else blocks[1:] + blocks[:1]
        for cache, blocks in zip(prefill.caches, prefill.table(), strict=True)
    )
    decode.pull(prefill.offer(num_tokens, shifted), num_tokens)
    assert decode.read(num_tokens) != expected(decode, num_tokens)


@pytest.mark.parametrize("model", ["mixed", "sliding"])
def test_another_window_is_another_model(made: Any, model: str) -> None:
    prefill, decode = made(model, "p", window=WINDOW + PAGE), made(model, "d")
    compute(prefill, 10)
    decode.allocate(10)
    with pytest.raises(LayoutMismatch, match=r"ring of 20 tokens' here, .* of 28 tokens' there"):
        decode.pull(prefill.offer(10), 10)


def test_layers_of_other_types_are_another_model(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches have the same shapes, and hold other layers."""
    prefill = made("mixed", "p")
    first, second, *others, last = MIXED_LAYERS
    monkeypatch.setattr("window_models.MIXED_LAYERS", [first, last, second, *others[1:], last])
    decode = made("mixed", "d")
    compute(prefill, 10)
    decode.allocate(10)
    with pytest.raises(LayoutMismatch, match="cache group 0: the layer of plane 2 differs: 2 here, 1 there"):
        decode.pull(prefill.offer(10), 10)


@pytest.mark.parametrize("shift", [1, PAGE])
def test_an_allocator_with_another_ring_is_refused_by_name(
    made: Any, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """A release of transformers that keeps a window's tokens elsewhere."""
    kind = batching.SlidingAttentionCacheAllocator
    written = kind.get_write_indices
    monkeypatch.setattr(
        kind, "get_write_indices", lambda self, name, past, length: written(self, name, past + shift, length)
    )
    with pytest.raises(ConfigError, match="lacks SlidingAttentionCacheAllocator with token 0 in slot 0"):
        made("mixed", "p")


def test_attention_types_that_are_not_served_are_named() -> None:
    check_served(["full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="this model also has chunked_attention"):
        check_served({"chunked_attention": 0, "full_attention": 1})


def test_what_a_prompt_takes_of_a_cache(made: Any) -> None:
    """Attention types share it by sectors, and a ring does not grow beyond its window."""
    cache = made("mixed", "p")
    by_window = {each.window: each for each in cache.caches}
    counts: Mapping[int, tuple[int, int]] = {1: (1, 1), WINDOW: (3, 3), WINDOW + 1: (3, 3), 100: (3, 13)}
    for num_tokens, blocks in counts.items():
        assert (by_window[WINDOW].num_blocks(num_tokens), by_window[None].num_blocks(num_tokens)) == blocks
        cache.allocate(num_tokens)
        assert [len(table) for table in cache.table()] == list(blocks)
    assert by_window[None].num_sectors(100) == -(-13 // by_window[None].allocator.blocks_per_sector)
