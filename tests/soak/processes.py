# SPDX-License-Identifier: Apache-2.0
"""The processes of a soak: owners, readers, and one that is both, for the transport within a process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from soak.owner import Owner
from soak.reader import Reader

_spawning = multiprocessing.get_context("spawn")

Run = Callable[[Connection], None]


@dataclass(slots=True, eq=False)
class Child:
    """A process, and a pipe for each of its parts: "owner", "reader"."""

    name: str
    number: int
    transports: tuple[str, ...]
    has_owner: bool
    has_reader: bool
    fault: str = ""
    """A plan of the fault transport, for its reads."""
    process: multiprocessing.process.BaseProcess = field(init=False)
    owner: Connection | None = None
    reader: Connection | None = None
    is_stopped: bool = False

    def start(self, seed: int) -> None:
        """Returns at once."""
        pipes = [_spawning.Pipe() if wanted else None for wanted in (self.has_owner, self.has_reader)]
        ends = [pipe and pipe[1] for pipe in pipes]
        self.process = _spawning.Process(
            target=_run, args=(self.name, self.number, self.transports, seed, self.fault, *ends), daemon=True
        )
        self.process.start()
        self.owner, self.reader = (pipe and pipe[0] for pipe in pipes)
        for end in filter(None, ends):
            end.close()  # so that the death of the process ends the pipe

    def pipes(self) -> list[Connection]:
        """Those that are open."""
        return [pipe for pipe in (self.owner, self.reader) if pipe is not None and not pipe.closed]

    def send(self, pipe: Connection | None, message: object) -> None:
        """Quiet when it is dead."""
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.send(message)

    def kill(self) -> None:
        """It is gone when this returns."""
        self.process.kill()
        self.process.join()
        for pipe in self.pipes():
            pipe.close()

    def stop(self) -> None:
        """Until `go_on`."""
        self.is_stopped = True
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        """Idempotent."""
        if self.is_stopped and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGCONT)
        self.is_stopped = False


def _run(
    name: str,
    number: int,
    transports: Sequence[str],
    seed: int,
    fault: str,
    owner: Connection | None,
    reader: Connection | None,
) -> None:
    logging.getLogger("kvlink").setLevel(logging.CRITICAL)  # its owners die by design
    parts: list[Callable[[], None]] = []
    if owner is not None:
        parts.append(Owner(owner, name, number, ",".join(transports), seed).run)
    if reader is not None:
        parts.append(Reader(reader, f"{name}-reader", transports, fault).run)
    threads = [threading.Thread(target=_part, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _part(run: Callable[[], None]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):  # the soak itself was ended
        run()
