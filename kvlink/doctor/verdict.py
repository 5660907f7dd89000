# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a check, and runs the commands that a check asks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
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


Run = Callable[..., str]
"""The type of `run_tool`: it takes a command's words and returns its stdout."""

_TIMEOUT_S = 10


def run_tool(*command: str) -> str:
    """Returns the command's stdout, or "" if the program is absent, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
