# SPDX-License-Identifier: Apache-2.0
"""Defines KV geometries of named models, from their model cards, and reads any Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, Pipeline

BLOCK_TOKENS = 16

_BF16_BYTES = 2
_MOST_CONFIG_BYTES = 1 << 20
_MOST = 1 << 20  # layers, heads, head sizes: no model has more
_WITHOUT_CACHE = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv"})


@dataclass(frozen=True, slots=True)
class Model:
    """The KV cache of one token in each layer: K and V of `heads` heads, or (MLA) one latent."""

    name: str
    layers: int
    heads: int
    head_dim: int
    mla: bool = False
    dtype_bytes: int = _BF16_BYTES

    def geometry(self, tp_size: int, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> Geometry:
        """Returns one rank's share at TP `tp_size` as a cache of its own. Raises ConfigError if heads do not divide."""
        if max(self.heads, tp_size) % min(self.heads, tp_size):
            raise ConfigError(f"{self.heads} KV heads do not divide among {tp_size} ranks")
        return Geometry(
            num_layers=self.layers,
            total_heads=max(1, self.heads // tp_size),
            row_bytes=self.head_dim * self.dtype_bytes,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            planes_per_layer=self.planes_per_layer,
            model=self.name,
        )

    def rank(
        self,
        rank: int,
        tp_size: int,
        num_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        stage: tuple[int, int] = (0, 1),
    ) -> Geometry:
        """Returns a rank's share of the whole cache, which `geometry` returns at TP 1.

        stage: the rank in the pipeline, and the number of stages. Raises ConfigError if there are too few layers.
        """
        return replace(
            self.geometry(1, num_blocks, block_tokens),
            tp_rank=rank,
            tp_size=tp_size,
            pipeline=Pipeline.even(*stage, self.layers),
        )

    @property
    def planes_per_layer(self) -> int:
        """Returns 2 for K and V, or 1 for the latent."""
        return 1 if self.mla else 2

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of all layers on all ranks that share the heads; every rank of an MLA model has as many."""
        return self.layers * self.planes_per_layer * self.heads * self.head_dim * self.dtype_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> Model:
        """Reads a Hugging Face config.json. Raises ConfigError for what is missing or absurd."""
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise ConfigError("this config.json describes no language model: text_config is not an object")
        layers = _count(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        kinds = text.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            layers = sum(str(kind) not in _WITHOUT_CACHE for kind in kinds)
        if not layers:
            raise ConfigError("no layer of this model has a KV cache")
        if text.get("kv_lora_rank"):
            latent = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
            return cls(name, layers, 1, latent, True, _dtype_bytes(text, config))
        queries = _count(text, "num_attention_heads", "n_head", "n_heads")
        heads = _count(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=queries)
        width = _count(text, "head_dim", default=0)
        width = width or _count(text, "hidden_size", "n_embd", "d_model") // queries
        if not width:
            raise ConfigError("this config.json has more attention heads than hidden_size allows")
        return cls(name, layers, heads, width, False, _dtype_bytes(text, config))

    @classmethod
    def from_file(cls, path: Path) -> Model:
        """Reads a config.json. Raises ConfigError."""
        try:
            if path.stat().st_size > _MOST_CONFIG_BYTES:
                raise ConfigError(
                    f"{path} has more than {_MOST_CONFIG_BYTES >> 20} MiB, so it is not a config.json"
                )
            config = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a readable config.json: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} does not hold a JSON object")
        kind = config.get("model_type")
        return cls.from_config(config, str(kind) if kind else path.parent.name)


MODELS = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", 32, 8, 128),
        Model("llama-3.1-70b", 80, 8, 128),
        Model("llama-3.1-405b", 126, 8, 128),
        Model("qwen2.5-7b", 28, 4, 128),
        Model("qwen3-8b", 36, 8, 128),
        Model("qwen3-30b-a3b", 48, 4, 128),
        Model("qwen3-235b-a22b", 94, 4, 128),
        Model("deepseek-v3", 61, 1, 576, mla=True),
        Model("gpt-oss-120b", 36, 8, 64),
    )
}


def model_of(name: str) -> Model:
    """Returns a model by its name, or by the path of its config.json. Raises ConfigError."""
    if name.endswith(".json") or name.startswith(("/", "./", "../")):
        return Model.from_file(Path(name))
    model = MODELS.get(name.lower())
    if model is None:
        raise ConfigError(
            f"no model is called {name!r} here; choose from {', '.join(MODELS)}, or give the path of a config.json"
        )
    return model


def _count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Returns the first of `names` that the config has."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise ConfigError(f"{name} in config.json is {value!r}, not a number of 1 to {_MOST}")
        return value
    if default is None:
        raise ConfigError(f"config.json has no {names[0]}")
    return default


def _dtype_bytes(text: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Returns the size of the cache's elements if it is kept like the weights; quantised weights have 16-bit caches."""
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return 4 if dtype == "float32" else _BF16_BYTES
