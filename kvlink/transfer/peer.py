# SPDX-License-Identifier: Apache-2.0
"""Defines a connected owner, and the errors and refusals that occur while a path to it is selected."""

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
from kvlink.layout import GroupsAssignment, rank_of
from kvlink.layout.model_identity import PoolModel
from kvlink.transfer.engine import Connection
from kvlink.transfer.planners import Planner
from kvlink.types import WorkerCard


@dataclass(frozen=True, slots=True)
class Refusal:
    """A transport that was not used, and why."""

    transport: str
    reason: str


class Refusals:
    """The transports that do not reach one owner, in the order of the attempts, and why."""

    def __init__(self, worker_id: str) -> None:
        self.rows: list[Refusal] = []
        self._worker_id = worker_id
        self._errors: list[KVLinkError] = []

    def note(self, transport: str, reason: str | KVLinkError) -> None:
        """Adds a refusal. `reason` is the error of an attempt, or a sentence that says why there was none."""
        self.rows.append(Refusal(transport, str(reason)))
        if isinstance(reason, KVLinkError):
            self._errors.append(reason)

    def error(self) -> KVLinkError:
        """Returns the error to raise if no path is left. It lists all reasons, and is retryable if one of them is."""
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
    """One transport cannot be used to an owner that is alive. Another transport may work."""

    def __init__(self, error: KVLinkError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def refuse_path(*, keep_retryable: bool = False) -> Iterator[None]:
    """Converts errors of the block, which concern one path only, to PathRefusedError.

    Errors that concern the owner or this process pass through: the owner has restarted, or this process is exiting.
    With `keep_retryable`, retryable errors pass through too, for calls to an agent that may be absent or busy.
    """
    try:
        yield
    except (StaleBlocks, UnknownRequest, Cancelled):
        raise
    except KVLinkError as error:
        if keep_retryable and error.retryable:
            raise
        raise PathRefusedError(error) from None


@dataclass(slots=True)
class Peer:
    """A connected owner. `assignment` says which heads this reader takes from it and which seat it uses.

    `sources` are the ranks of the owner's server from which this reader takes something, this owner among them.
    """

    card: WorkerCard
    transport: str
    connection: Connection
    planners: tuple[Planner | None, ...]
    """By cache group; None for a group of which this reader takes nothing from this owner."""
    assignment: GroupsAssignment
    sources: frozenset[int]
    refused: tuple[Refusal, ...]
    nics_left_out: tuple[str, ...]
    bounces_at: tuple[str, ...]
    is_fallback: bool = False
    """Whether it replaces a better transport whose NICs are missing or down, which is tried again later."""
    model: PoolModel = field(default_factory=PoolModel)
    """The model of this reader's own pool."""
    work_before: tuple[int, int] | None = (0, 0)
    """The transfers over this path before this connection, see `AllPathStats.work`. None once it was judged."""
    is_alone: bool = field(init=False)
    """Whether this reader takes nothing from other ranks of that server."""
    planner: Planner | None = field(init=False)  # every pull uses these
    """That of the only cache group, or None if there are several."""
    num_layers: int = field(init=False)
    """How many layers the owner counts as ready: one more than its highest."""
    total_layers: int = field(init=False)
    end_layer: int = field(init=False)
    """One more than the highest layer that both ends have."""
    seat: int = field(init=False)
    num_seats: int = field(init=False)

    def __post_init__(self) -> None:
        """Caches the fields that every pull uses."""
        self.planner = self.planners[0] if len(self.planners) == 1 else None
        layout = self.card.layouts[0]
        self.is_alone = len(self.sources) == 1
        self.num_layers, self.total_layers = layout.num_layers, layout.total_layers
        self.end_layer = self.planner.num_layers if self.planner else 0
        self.seat, self.num_seats = self.assignment.seat, self.assignment.num_seats

    def predict_us(self, num_ops: int, num_bytes: int) -> float:
        """Returns the predicted time in microseconds of a pull that waits neither for others nor for its owner.

        num_ops: ranges of the owner's memory that are read, which is at most one for each block and layer.
        The prediction follows the pulls from this owner over the same transport. Any thread.
        """
        return self.connection.predict_us(num_ops, num_bytes)

    @property
    def wants_better(self) -> bool:
        """Whether a better path may exist later: another transport, or this one with the lanes that are missing."""
        return self.is_fallback or self.connection.num_missing > 0

    def is_better_than(self, other: Peer) -> bool:
        """Returns whether to replace a connection to the same owner."""
        return self.transport != other.transport or self.connection.num_missing < other.connection.num_missing

    @property
    def rank(self) -> int:
        """The owner's rank among all ranks of its server."""
        return rank_of(self.card.layouts[0])[0]

    def __repr__(self) -> str:
        """Describes the connection and its state."""
        state = self.connection.why_broken() if self.connection.broken else "open"
        return f"Peer({self.card.worker_id} epoch {self.card.epoch} over {self.transport}: {state})"
