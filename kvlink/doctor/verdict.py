# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The severity of a result, mildest first.

    WARN means that kvlink runs, but slower or with fewer transports. FAIL means that it does not run.
    """

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `kvlink doctor`. `fix` is a command or an instruction, or empty."""

    name: str
    verdict: Verdict
    evidence: str
    fix: str = ""
