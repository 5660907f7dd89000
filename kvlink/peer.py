# SPDX-License-Identifier: Apache-2.0
"""An owner that a decode worker is connected to, and the path that was chosen to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlink.cost import FittedCost
from kvlink.engine import Connection, Planner
from kvlink.layout import Assignment
from kvlink.types import WorkerCard


@dataclass(frozen=True, slots=True)
class Refusal:
    """A transport that was not taken, and why."""

    transport: str
    reason: str


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
