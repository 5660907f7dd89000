# SPDX-License-Identifier: Apache-2.0
"""An owner that a decode worker is connected to, and the path that was chosen to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvlink.errors import (
    AccessDenied,
    Cancelled,
    ConfigError,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    TransportUnavailable,
    UnknownRequest,
)
from kvlink.layout import Assignment
from kvlink.transfer.cost_model import FittedCost
from kvlink.transfer.engine import Connection, Planner
from kvlink.types import WorkerCard


@dataclass(frozen=True, slots=True)
class Refusal:
    """A transport that was not taken, and why."""

    transport: str
    reason: str


class Refusals:
    """The transports by which one owner is not reached, in the order of trying, and why."""

    def __init__(self, worker_id: str) -> None:
        self.rows: list[Refusal] = []
        self._worker_id = worker_id
        self._errors: list[KVLinkError] = []

    def note(self, transport: str, reason: str | KVLinkError) -> None:
        """An exception is what opening the path failed with, a sentence why nobody tried."""
        self.rows.append(Refusal(transport, str(reason)))
        if isinstance(reason, KVLinkError):
            self._errors.append(reason)

    def error(self) -> KVLinkError:
        """What to raise when no path is left. All reasons are in it; it is retryable if one of them is."""
        if len(self.rows) == 1 and self._errors:
            return self._errors[0]
        reasons = "; ".join(f"{row.transport}: {row.reason}" for row in self.rows) or "none in common"
        sentence = f"no transport reaches {self._worker_id} ({reasons})"
        retryable = [error for error in self._errors if error.retryable]
        if retryable:
            silent = all(isinstance(error, PeerUnreachable) and error.silent for error in retryable)
            return PeerUnreachable(sentence, silent)
        kinds = {type(error) for error in self._errors}
        if len(kinds) == 1 and kinds <= {AccessDenied, ConfigError}:
            return kinds.pop()(sentence)
        return TransportUnavailable(sentence, "Run `kvlink doctor` on both hosts")


class PathRefusedError(Exception):
    """One transport cannot be used towards an owner that lives; another one may."""

    def __init__(self, error: KVLinkError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def one_path(*, of_agent: bool = False) -> Iterator[None]:
    """Errors are of one path alone, but those that say that the owner is another one or that this process ends.

    `of_agent`: neither are those of an agent that is away or busy.
    """
    try:
        yield
    except (StaleBlocks, UnknownRequest, Cancelled):
        raise
    except KVLinkError as error:
        if of_agent and error.retryable:
            raise
        raise PathRefusedError(error) from None


@dataclass(slots=True)
class Peer:
    """A connected owner. `assignment` says which heads this reader takes there and which seat it uses."""

    card: WorkerCard
    transport: str
    connection: Connection
    planner: Planner
    assignment: Assignment
    refused: tuple[Refusal, ...]
    nics_left_out: tuple[str, ...]
    bounces_at: tuple[str, ...]
    cost: FittedCost
    stands_in: bool = False
    """For a better transport whose NICs are away or down: that is tried again."""
    num_layers: int = field(init=False)  # these three are looked up for every pull
    seat: int = field(init=False)
    num_seats: int = field(init=False)

    def __post_init__(self) -> None:
        """Looks the hot fields up once."""
        self.num_layers = self.card.layout.num_layers
        self.seat, self.num_seats = self.assignment.seat, self.assignment.num_seats

    def __repr__(self) -> str:
        """State in words."""
        state = self.connection.why_broken() if self.connection.broken else "open"
        return f"Peer({self.card.worker_id} epoch {self.card.epoch} over {self.transport}: {state})"
