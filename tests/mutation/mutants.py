# SPDX-License-Identifier: Apache-2.0
"""Mutants, a sample of them, and the interval of a score."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Mutant:
    """One small change of a source file."""

    file: str
    scope: str
    """The function, or the name of the planted bug."""
    operator: str
    before: str
    after: str
    line: int
    nth: int = 0
    """Counts mutants that are the same otherwise, in the order of the file."""

    @property
    def name(self) -> str:
        """The same as long as neither the function's name nor the changed expression changes."""
        again = f" #{self.nth}" if self.nth else ""
        return f"{self.file}:{self.scope}: {self.operator}: {self.before} -> {self.after}{again}"


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """Returns the mutants with names that differ."""
    seen: Counter[str] = Counter()
    found = []
    for mutant in mutants:
        found.append(replace(mutant, nth=seen[mutant.name]))
        seen[mutant.name] += 1
    return found


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """Returns `size` of them. A change of the sources elsewhere changes little in the sample."""
    return sorted(mutants, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest())[:size]


def shortened(text: str) -> str:
    """Returns `text` as one line that is not too long for a name."""
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:60]}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class Outcome(NamedTuple):
    """How the tests of one kind ended with a mutant: killed, crashed, timeout, survived or unreached."""

    status: str
    test: str = ""


KILLED = frozenset({"killed", "crashed"})


def interval(killed: int, of: int) -> tuple[float, float]:
    """Returns the interval of Wilson, at 95 %, in percent."""
    if of == 0:
        return 0.0, 100.0
    z, share = 1.96, killed / of
    middle, half = share + z * z / (2 * of), z * math.sqrt((share * (1 - share) + z * z / (4 * of)) / of)
    scale = 100 / (1 + z * z / of)
    return (middle - half) * scale, (middle + half) * scale
