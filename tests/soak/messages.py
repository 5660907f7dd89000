# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between the processes of a soak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from soak.ledger import Outcome


@dataclass(frozen=True, slots=True)
class Offered:
    """An owner sends a ticket for readers."""

    owner: int
    request: int
    ticket: str
    num_blocks: int
    may_be_stale: bool
    """Its lease is short, or will be aborted."""


@dataclass(frozen=True, slots=True)
class Abort:
    """To an owner: nobody wants this request any more."""

    request: int


class Ending(Enum):
    """How a reader ends a pull before it has ended by itself."""

    NONE = "none"
    CANCEL = "cancel"
    WAIT_FOR = "asyncio.wait_for"
    TASK = "task.cancel"
    BLOCK = "async with"
    AWAIT = "await"
    """Not at all, and waits on an event loop."""


@dataclass(frozen=True, slots=True)
class PullThis:
    """To a reader."""

    number: int
    offered: Offered
    transport: str
    first: int
    num_blocks: int
    settle: bool
    timeout_s: float
    ending: Ending
    ends_after_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """To a reader: all who shared the ticket are through."""

    offered: Offered
    transport: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A reader reports a pull."""

    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Late:
    """A reader reports how many places were written to after their pull."""

    transport: str
    places: int


@dataclass(frozen=True, slots=True)
class Finish:
    """To both: begin nothing, end what is under way, say what is left, and close."""


@dataclass(frozen=True, slots=True)
class AtRest:
    """Both send this as their last message."""

    held: Mapping[str, int]
