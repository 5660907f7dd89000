# SPDX-License-Identifier: Apache-2.0
"""The judge's yardstick: the same model and prompts on a cache that never leaves its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvlink.demo.messages import Reply
from kvlink.demo.model import TinyLlama
from kvlink.demo.text import NUM_NEW_TOKENS, PROMPTS, Expected, tokenize


class ReferenceRole:
    """Knows no worker and no pool."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """See Role."""
        return {"tokens": single_process_run}

    def close(self) -> None:
        """See Role."""


def single_process_run() -> Expected:
    """Seconds of work."""
    model = TinyLlama()
    return {name: model.generate(tokenize(text), NUM_NEW_TOKENS) for name, text in PROMPTS.items()}


make = ReferenceRole
