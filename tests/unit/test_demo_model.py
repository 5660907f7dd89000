# SPDX-License-Identifier: Apache-2.0
"""The demo's model: its tokens vary, and depend on every block of the cache. So equal tokens prove right blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
transformers = pytest.importorskip("transformers", minversion="5.19", reason="pip install 'kvlink[demo]'")

from kvlink.demo.model import tiny_llama  # noqa: E402
from kvlink.demo.text import PROMPTS, tokenize  # noqa: E402
from kvlink.integrations.transformers.demo import PAGE_TOKENS  # noqa: E402

NUM_NEW = 24


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


@torch.inference_mode()
def continued(llama: Any, text: str, spoilt: slice = slice(0, 0)) -> list[int]:
    """Greedy tokens after `text`, with a part of the prompt's cache negated."""
    cache = transformers.DynamicCache(config=llama.config)
    tokens = [int(llama(torch.tensor([tokenize(text)]), past_key_values=cache).logits[0, -1].argmax())]
    for layer in cache.layers:
        layer.keys[:, :, spoilt].neg_()
        layer.values[:, :, spoilt].neg_()
    while len(tokens) < NUM_NEW:
        logits = llama(torch.tensor([tokens[-1:]]), past_key_values=cache).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def test_prompts_cover_the_edges_of_a_block() -> None:
    lengths = [len(tokenize(text)) for text in PROMPTS.values()]
    assert min(lengths) < PAGE_TOKENS
    assert PAGE_TOKENS in lengths
    assert PAGE_TOKENS + 1 in lengths
    assert max(lengths) > 1000
    assert max(lengths) % PAGE_TOKENS


def test_two_models_are_one_model(llama: Any) -> None:
    for ours, theirs in zip(llama.parameters(), tiny_llama().parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_vary_and_depend_on_every_block(llama: Any, name: str) -> None:
    expected = continued(llama, PROMPTS[name])
    assert len(set(expected)) > NUM_NEW // 2
    starts = range(0, len(tokenize(PROMPTS[name])), PAGE_TOKENS)
    for start in random.Random(0).sample(starts, min(len(starts), 12)):
        assert continued(llama, PROMPTS[name], slice(start, start + PAGE_TOKENS)) != expected
