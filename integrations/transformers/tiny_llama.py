# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny Llama with seeded random weights, the same in every process. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlink.errors import ConfigError

VOCABULARY = 256
_SEED = 2024
# With the usual 0.02, a random Llama repeats its last token and ignores its cache. From 0.1 on, the output varies.
_WEIGHT_STD = 0.2


def tiny_llama(device: str = "cpu") -> Any:
    """Returns a Llama with four layers and four KV heads of 64 dimensions, in float32. Limits torch to one thread.

    Raises ConfigError for a GPU that torch does not see.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch sees no GPU for {device}; run on a machine with a GPU, and install a CUDA build of torch"
        )
    torch.set_num_threads(1)  # makes sums bit-equal in every process
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=_WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,
    )
    network: Any = LlamaForCausalLM(config)
    network.train(False)
    return network.to(device)
