# SPDX-License-Identifier: Apache-2.0
"""Checks the invariants of every run while it happens."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from control_simulation.processes import true_time

MOST_PER_S = {"lines": 1.0, "messages": 150.0, "store calls": 40.0, "steps": 600.0}
"""Bounds the fleet over a round: warnings and errors that are logged, messages on the network, calls that etcd
answers, and callbacks that coordinators run."""
MOST_STEPS = 200
"""Bounds the callbacks that one call runs, or one message of a stream."""
LATEST_S = 45.0
"""A ticket's time counts from its arrival at the store, which faults delay by no more than this."""


@dataclass
class _Offered:
    ticket: bytes
    until: float
    acked_at: float = float("inf")
    acked_in: int = -1
    """The era in which it was."""


class _Holder(NamedTuple):
    claim_id: bytes
    era: int


class _Grant(NamedTuple):
    epoch: int
    process: str
    era: int


class Asked(NamedTuple):
    """Describes a claim, for who judges its answer."""

    request_id: str
    claim_id: bytes
    at: float
    era: int
    reader: int = 0


class Ledger:
    """Keeps offers, claims and epochs of a run. An era ends when the store forgets: what follows is not compared."""

    def __init__(self) -> None:
        self.era = 0
        self.violations: list[str] = []
        self.done: Counter[str] = Counter()
        """Counts events by kind."""
        self.peaks: dict[str, float] = {}
        self.settles: dict[int, str] = {}
        """Maps slots to the process that is to settle them."""
        self._offers: defaultdict[str, dict[int, list[_Offered]]] = defaultdict(dict)
        self._given: dict[tuple[bytes, int], _Holder] = {}
        """Maps (ticket, reader) to the claim that has it."""
        self._answers: dict[bytes, tuple[list[bytes], int, float]] = {}
        """Maps claim ids to (tickets, era, when)."""
        self._epochs: dict[str, _Grant] = {}

    def violated(self, what: str) -> None:
        self.violations.append(f"at {true_time():.3f} s: {what}")

    def peak(self, what: str, rate: float) -> None:
        """For who reads the figures."""
        self.peaks[what] = max(self.peaks.get(what, 0.0), rate)

    def asks(self, request_id: str, claim_id: bytes, reader: int = 0) -> Asked:
        """A claim begins."""
        return Asked(request_id, claim_id, true_time(), self.era, reader)

    def offered(self, request_id: str, rank: int, ticket: bytes, ttl_s: float) -> None:
        """By its owner, for the first time."""
        self._offers[request_id].setdefault(rank, []).append(_Offered(ticket, true_time() + ttl_s))

    def acked(self, request_id: str, rank: int, ticket: bytes) -> None:
        """The store has it."""
        for each in self._offers[request_id][rank]:
            if each.ticket == ticket:
                each.acked_at, each.acked_in = true_time(), self.era

    def claimed(self, asked: Asked, tickets: list[bytes]) -> None:
        """By a reader that was answered."""
        self.done["claim"] += 1
        request_id, claim_id, _, era, reader = asked
        by_rank = self._offers[request_id]
        if len(tickets) != len(by_rank):
            self.violated(f"a claim of {request_id} got {len(tickets)} tickets of {len(by_rank)} ranks")
            return
        had, had_in, had_at = self._answers.setdefault(claim_id, (tickets, era, true_time()))
        is_first = had_at == true_time()
        for rank, ticket in enumerate(tickets):
            places = [place for place, each in enumerate(by_rank[rank]) if each.ticket == ticket]
            if not places:
                self.violated(f"a claim of {request_id} got a ticket that rank {rank} did not offer")
                continue
            self._check_current(asked, by_rank[rank][places[0]], by_rank[rank][places[0] + 1 :], is_first)
        if era != self.era:
            return
        is_current = not any(each.acked_at > had_at for rank in by_rank.values() for each in rank[1:])
        if had != tickets and had_in == era and is_current:
            self.violated(f"{request_id} was given to one claim twice, with other tickets")
        for ticket in tickets:
            holder = self._given.get((ticket, reader))
            if holder is not None and holder.era == era and holder.claim_id != claim_id:
                self.violated(f"a ticket of {request_id} was given to two claims")
            self._given[ticket, reader] = _Holder(claim_id, era)

    def _check_current(self, asked: Asked, ticket: _Offered, later: list[_Offered], is_first: bool) -> None:
        if asked.at > ticket.until + LATEST_S:
            self.violated(
                f"a claim of {asked.request_id} got a ticket {asked.at - ticket.until:.0f} s after its time"
            )
        for each in later if is_first else ():
            if each.acked_at <= asked.at and each.acked_in == asked.era == self.era:
                self.violated(f"a claim of {asked.request_id} got a ticket that had been replaced")

    def released(self, asked: Asked) -> None:
        """By a reader that withdraws its claim."""
        for key in [key for key, holder in self._given.items() if holder.claim_id == asked.claim_id]:
            del self._given[key]

    def granted(self, worker_id: str, process: str, epoch: int, asked_in: int) -> None:
        """To a process that joined; the era in which it asked."""
        self.done["join"] += 1
        last = self._epochs.get(worker_id)
        if (
            last is not None
            and last.process != process
            and epoch <= last.epoch
            and last.era == asked_in == self.era
        ):
            self.violated(f"epoch {epoch} of {worker_id} was given to {process} after {last}")
        self._epochs[worker_id] = _Grant(epoch, process, self.era)


class Lines(logging.Handler):
    """Counts what is logged, and takes what nobody expected for a violation."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.INFO)
        self._ledger = ledger
        self.tail: list[str] = []
        self.num_loud = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.tail = [*self.tail[-400:], f"{true_time():9.3f} {record.levelname[0]} {record.getMessage()}"]
        self.num_loud += record.levelno >= logging.WARNING
        if record.exc_info:
            self._ledger.violated(
                f"an error that nobody expected: {record.getMessage()}: {record.exc_info[1]!r}"
            )
