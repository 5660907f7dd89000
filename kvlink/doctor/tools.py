# SPDX-License-Identifier: Apache-2.0
"""Runs system programs for facts that no file has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Run = Callable[..., str]
"""The type of `run`: it takes a command's words and returns its stdout."""

_TIMEOUT_S = 10


def run(*command: str) -> str:
    """Returns the command's stdout, or "" if the program is absent, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
