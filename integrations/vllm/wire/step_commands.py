# SPDX-License-Identifier: Apache-2.0
"""Defines the commands of the scheduler's side to the workers' side in one step. These are values that vLLM pickles."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvlink.ticket import LeaseSeat

from .handoff import Handoff
from .handoff_parts import Part


@dataclass(frozen=True, slots=True)
class Load:
    """Pulls a request's blocks into this server's. With `refused`, it is not pulled and reported as failed."""

    request_id: str
    handoff: Handoff | None
    into: tuple[array[int], ...]
    """This server's block ids of each cache group, from token 0 on. 0 means no block."""
    first_token: int
    """Tokens before this one are here already."""
    num_tokens: int
    refused: str = ""
    in_parts: bool = False
    """True if `StepCommands.parts` says what to pull."""
    settles: bool = True
    """False keeps the lease, because other requests of this server are under it."""
    needed_from: tuple[int, ...] = ()
    """By cache group, the first token that is read after the load. If empty, all tokens with blocks are."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Says that a request's ticket is sent."""

    num_blocks: int
    """The number of the pool's blocks that stay for its readers."""
    ttl_s: float
    """The lease's duration from now on."""


@dataclass(frozen=True, slots=True)
class SoftLease:
    """Offers blocks that stay in this server's prefix cache."""

    seat: LeaseSeat
    blocks: array[int]
    """Full blocks of the pool, from token 0 on."""
    ttl_s: float


@dataclass(slots=True)
class StepCommands:
    """The commands, in the order in which they are carried out: a slot that is withdrawn may be granted again.

    The first two are carried out before anything else of the step, in this order: a block may be offered and given away
    at once.
    """

    offered: list[SoftLease] = field(default_factory=list)
    given_away: array[int] = field(default_factory=lambda: array("I"))
    """Blocks of the pool that get new content in this step or later, and were offered."""
    withdrawn: list[str] = field(default_factory=list)
    """Requests whose leases end now; their blocks are free already."""
    granted: dict[str, tuple[LeaseSeat, ...]] = field(default_factory=dict)
    """Requests that will be handed off, with the seats of the leases to take."""
    handed_off: dict[str, HandedOff] = field(default_factory=dict)
    retired: list[str] = field(default_factory=list)
    """Requests that were handed off, whose leases end now, read or not. Their blocks stay until that is reported."""
    loads: list[Load] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    """Further parts of loads."""
    cut: dict[str, str] = field(default_factory=dict)
    """Loads in parts that end now, with the reasons."""
    written: dict[str, int] = field(default_factory=dict)
    """Requests that are read while they are computed, with what readers may read after this step.

    Readers of one layout follow blocks of the pool, those of several follow tokens of the layout with the most.
    """
    model: int = 0
    """The 8 bytes of the model that the tickets of this step name. 0: not known."""
    idle: bool = False
    """True if the step computes nothing, so that the engine would sleep a millisecond after it."""
