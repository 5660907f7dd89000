# SPDX-License-Identifier: Apache-2.0
"""Defines the caches of models that have several kinds: compressed rows, indexers, windows and states.

Rows and layers are those that vLLM 0.32 makes from the models' public configurations, which `source` names. What is
moved of them is what the connector for vLLM moves: rows, or whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.layout import Geometry


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The caches of one kind in `layers` layers, whose rows stand for `row_tokens` tokens each."""

    layers: int
    row_bytes: int
    row_tokens: int = 1
    block_tokens: int = 256
    window: int = 0
    """The last tokens that are kept; 0 for all of them."""
    heads: int = 1
    planes: int = 1
    """2 for K and V."""
    paged: bool = False
    """True if whole pages are moved, because the scales of their rows may be behind the values of all."""
    is_state: bool = False
    """True for a state of `row_bytes` bytes, of which each layer of a request has one."""

    def rows(self, tokens: int) -> int:
        """Returns what is moved of a request of so many tokens: whole rows, or each page that is begun."""
        held = min(tokens, self.window or tokens)
        if self.paged:
            return -(-held // self.block_tokens)
        return 1 if self.is_state else held // self.row_tokens

    @property
    def block_rows(self) -> int:
        """The rows of a block, or 1 if a page is moved as one."""
        return 1 if self.is_state or self.paged else self.block_tokens // self.row_tokens

    def blocks(self, tokens: int) -> int:
        """Returns the blocks that a request needs."""
        return -(-self.rows(tokens) // self.block_rows)

    def geometry(self, model: str, tp: int, num_blocks: int) -> Geometry:
        """Returns one rank's share at TP `tp`. Ranks share states and heads, and have all of what has one head."""
        if (self.heads > 1 and max(self.heads, tp) % min(self.heads, tp)) or (
            self.is_state and self.row_bytes % tp
        ):
            raise ConfigError(f"the caches of {model} do not divide among {tp} ranks")
        page_rows = self.block_tokens // self.row_tokens if self.paged else 1
        return Geometry(
            num_layers=self.layers,
            total_heads=max(1, self.heads // tp),
            row_bytes=self.row_bytes * page_rows // (tp if self.is_state else 1),
            num_blocks=num_blocks,
            block_tokens=self.block_rows,
            planes_per_layer=self.planes,
            dtype="uint8",
            model=model,
        )


@dataclass(frozen=True, slots=True)
class GroupedModel:
    """A model with several kinds of caches."""

    name: str
    source: str
    groups: Sequence[CacheRows]


_SPARSE, _INDEXER = 584, 132  # with 8 and 4 bytes of scales
_COMPRESSOR_4, _COMPRESSOR_128 = (
    4 * 2 * 2 * 512,
    4 * 2 * 512,
)  # float32, keys and scores, twice for the overlap

GROUPED_MODELS = {
    model.name: model
    for model in (
        GroupedModel(
            "deepseek-v4",
            "InferenceX#2510: 61 layers, 30 with rows of 4 tokens and 31 of 128; rows, and what is not compressed yet, "
            "as in vLLM 0.32, models/deepseek_v4",
            (
                CacheRows(30, _SPARSE, row_tokens=4, paged=True),
                CacheRows(30, _INDEXER, row_tokens=4, paged=True),
                CacheRows(31, _SPARSE, row_tokens=128, paged=True),
                CacheRows(61, _SPARSE, block_tokens=64, window=128, paged=True),
                CacheRows(30, _COMPRESSOR_4, block_tokens=4, window=8),
                CacheRows(30, _COMPRESSOR_4 // 4, block_tokens=4, window=8),
                CacheRows(31, _COMPRESSOR_128, block_tokens=8, window=128),
            ),
        ),
        GroupedModel(
            "glm-5",
            "transformers' GlmMoeDsaConfig: 78 layers, latents of 512 + 64 in bfloat16, an indexer of 128 and a scale",
            (CacheRows(78, 2 * 576, block_tokens=64), CacheRows(78, _INDEXER, block_tokens=64, paged=True)),
        ),
        GroupedModel(
            "kimi-k3",
            "config.json as in inference-sim#1635: 24 MLA layers of 512 + 64 and 69 of KDA with 96 heads of 128, and "
            "convolutions of 4; bfloat16, recurrent states in float32",
            (
                CacheRows(24, 2 * 576, block_tokens=64),
                CacheRows(69, 4 * 96 * 128 * 128, is_state=True),
                CacheRows(69, 2 * 3 * 3 * 96 * 128, is_state=True),
            ),
        ),
        GroupedModel(
            "qwen3-next",
            "transformers' Qwen3NextConfig: every fourth of 48 layers has 2 KV heads of 256; the others, gated delta "
            "nets, 16 heads of keys and 32 of values of 128, and convolutions of 4",
            (
                CacheRows(12, 2 * 256, heads=2, planes=2, block_tokens=64),
                CacheRows(36, 4 * 32 * 128 * 128, is_state=True),
                CacheRows(36, 2 * 3 * (2 * 16 + 32) * 128, is_state=True),
            ),
        ),
    )
}
