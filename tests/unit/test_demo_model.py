# SPDX-License-Identifier: Apache-2.0
"""The demo's own parts: a model whose tokens depend on every block, and paging that loses no byte."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
pytest.importorskip("transformers", reason="pip install 'kvlink[demo]'")

from kvlink.demo.model import SHAPE, TinyLlama, cache_of, cache_planes  # noqa: E402
from kvlink.demo.paging import (  # noqa: E402
    BLOCK_TOKENS,
    NUM_BLOCKS,
    BlockAllocator,
    PagedPlanes,
    blocks_for,
)
from kvlink.demo.text import PROMPTS, tokenize  # noqa: E402

NUM_NEW = 24


@pytest.fixture(scope="module")
def llama() -> TinyLlama:
    return TinyLlama()


def empty_planes() -> list[torch.Tensor]:
    shape = (NUM_BLOCKS, BLOCK_TOKENS, SHAPE.num_heads, SHAPE.head_dim)
    return [torch.zeros(shape, dtype=getattr(torch, SHAPE.dtype)) for _ in range(2 * SHAPE.num_layers)]


def paged(llama: TinyLlama, text: str) -> tuple[PagedPlanes, list[int], int, int]:
    """A prompt's cache in scattered blocks: the planes, block ids, number of tokens, first new token."""
    tokens = tokenize(text)
    cache, first = llama.prefill(tokens)
    planes = PagedPlanes(empty_planes())
    blocks = BlockAllocator(NUM_BLOCKS, seed="prefill").allocate(blocks_for(len(tokens)))
    planes.poison(list(range(NUM_BLOCKS)))
    planes.write(cache_planes(cache), blocks)
    return planes, blocks, len(tokens), first


def test_prompts_cover_the_edges_of_a_block() -> None:
    lengths = [len(tokenize(text)) for text in PROMPTS.values()]
    assert min(lengths) < BLOCK_TOKENS
    assert BLOCK_TOKENS in lengths
    assert BLOCK_TOKENS + 1 in lengths
    assert max(lengths) > 1000
    assert max(lengths) % BLOCK_TOKENS


@pytest.mark.parametrize("name", PROMPTS)
def test_a_paged_cache_is_the_same_cache(llama: TinyLlama, name: str) -> None:
    original, first = llama.prefill(tokenize(PROMPTS[name]))
    planes, blocks, num_tokens, _ = paged(llama, PROMPTS[name])
    restored = cache_of(planes.read(blocks, num_tokens))
    for before, after in zip(cache_planes(original), cache_planes(restored), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    assert llama.decode(restored, first, NUM_NEW) == llama.decode(original, first, NUM_NEW)


def test_two_models_are_one_model(llama: TinyLlama) -> None:
    for ours, theirs in zip(llama.network.parameters(), TinyLlama().network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_our_loop_is_hugging_face_generate(llama: TinyLlama) -> None:
    tokens = tokenize(PROMPTS["some blocks and a bit"])
    output = llama.network.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    assert output[0, len(tokens) :].tolist() == llama.generate(tokens, NUM_NEW)


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_vary_and_depend_on_every_block(llama: TinyLlama, name: str) -> None:
    """What makes token equality a proof: a change in any one block changes the answer."""
    planes, blocks, num_tokens, first = paged(llama, PROMPTS[name])
    intact = planes.read(blocks, num_tokens)
    expected = llama.decode(cache_of(intact), first, NUM_NEW)
    assert len(set(expected)) > NUM_NEW // 2
    for index in random.Random(0).sample(range(len(blocks)), min(len(blocks), 12)):
        changed = [plane.clone() for plane in intact]
        for plane in changed:
            plane[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].neg_()
        assert llama.decode(cache_of(changed), first, NUM_NEW) != expected


def test_a_block_that_was_not_pulled_is_noticed(llama: TinyLlama) -> None:
    planes, blocks, num_tokens, first = paged(llama, PROMPTS["a page"])
    expected = llama.decode(cache_of(planes.read(blocks, num_tokens)), first, NUM_NEW)
    digest = planes.digest(blocks, num_tokens)
    planes.poison(blocks[-1:])
    assert planes.digest(blocks, num_tokens) != digest
    assert llama.decode(cache_of(planes.read(blocks, num_tokens)), first, NUM_NEW) != expected


def test_the_allocator_scatters_and_never_lends_a_block_twice() -> None:
    allocator = BlockAllocator(64, seed="any")
    first, second = allocator.allocate(40), allocator.allocate(24)
    assert sorted(first + second) == list(range(64))
    assert first != sorted(first)
    with pytest.raises(MemoryError, match="1 blocks wanted, 0 free"):
        allocator.allocate(1)
    allocator.free(second)
    assert sorted(allocator.allocate(24)) == sorted(second)
