# SPDX-License-Identifier: Apache-2.0
"""Counts the bytecode instructions of kvlink's own code between two turns of an event loop, the same on every machine.

Each call that C makes counts as one instruction; `benchmarks/instructions` counts those of C.
"""

from __future__ import annotations

import sys
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvlink

_OWN = str(Path(kvlink.__file__).parent)


class Steps:
    """The most instructions of one turn, and where they were."""

    def __init__(self) -> None:
        self.most = 0
        self.total = 0
        self._now = 0

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OWN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._now += 1
        return self._count

    def turn(self) -> None:
        self.total += self._now
        self.most = max(self.most, self._now)
        self._now = 0


@contextmanager
def counted(steps: Steps) -> Iterator[None]:
    """Counts while the running loop runs callbacks, each of which is a turn. That of the caller does not count."""
    run = Handle._run

    def running(handle: Handle) -> None:
        sys.settrace(steps._trace)
        try:
            run(handle)
        finally:
            sys.settrace(None)
            steps.turn()

    Handle._run = running  # type: ignore[method-assign]
    try:
        yield
    finally:
        Handle._run = run  # type: ignore[method-assign]
