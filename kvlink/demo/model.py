# SPDX-License-Identifier: Apache-2.0
"""A real, tiny Llama with seeded random weights: the same in every process, nothing downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """Geometry of the cache: `dtype` is a torch dtype name."""

    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 64
    dtype: str = "float32"


Cache: TypeAlias = Any
"""A DynamicCache; untyped because its attributes differ between releases of transformers."""

SHAPE = KVShape()
VOCABULARY = 256
_SEED = 2024
# With the usual 0.02 a random Llama repeats its last token and ignores its cache. From 0.1 on, the output
# varies and changes with any block of the cache (tests/unit/test_demo_model.py).
_WEIGHT_STD = 0.2


class TinyLlama:
    """Greedy prefill and decode with the plain Hugging Face cache. Not thread-safe."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # bit-equal sums in every process
        torch.manual_seed(_SEED)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=SHAPE.num_layers,
            num_attention_heads=2 * SHAPE.num_heads,
            num_key_value_heads=SHAPE.num_heads,
            head_dim=SHAPE.head_dim,
            max_position_embeddings=4096,
            initializer_range=_WEIGHT_STD,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.network: Any = LlamaForCausalLM(config)
        self.network.train(False)

    def prefill(self, tokens: list[int]) -> tuple[Cache, int]:
        """Runs the prompt. Returns its cache and the first generated token."""
        cache = DynamicCache()
        return cache, self._next(tokens, cache)

    def decode(self, cache: Cache, first_token: int, num_tokens: int) -> list[int]:
        """`num_tokens` greedy tokens that start with `first_token`; extends `cache`."""
        tokens = [first_token]
        while len(tokens) < num_tokens:
            tokens.append(self._next(tokens[-1:], cache))
        return tokens

    def generate(self, tokens: list[int], num_tokens: int) -> list[int]:
        """The single-process run: prefill and decode on one cache that nobody moved."""
        return self.decode(*self.prefill(tokens), num_tokens)

    @torch.inference_mode()
    def _next(self, tokens: list[int], cache: Cache) -> int:
        output = self.network(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return int(output.logits[0, -1].argmax())


def cache_planes(cache: Cache) -> list[torch.Tensor]:
    """K and V of layer 0, K and V of layer 1, …: each (tokens, heads, head_dim)."""
    if hasattr(cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
    else:  # transformers before 4.56
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [plane[0].transpose(0, 1) for pair in pairs for plane in pair]


def cache_of(planes: list[torch.Tensor]) -> Cache:
    """Inverse of `cache_planes`."""
    cache = DynamicCache()
    batched = [plane.transpose(0, 1).unsqueeze(0) for plane in planes]
    for layer, (keys, values) in enumerate(zip(batched[::2], batched[1::2], strict=True)):
        cache.update(keys, values, layer)
    return cache
