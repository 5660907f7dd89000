# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the workers' side in one step. Values only; vLLM pickles them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvlink.ticket import LeaseSeat

from .handoff import Handoff
from .parts import Part


@dataclass(frozen=True, slots=True)
class Load:
    """Pull a request's blocks into ours. `refused`: do not, and report that it failed."""

    request_id: str
    handoff: Handoff | None
    groups: tuple[array[int], ...]
    """Our block ids of each cache group, from token 0 on; 0: no block."""
    first_token: int
    """Tokens before it are here already."""
    num_tokens: int
    refused: str = ""
    in_parts: bool = False
    """What to pull comes by `StepCommands.parts`."""
    settles: bool = True
    """False: the lease stays, as other requests of this server are under it."""
    needed_from: tuple[int, ...] = ()
    """By cache group, the first token that is read after the load; empty: all for which there are blocks of ours."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The ticket is out."""

    num_blocks: int
    """Of the pool, that stay for its readers."""
    ttl_s: float
    """From now on."""


@dataclass(slots=True)
class StepCommands:
    """Carried out in this order: a slot that is withdrawn may be granted again."""

    withdrawn: list[str] = field(default_factory=list)
    """Requests whose leases end now; their blocks are free already."""
    granted: dict[str, tuple[LeaseSeat, ...]] = field(default_factory=dict)
    """Requests that will be handed over: take a lease at these seats."""
    handed_off: dict[str, HandedOff] = field(default_factory=dict)
    retired: list[str] = field(default_factory=list)
    """Requests that were handed over, whose leases end now, read or not. Their blocks stay until that is reported."""
    loads: list[Load] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    """Loads whose prefill server has said more."""
    cut: dict[str, str] = field(default_factory=dict)
    """Loads in parts that no more comes for, and why."""
    written: dict[str, int] = field(default_factory=dict)
    """After this step: requests that are read while they are computed, and how many of their blocks are written."""
    idle: bool = False
    """Nothing is computed in this step: the engine would sleep a millisecond behind it."""
