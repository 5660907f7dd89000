# SPDX-License-Identifier: Apache-2.0
"""Starts, calls and ends the other processes of a benchmark."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from kvlink.errors import KVLinkError
from kvlink.layout import Geometry, Order

from .owner import OWN, Owner

_ANSWER_S = 120.0
_EXIT_S = 10.0


class BenchError(KVLinkError):
    """A process of the benchmark answered with an error, too late, or not at all."""


class OwnerSide(Protocol):
    """An Owner in this process or another."""

    pid: int

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the Owner. Raises BenchError."""

    def cpu_ns(self) -> int:
        """Returns the CPU time of its process so far; always 0 if that is this process."""


class _LocalOwner:
    def __init__(self, owner: Owner) -> None:
        self.pid = os.getpid()
        self._owner = owner

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._owner, do)(**arguments)
        return answer

    def cpu_ns(self) -> int:
        return 0


class _OwnerProcess:
    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", Owner.__module__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        self.pid = self._process.pid

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        return self.ask({"do": do, "arguments": arguments})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
            if not self._pipe.poll(_ANSWER_S):
                raise BenchError(f"the owner process {self.pid} did not answer within {_ANSWER_S:g} s")
            reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise BenchError(f"the owner process {self.pid} ended; see its messages above") from None
        if "error" in reply:
            raise BenchError(f"the owner process failed: {reply['error']}")
        return reply

    def cpu_ns(self) -> int:
        # The result of clock_getcpuclockid on Linux: the clock of all threads of that process.
        return time.clock_gettime_ns((~self.pid << 3) | 2)

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def owner_process(
    geometry: Geometry | Sequence[Geometry],
    seed: int,
    transport: str,
    coordinator: str = "",
    *,
    here: bool = False,
    memory: str = OWN,
    order: Order = Order.NHD,
    gpu: int | None = None,
    number: int = 0,
) -> Iterator[OwnerSide]:
    """Runs an Owner in a child process, or with `here` in this one. `transport` may name a fault wrapper.

    Several geometries are cache groups of its pool. `memory` is the kind of its pool's, `order` that of its axes, `gpu`
    its GPU. `number` distinguishes it from others of the same rank.
    """
    arguments = {
        "geometries": [asdict(each) for each in ([geometry] if isinstance(geometry, Geometry) else geometry)],
        "seed": seed,
        "transport": transport.removeprefix("fault+"),
        "coordinator": coordinator,
        "memory": memory,
        "order": order.name,
        "gpu": gpu,
        "number": number,
    }
    if here:
        owner = Owner(**arguments)  # type: ignore[arg-type]
        try:
            yield _LocalOwner(owner)
        finally:
            owner.close()
        return
    child = _OwnerProcess()
    try:
        child.ask(arguments)
        yield child
    finally:
        child.close()


@contextmanager
def coordinator_process() -> Iterator[str]:
    """Runs `kvlink coordinator` on any free port. Yields its address."""
    command = [sys.executable, "-m", "kvlink", "coordinator", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1:]
            if not address:
                raise BenchError(f"the coordinator ended with status {process.wait()}")
            yield address[0]
        finally:
            process.terminate()
            process.wait(_EXIT_S)
