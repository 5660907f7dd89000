# SPDX-License-Identifier: Apache-2.0
"""Runs two processes of a peer: one owns blocks, one reads them. They are stopped while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np

from ..harness.block_draws import Order
from ..harness.contents import Ids
from ..harness.processes import BenchError
from .contender import ContenderInfo, Draw, Moved, Shape, planes_of
from .modes import Mode

_ANSWER_S = 120.0
_EXIT_S = 10.0
_LOOK_S = 0.5
_HERE = Path(__file__).parent
_SETTINGS = ("UCX_", "NIXL_", "MC_", "OMPI_", "PMIX_", "PRTE_")


class Pair:
    """A contender (contender.py) of two processes. It is used by one thread."""

    order = Order()

    def __init__(self, mode: Mode, python: Path, shape: Shape, seed: int, log: IO[str]) -> None:
        self._geometries = shape.geometries
        groups = [
            (planes_of(each) * each.num_blocks, each.block_tokens * each.row_bytes)
            for each in self._geometries
        ]
        self._ends = _started(mode, python, log)
        self._draws: Sequence[Draw] = ()
        self._starts, self._answers = self._ends if mode.pushes else self._ends[::-1]
        self._reads = self._ends[1]
        self._pushes = mode.pushes
        try:
            cards = [
                end.ask(
                    "open", groups=groups, seed=seed,
                    options={"name": f"bench-{end.pid}", "requests": shape.requests, **mode.options},
                )
                for end in self._ends
            ]  # fmt: skip
            self._starts.ask("connect", card=cards[1 if mode.pushes else 0]["card"])
        except BaseException:
            self.close()
            raise
        self.info = ContenderInfo(mode.peer, mode.name, mode.path, cards[0]["version"], mode.settings)
        self._signal(signal.SIGSTOP)

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Poisons the destination, and lets the peer prepare the transfers."""
        self._signal(signal.SIGCONT)
        self._draws = draws
        there, here = self._lists()
        self._reads.ask("poison", ids=here)
        mine, theirs = (there, here) if self._pushes else (here, there)
        self._starts.ask("prepare", there=theirs, here=mine)

    def move(self) -> Moved:
        """Runs the prepared transfers."""
        answer = self._starts.ask("move", other_pid=self._answers.pid)
        return Moved(answer["us"], answer["cpu_ns"])

    def wrong(self) -> int:
        """Returns how many transfers did not bring every byte. Then stops both processes until the next `prepare`."""
        there, here = self._lists()
        wrong: int = self._reads.ask("check", there=there, here=here)["wrong"]
        self._signal(signal.SIGSTOP)
        return wrong

    def close(self) -> None:
        """Ends both processes. Idempotent."""
        self._signal(signal.SIGCONT)
        for end in self._ends:
            end.close()

    def _lists(self) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Returns the blocks of each request of each draw, there and here."""
        there = [[self._numbers(request) for request in draw.there] for draw in self._draws]
        return there, [[self._numbers(request) for request in draw.here] for draw in self._draws]

    def _numbers(self, request: Sequence[Ids]) -> list[int]:
        """Returns the numbers of a request's blocks. Those of all planes of all groups are counted in turn."""
        found, first = [], 0
        for geometry, ids in zip(self._geometries, request, strict=True):
            planes = first + np.arange(planes_of(geometry))[:, np.newaxis] * geometry.num_blocks
            found += (planes + ids).ravel().tolist()
            first += planes_of(geometry) * geometry.num_blocks
        return found

    def _signal(self, number: signal.Signals) -> None:
        for end in self._ends:
            end.signal(number)


def _started(mode: Mode, python: Path, log: IO[str]) -> list[_End]:
    """Starts the owner and the reader, each by itself or both by mpiexec. Raises BenchError."""
    name, command = f"{mode.peer} {mode.name}", [str(python), "-m", "adapters", mode.peer]
    start = partial(
        subprocess.Popen[str],
        cwd=_HERE, env={**_without_settings(), **mode.environment}, stderr=log, text=True,
    )  # fmt: skip
    if not mode.launched:
        processes = [start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
        return [_End(name, each, each.stdin, each.stdout, each.pid) for each in processes]
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := f"{folder}/ends")
        listening.listen()
        listening.settimeout(_LOOK_S)
        launcher = [str(python.parent / "mpiexec"), "--oversubscribe", "-n", "2"]
        process = start([*launcher, *command, path], stdin=subprocess.DEVNULL, stdout=log)
        ends = [_accepted(listening, process, name) for _ in range(2)]
    return [end for _, end in sorted(ends, key=lambda end: end[0])]


def _accepted(listening: socket.socket, process: subprocess.Popen[str], name: str) -> tuple[int, _End]:
    """Returns an end that the launcher has started, after its rank."""
    for _ in range(int(_ANSWER_S / _LOOK_S)):
        with suppress(TimeoutError), listening.accept()[0] as connection:
            asking, answering = connection.makefile("w"), connection.makefile("r")
            who = json.loads(answering.readline())
            return who["rank"], _End(name, process, asking, answering, who["pid"])
        if process.poll() is not None:
            break
    process.kill()
    process.wait()
    raise BenchError(f"{name} did not start; its last messages are in the log")


class _End:
    """One process. Raises BenchError if it answers with an error, too late, or not at all."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[str],
        asking: IO[str] | None,
        answering: IO[str] | None,
        pid: int,
    ) -> None:
        self._name, self._process, self._asking, self._answering = name, process, asking, answering
        self.pid = pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of adapters.__main__.End."""
        asking, answering = self._asking, self._answering
        assert asking is not None
        assert answering is not None
        try:
            print(json.dumps({"do": do, "arguments": arguments}), file=asking, flush=True)
            if not select.select([answering], [], [], _ANSWER_S)[0]:
                raise BenchError(f"{self._name} did not {do} within {_ANSWER_S:g} s")
            line = answering.readline()
        except OSError:
            line = ""
        if not line:
            raise BenchError(f"{self._name} ended when asked to {do}; its last messages are in the log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self._name} could not {do}: {answer['error']}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. Does nothing for a process that has ended."""
        if self._process.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ends the process by closing its input, then by force. Idempotent."""
        with suppress(OSError):
            if self._asking is not None:
                self._asking.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._answering is not None:
            self._answering.close()


def _without_settings() -> dict[str, str]:
    """Returns this process's environment without variables that would change the settings of modes.py."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
