# SPDX-License-Identifier: Apache-2.0
"""Describes what two servers must agree on before one reads the other's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "vocab_size",
    "sliding_window",
    "rope_theta",
)


def model_text(architectures: Sequence[str] | None, config: Any) -> str:
    """Returns a readable text of a Hugging Face text configuration without the model's path or the engine's version."""
    values = {name: getattr(config, name, None) for name in _FIELDS}
    known = [f"{name}={value}" for name, value in values.items() if value is not None]
    return " ".join(["/".join(architectures or ["?"]), *known])
