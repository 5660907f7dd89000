# SPDX-License-Identifier: Apache-2.0
"""What a shared or emulated machine adds to whatever is measured on it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_NAP_S = 0.01


class LostTime:
    """Of a thread that only naps, how much longer than it asked for it slept."""

    def __init__(self) -> None:
        self._naps: list[tuple[float, float]] = []  # when each ended, and what it took too long
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._nap)

    def __enter__(self) -> LostTime:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def since(self, began: float) -> float:
        """In seconds; `began` by `time.monotonic()`."""
        return sum(min(late, ended - began) for ended, late in self._naps if ended > began)

    def _nap(self) -> None:
        before = time.monotonic()
        while not self._ended.is_set():
            time.sleep(_NAP_S)
            now = time.monotonic()
            self._naps.append((now, now - before - _NAP_S))
            before = now
