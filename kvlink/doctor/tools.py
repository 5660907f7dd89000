# SPDX-License-Identifier: Apache-2.0
"""Programs of the system that know what no file says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Run = Callable[..., str]
"""Called with a command's words; returns its stdout."""

_TIMEOUT_S = 10


def run(*command: str) -> str:
    """Stdout, or "" when the program is absent, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
