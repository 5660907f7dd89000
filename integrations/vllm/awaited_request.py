# SPDX-License-Identifier: Apache-2.0
"""Defines what decode knows of a request that is prefilled elsewhere, until it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from .announcements import Following
from .handoff import Handoff
from .handoff_parts import Part


@dataclass(slots=True)
class AwaitedRequest:
    """A request with its handoff. `handoff` is None while it is awaited, and if `refused` says why there is none."""

    handoff: Handoff | None = None
    num_tokens: int = 0
    """The tokens that prefill computes or has computed."""
    refused: str = ""
    following: Following | None = None
    parts: list[Part] = field(default_factory=list)
    """The parts that the workers do not know yet."""
    started: bool = False
    """True once the workers know of the load."""
    settles: bool = False
    """True if its load ends the lease."""
    ask_again: bool = False
    """True if the router may come again with prefill's answer: the same handoff, under the same lease."""

    @property
    def awaited(self) -> bool:
        """Whether prefill has not sent a handoff yet."""
        return self.handoff is None and not self.refused
