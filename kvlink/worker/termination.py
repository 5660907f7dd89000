# SPDX-License-Identifier: Apache-2.0
"""Notes SIGTERM, so that a program can drain its workers before it exits."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import Any


class Termination:
    """Notes the first SIGTERM while its `with` block runs. A second one ends the process at once::

        with kvlink.Worker(pool, "prefill-0") as worker, kvlink.Termination() as ending:
            while not ending.wait(0.1):
                ...
            worker.drain(20.0)

    Enter the block on the main thread, where Python runs signal handlers. ValueError is raised elsewhere.
    """

    def __init__(self) -> None:
        self._before: Any = None
        # A pipe and no threading.Event: a handler that runs while `wait` holds the event's lock would wait for itself.
        self._awake, self._wake = -1, -1
        self.asked = False
        """Whether SIGTERM has arrived."""

    def __enter__(self) -> Termination:
        self._awake, self._wake = os.pipe()
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        os.close(self._awake)
        os.close(self._wake)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for SIGTERM, at most `timeout_s` seconds. Returns whether it has arrived."""
        if not self.asked:
            poll = select.poll()  # select() refuses descriptors above 1,023, which a busy server has
            poll.register(self._awake, select.POLLIN)
            poll.poll(None if timeout_s is None else timeout_s * 1000)
        return self.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.asked = True
        os.write(self._wake, b"\0")
