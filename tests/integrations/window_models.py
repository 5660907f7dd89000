# SPDX-License-Identifier: Apache-2.0
"""Tiny models with sliding windows and seeded random weights, the same in every process. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

_SEED = 2031
_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2


def config_of(name: str, window: int) -> Any:
    """Returns the configuration of "mixed" (Gemma-3) or "sliding" (Mistral), whose layers all have the window."""
    from transformers import Gemma3TextConfig, MistralConfig

    if name == "sliding":
        return MistralConfig(**_COMMON, num_hidden_layers=4, sliding_window=window, initializer_range=0.2)
    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=len(MIXED_LAYERS),
        layer_types=MIXED_LAYERS,
        sliding_window=window,
        query_pre_attn_scalar=64,
        initializer_range=0.1,  # its tokens vary, and change with either cache
    )


def make(name: str, window: int) -> Any:
    """Returns the model. Limits torch to one thread, which makes sums bit-equal in every process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    network: Any = AutoModelForCausalLM.from_config(config_of(name, window))
    network.train(False)
    return network
