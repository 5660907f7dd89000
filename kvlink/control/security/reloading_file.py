# SPDX-License-Identifier: Apache-2.0
"""Reads values from files, and reads them again when the files change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvlink.errors import ConfigError

T = TypeVar("T")

_log = logging.getLogger("kvlink.control")

LOOK_EVERY_S = 1.0


class ReloadingFile(Generic[T]):
    """Holds the last value that `read` could make of the files. Safe from any thread.

    `current` loads changed files, at most `look_every_s` seconds late. If `read` refuses them, that is logged and the
    value is kept.
    """

    def __init__(
        self, files: Sequence[Path], read: Callable[[], T], look_every_s: float = LOOK_EVERY_S
    ) -> None:
        """Raises ConfigError like `read`, which says so if a file cannot be accessed."""
        self._files = files
        self._read = read
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._value = read()
        self._look_at = time.monotonic() + look_every_s
        self.number = 0
        """Number of times that the value has changed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self._files))}: {self._value!r})"

    def current(self) -> T:
        """Returns the value, after a check for changed files every `look_every_s` seconds."""
        if time.monotonic() >= self._look_at:
            with self._lock:
                self._look_at = time.monotonic() + self._look_every_s
                self._look()
        return self._value

    def _look(self) -> None:
        try:
            signature = _signature(self._files)
            if signature == self._signature:
                return
            value = self._read()
            if _signature(self._files) != signature:
                return  # the files were written while they were read
        except ConfigError as error:
            _log.warning("cannot load the changed files, keeping the old value error=%s", error)
            return
        self._signature, self._value = signature, value
        self.number += 1
        _log.info("loaded the changed files: %r", self)


def _signature(files: Sequence[Path]) -> list[tuple[int, int, int]] | None:
    try:
        found = [path.stat() for path in files]
    except OSError:
        return None  # `read` says what is wrong, and which setting names the file
    return [(each.st_mtime_ns, each.st_ino, each.st_size) for each in found]
