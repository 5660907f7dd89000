# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a small decoder-only transformer in numpy, the same in every process. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Cache = list[tuple[Array, Array]]
"""Keys and values of each layer, as [tokens, heads, head_dim]."""

NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCABULARY = 4, 4, 64, 256
_WIDTH = NUM_HEADS * HEAD_DIM
_SEED = 2024
# With small weights, a random transformer repeats its last token and ignores its cache. From 0.1 on, the output varies
# and changes with any block of the cache (tests/unit/test_demo_model.py).
_WEIGHT_STD = 0.2


class Transformer:
    """Rotary attention and a gated MLP in each layer, with seeded random weights in float32."""

    def __init__(self) -> None:
        draw = np.random.default_rng(_SEED)

        def weights(*shape: int) -> Array:
            return (_WEIGHT_STD * draw.standard_normal(shape)).astype(np.float32)

        self._embedding = weights(VOCABULARY, _WIDTH)
        self._layers = [
            (
                weights(_WIDTH, 3 * _WIDTH),
                weights(_WIDTH, _WIDTH),
                weights(_WIDTH, 4 * _WIDTH),
                weights(2 * _WIDTH, _WIDTH),
            )
            for _ in range(NUM_LAYERS)
        ]
        self._head = weights(_WIDTH, VOCABULARY)

    def forward(self, tokens: Sequence[int], cache: Cache) -> int:
        """Appends the keys and values of `tokens` to `cache`, and returns the most likely next token.

        An empty `cache` is that of a new request.
        """
        if not cache:
            cache += [(np.zeros((0, NUM_HEADS, HEAD_DIM), np.float32),) * 2 for _ in range(NUM_LAYERS)]
        past = len(cache[0][0])
        positions = np.arange(past, past + len(tokens))
        hidden = self._embedding[list(tokens)]
        for index, (qkv, out, up, down) in enumerate(self._layers):
            query, key, value = np.split(
                (_normed(hidden) @ qkv).reshape(len(tokens), -1, HEAD_DIM), 3, axis=1
            )
            keys = np.concatenate([cache[index][0], _rotated(key, positions)])
            values = np.concatenate([cache[index][1], value])
            cache[index] = keys, values
            hidden = hidden + _attention(_rotated(query, positions), keys, values, positions) @ out
            gate, lifted = np.split(_normed(hidden) @ up, 2, axis=1)
            hidden = hidden + (np.maximum(gate, 0) * lifted) @ down
        return int((_normed(hidden[-1:]) @ self._head).argmax())

    def generate(self, token: int, cache: Cache, num_tokens: int) -> list[int]:
        """Returns `token` and the tokens after it, `num_tokens` in all. `cache` is of all tokens before it."""
        tokens = [token]
        while len(tokens) < num_tokens:
            tokens.append(self.forward(tokens[-1:], cache))
        return tokens


def _normed(hidden: Array) -> Array:
    scale: Array = 1 / np.sqrt((hidden * hidden).mean(-1, keepdims=True) + np.float32(1e-6))
    return hidden * scale


def _rotated(rows: Array, positions: NDArray[np.int64]) -> Array:
    """Applies the rotary position embedding."""
    half = HEAD_DIM // 2
    angles = positions[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    sin, cos = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    low, high = rows[..., :half], rows[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(query: Array, keys: Array, values: Array, positions: NDArray[np.int64]) -> Array:
    """Each token reads those up to its own position."""
    scores = query.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) / np.float32(HEAD_DIM**0.5)
    scores[:, np.arange(len(keys))[None, :] > positions[:, None]] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    mixed: Array = (scores @ values.transpose(1, 0, 2)).transpose(1, 0, 2)
    return mixed.reshape(len(query), -1)
