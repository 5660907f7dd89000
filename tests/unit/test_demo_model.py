# SPDX-License-Identifier: Apache-2.0
"""The demo's model: its tokens vary, and depend on every block of the cache. So equal tokens prove right blocks."""

from __future__ import annotations

import random

import pytest

from kvlink.demo.model import Cache, Transformer
from kvlink.demo.servers import BLOCK_TOKENS, PROMPTS, tokenize

NUM_NEW = 24
MODEL = Transformer()


def continued(text: str, spoilt: slice = slice(0, 0)) -> list[int]:
    """Greedy tokens after `text`, with a part of the prompt's cache negated."""
    cache: Cache = []
    token = MODEL.forward(tokenize(text), cache)
    for rows in (rows for layer in cache for rows in layer):
        rows[spoilt] *= -1
    return MODEL.generate(token, cache, NUM_NEW)


def test_prompts_cover_the_edges_of_a_block() -> None:
    lengths = [len(tokenize(text)) for text in PROMPTS.values()]
    assert min(lengths) < BLOCK_TOKENS
    assert {BLOCK_TOKENS, BLOCK_TOKENS + 1} <= set(lengths)
    assert max(lengths) > 1000
    assert max(lengths) % BLOCK_TOKENS


def test_two_models_are_one_model() -> None:
    caches: list[Cache] = [[], []]
    tokens = [
        model.forward(tokenize("Once upon a"), cache)
        for model, cache in zip((MODEL, Transformer()), caches, strict=True)
    ]
    assert tokens[0] == tokens[1]
    assert all(
        (a == b).all()
        for ours, theirs in zip(*caches, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_a_token_at_a_time_is_the_prompt_at_once() -> None:
    prompt, cache = tokenize(PROMPTS["some blocks and a bit"]), Cache()
    assert [MODEL.forward([token], cache) for token in prompt][-1] == MODEL.forward(prompt, [])


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_vary_and_depend_on_every_block(name: str) -> None:
    expected = continued(PROMPTS[name])
    assert len(set(expected)) > NUM_NEW // 2
    starts = range(0, len(tokenize(PROMPTS[name])), BLOCK_TOKENS)
    for start in random.Random(0).sample(starts, min(len(starts), 6)):
        assert continued(PROMPTS[name], slice(start, start + BLOCK_TOKENS)) != expected
