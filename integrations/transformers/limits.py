# SPDX-License-Identifier: Apache-2.0
"""Refuses arguments of a request that would raise in a batch, and so end transformers' loop for every request."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from kvlink.errors import ConfigError

from .batching import Batching

_MIN_TEMPERATURE = 1e-6  # logits that are divided by less may overflow


def check_options(batching: Batching, options: dict[str, Any]) -> None:
    """Raises ConfigError for arguments of logit processors that the manager does not have, or out of range."""
    try:
        batching.processor.logit_processor.check_kwargs(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    temperature, top_k, top_p = (options.get(name) for name in ("temperature", "top_k", "top_p"))
    if temperature is not None and not (isfinite(temperature) and temperature >= _MIN_TEMPERATURE):
        raise ConfigError(f"temperature must be at least {_MIN_TEMPERATURE}, not {temperature}")
    if top_k is not None and not 1 <= top_k <= batching.num_embeddings:
        raise ConfigError(f"top_k must be from 1 to {batching.num_embeddings}, not {top_k}")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ConfigError(f"top_p must be from 0 to 1, not {top_p}")


def check_readable(batching: Batching, tokens: Sequence[int]) -> None:
    """Raises ConfigError for token ids that this process's model cannot read."""
    if tokens and max(tokens) >= batching.num_embeddings:
        raise ConfigError(
            f"token id {max(tokens)} is not one of this model, which has {batching.num_embeddings}; use the tokenizer "
            "of this model, and run the same model at both ends"
        )


def checked_count(max_new_tokens: object) -> int | None:
    """Returns a limit of new tokens. Raises ConfigError for what is not one."""
    if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
        raise ConfigError(f"max_new_tokens must be a positive integer, not {max_new_tokens!r:.40}")
    return max_new_tokens


def checked_eos(eos_token_id: Any) -> int | list[int] | None:
    """Returns the ids of tokens that end a text. Raises ConfigError for what are not such ids."""
    ids = eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
    if eos_token_id is not None and not all(type(each) is int for each in ids):
        raise ConfigError(f"eos_token_id must be an integer or a list of integers, not {eos_token_id!r:.40}")
    return list(ids) if isinstance(eos_token_id, tuple) else eos_token_id
