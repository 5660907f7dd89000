# SPDX-License-Identifier: Apache-2.0
"""Checks the invariants of every run while it happens."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from kvlink.control.now import now

MOST_PER_S = {"lines": 1.0, "messages": 150.0, "store calls": 40.0}
"""Warnings and errors that are logged, messages on the network, calls that etcd answers: over a round, of the fleet."""


class _Grant(NamedTuple):
    epoch: int
    process: str
    era: int


class Ledger:
    """Claims and epochs of a whole run. An era ends when the store forgets: what comes after is not compared."""

    def __init__(self) -> None:
        self.era = 0
        self.violations: list[str] = []
        self.done: Counter[str] = Counter()
        self.peaks: dict[str, float] = {}
        self._claims: dict[str, tuple[bytes, list[bytes], int]] = {}
        self._epochs: dict[str, _Grant] = {}

    def violated(self, what: str) -> None:
        self.violations.append(f"at {now():.3f} s: {what}")

    def peak(self, what: str, rate: float) -> None:
        """For who reads the figures."""
        self.peaks[what] = max(self.peaks.get(what, 0.0), rate)

    def claimed(self, request_id: str, claim_id: bytes, tickets: list[bytes]) -> None:
        """By a reader that was answered."""
        self.done["claims"] += 1
        before, had, era = self._claims.setdefault(request_id, (claim_id, tickets, self.era))
        if era != self.era:
            self._claims[request_id] = (claim_id, tickets, self.era)
        elif before != claim_id:
            self.violated(f"{request_id} was given to two claims")
        elif had != tickets:
            self.violated(f"{request_id} was given to one claim twice, with other tickets")

    def granted(self, worker_id: str, process: str, epoch: int) -> None:
        """To a process that joined."""
        self.done["joins"] += 1
        last = self._epochs.get(worker_id)
        if last is not None and last.process != process and epoch <= last.epoch:
            self.violated(f"epoch {epoch} of {worker_id} was given to {process} after {last}")
        if last is None or epoch >= last.epoch:
            self._epochs[worker_id] = _Grant(epoch, process, self.era)


class Lines(logging.Handler):
    """Counts what is logged, and takes what nobody expected for a violation."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.INFO)
        self._ledger = ledger
        self.tail: list[str] = []
        self.num_loud = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.tail = [*self.tail[-400:], f"{now():9.3f} {record.levelname[0]} {record.getMessage()}"]
        self.num_loud += record.levelno >= logging.WARNING
        if record.exc_info:
            self._ledger.violated(
                f"an error that nobody expected: {record.getMessage()}: {record.exc_info[1]!r}"
            )
