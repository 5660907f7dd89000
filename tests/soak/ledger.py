# SPDX-License-Identifier: Apache-2.0
"""Judges the outcomes of the pulls of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

BAD = ("wrong", "foreign", "late", "unguarded", "leaked", "hung", "innocent")
"""Unguarded: bytes that tcp sent after their lease had ended."""


@dataclass(slots=True)
class Excuses:
    """Holds what was done to a pull, to its lease or to its owner, until it ended."""

    may_be_stale: bool = False
    """Its lease is short, aborted, or settled by another pull. It is valid until the owner looks."""
    short_deadline: bool = False
    cancelled: bool = False
    owner_killed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Is the outcome of one pull. `error` is the name of an exception, and empty when all is valid."""

    error: str = ""
    why: str = ""
    """Why blocks are stale, in lower case."""
    message: str = ""
    settled: bool = False
    differences: Mapping[str, int] = field(default_factory=dict)
    """Words of a valid pull that are not what was offered."""
    restarted: bool = False
    transport: str = ""
    words_of_others: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """That a pull brought which failed, and so were dropped, by owner and request."""


@dataclass(slots=True)
class Ledger:
    """Counts of one soak."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def pulled(self, outcome: Outcome, excuses: Excuses, about: str) -> None:
        """A pull has ended."""
        name, is_fine = _named(outcome, excuses)
        self.counts[name] += 1
        self.counts["restarted"] += outcome.restarted
        if outcome.words_of_others:
            kind = f"dropped KiB of others: {outcome.transport} {outcome.why or outcome.error}"
            words = sum(outcome.words_of_others.values())
            self.note(kind, f"{about}: {outcome.words_of_others}, with {excuses}", words >> 7)
            if outcome.transport == "tcp":
                self.note("unguarded", f"{about}: {outcome.words_of_others}, with {excuses}")
        if not is_fine:
            which = "second attempt" if outcome.restarted else "first attempt"
            error = f"{which}: {outcome.error} {outcome.why}: {outcome.message}"
            self.note("innocent", f"{about}: {error}, with {excuses}")
        if not outcome.error:
            for kind, number in outcome.differences.items():
                if number:
                    self.note(kind, f"{about}: {number} words of a valid pull, with {excuses}")

    def note(self, kind: str, example: str, number: int = 1) -> None:
        """Something that is counted apart; the first examples of each kind are shown."""
        self.counts[kind] += number
        self.examples.setdefault(kind, example)

    def at_rest(self, about: str, held: Mapping[str, int]) -> None:
        """Records what is still held, by kind, when nothing runs any more."""
        for kind, number in held.items():
            if number:
                self.note("leaked", f"{about}: {number} {kind}", number)

    @property
    def is_good(self) -> bool:
        """Whether nothing happened that must not."""
        return not any(self.counts[kind] for kind in BAD) and self.counts["good"] > 0

    def lines(self) -> list[str]:
        """For people."""
        counts = {kind: self.counts[kind] for kind in ("good", *BAD)} | dict(sorted(self.counts.items()))
        return [
            *(f"{kind:40}{number:10}" for kind, number in counts.items()),
            *(f"first {kind}: {example}" for kind, example in self.examples.items()),
        ]


def _named(outcome: Outcome, excuses: Excuses) -> tuple[str, bool]:
    """How it is counted, and whether it may be."""
    match outcome.error:
        case "":
            return "good", True
        case "StaleBlocks":
            return f"stale: {outcome.why}", excuses.may_be_stale or excuses.owner_killed
        case "TransferTimeout":
            return "timed out", excuses.short_deadline or excuses.owner_killed
        case "Cancelled" | "CancelledError":
            return "cancelled", excuses.cancelled
        case "PeerUnreachable" | "TransportUnavailable" | "CoordinatorUnavailable":
            return "unreachable", excuses.owner_killed or excuses.cancelled  # cut first, and not read again
    return f"failed: {outcome.error}", False
