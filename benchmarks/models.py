# SPDX-License-Identifier: Apache-2.0
"""KV geometries of named models, in bfloat16. Layer and head counts are those of the model cards."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.layout import Geometry

_DTYPE_BYTES = 2
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Model:
    """What one token leaves behind in each layer: K and V of `heads` heads, or (MLA) one latent."""

    layers: int
    heads: int
    head_dim: int
    mla: bool = False


MODELS = {
    "llama-3.1-8b": Model(32, 8, 128),
    "llama-3.1-70b": Model(80, 8, 128),
    "llama-3.1-405b": Model(126, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "qwen3-8b": Model(36, 8, 128),
    "qwen3-30b-a3b": Model(48, 4, 128),
    "qwen3-235b-a22b": Model(94, 4, 128),
    "deepseek-v3": Model(61, 1, 576, mla=True),
    "gpt-oss-120b": Model(36, 8, 64),
}


def geometry_of(name: str, tp_size: int, num_blocks: int) -> Geometry:
    """One rank's share at TP `tp_size`, as a cache of its own. Raises ConfigError for names not in the table."""
    model = MODELS.get(name.lower())
    if model is None:
        raise ConfigError(f"no model is called {name!r} here; choose from {', '.join(MODELS)}")
    return Geometry(
        num_layers=model.layers,
        total_heads=max(1, model.heads // tp_size),
        row_bytes=model.head_dim * _DTYPE_BYTES,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        planes_per_layer=1 if model.mla else 2,
        model=name.lower(),
    )
