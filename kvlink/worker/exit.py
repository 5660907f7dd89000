# SPDX-License-Identifier: Apache-2.0
"""Closes the workers that are still open when the process exits."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closable(Protocol):
    """A worker."""

    def close(self) -> None:
        """Ends everything that it runs. Idempotent."""


open_workers: weakref.WeakSet[Closable] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(open_workers):
        worker.close()
