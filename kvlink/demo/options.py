# SPDX-License-Identifier: Apache-2.0
"""Defines what the caller of the demo chooses, beside the transports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """How both servers and the single-process run compute."""

    patience: float = 1.0
    """Multiplies every deadline."""
    transformers: bool = False
    """Compute by continuous batching of Hugging Face transformers, instead of by a small transformer in numpy."""
    device: str = "cpu"
    """The device of the models, as torch names it."""
    stages: tuple[int, int] = (1, 1)
    """The stages of prefill's and of decode's pipeline, with a worker for each."""

    def role(self, name: str) -> str:
        """Returns the role that computes as `name` does."""
        return f"transformers {name}" if self.transformers and name != "coordinator" else name

    def arguments(self, name: str) -> dict[str, Any]:
        """Returns what to open a role with, beside its transport."""
        if self.transformers:
            return {"patience": self.patience, "device": self.device}
        return {"patience": self.patience} | ({} if name == "reference" else {"stages": self.stages})
