# SPDX-License-Identifier: Apache-2.0
"""Measures the time that a shared or emulated machine adds to whatever is measured on it."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

_NAP_S = 0.01


class LostTime:
    """Runs threads that only nap, one on each CPU, and notes when any of them slept longer than it asked for."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # from when a nap was to end until it did
        self._due: dict[int, float] = {}  # by CPU, of the nap that it is in
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._nap, args=[cpu]) for cpu in os.sched_getaffinity(0)]

    def __enter__(self) -> LostTime:
        self._due = dict.fromkeys(os.sched_getaffinity(0), time.monotonic() + _NAP_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def since(self, began: float) -> float:
        """In seconds, until now; `began` by `time.monotonic()`."""
        now, lost, until = time.monotonic(), 0.0, began
        for due, woke in sorted([*self._late, *((due, now) for due in self._due.values())]):
            lost += max(woke - max(due, until), 0)
            until = max(until, woke)
        return lost

    def _nap(self, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        while not self._ended.is_set():
            time.sleep(_NAP_S)
            woke = time.monotonic()
            self._late.append((self._due[cpu], woke))
            self._due[cpu] = woke + _NAP_S
