# SPDX-License-Identifier: Apache-2.0
"""Which descriptors a test leaves open. Those that an earlier test left to the collector may close at any time."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from pathlib import Path


def descriptors() -> Counter[str]:
    """Counts the descriptors of this process by kind."""
    gc.collect()  # what nobody holds is not held
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself, or of another thread
            found[str(path.readlink()).partition("[")[0]] += 1
    return found


def opened_since(before: Counter[str]) -> Counter[str]:
    """More of a kind than there were."""
    return descriptors() - before
