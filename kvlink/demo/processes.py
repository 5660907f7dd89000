# SPDX-License-Identifier: Apache-2.0
"""The router's side of its child processes: start, call, end. No child outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvlink.demo.messages import Reply, receive, send
from kvlink.errors import KVLinkError

_EXIT_S = 5.0
# Threads that an import starts would be missing in a fork; each role computes on one anyhow.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ChildError(KVLinkError):
    """A role answered with an error, too late, or not at all."""


class Child:
    """One child process, named after its main role. Its stdout and stderr go to our stderr.

    `end` waits some seconds for it to end, then kills it, and returns as Popen.returncode does. `patience`
    multiplies every deadline.
    """

    def __init__(
        self, name: str, pid: int, pipe: Connection, end: Callable[[float], int], patience: float = 1.0
    ) -> None:
        self.name = name
        self.pid = pid
        self._pipe = pipe
        self._end = end
        self._patience = patience
        self._returncode: int | None = None

    def call(self, role: str, do: str, *, within_s: float = 60.0, **arguments: Any) -> Reply:
        """Runs one command of a role in the child. Raises ChildError with what the role said."""
        self.ask(role, do, **arguments)
        return self.answer(f"{role} {do}", within_s)

    def ask(self, role: str, do: str, **arguments: Any) -> None:
        """Starts a command; its answer is to be taken before the next one starts. Raises ChildError."""
        try:
            send(self._pipe, {"role": role, "do": do, "arguments": arguments})
        except OSError:
            raise ChildError(f"{self._who()} is gone before {role} {do}; its messages are above") from None

    def answer(self, what: str, within_s: float = 60.0) -> Reply:
        """The next message, whose words for errors are `what`. Raises ChildError."""
        timeout_s = within_s * self._patience
        if not self._pipe.poll(timeout_s):
            self._end_within(0)  # what it would answer later belongs to no question
            raise ChildError(f"{self._who()} gave no answer to {what} within {timeout_s:g} s and was killed")
        try:
            reply = receive(self._pipe)
        except (EOFError, OSError):
            returncode = self._end_within(_EXIT_S)
            raise ChildError(
                f"{self._who()} ended with {returncode} in {what}; its messages are above"
            ) from None
        if "error" in reply:
            raise ChildError(f"{what}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Hangs up; kills a child that does not end by itself. Idempotent."""
        self._pipe.close()
        self._end_within(_EXIT_S)

    def _end_within(self, timeout_s: float) -> int:
        if self._returncode is None:
            self._returncode = self._end(timeout_s)
        return self._returncode

    def _who(self) -> str:
        return f"the {self.name} process {self.pid}"


class Family:
    """Children that are forks of one process, the zygote, which starts at once and imports for all of them."""

    def __init__(self, names: Sequence[str], patience: float = 1.0) -> None:
        self._names = names
        self._patience = patience
        self._pipe, zygotes = multiprocessing.Pipe()
        ours_and_theirs = [multiprocessing.Pipe() for _ in names]
        self._pipes = [ours for ours, _ in ours_and_theirs]
        with ExitStack() as stack:
            passed = [
                stack.enter_context(pipe) for pipe in (zygotes, *(their for _, their in ours_and_theirs))
            ]
            fds = [pipe.fileno() for pipe in passed]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvlink.demo.zygote", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | _ONE_THREAD,
            )
        self._zygote = Child("zygote", self._process.pid, self._pipe, self._end_zygote, patience)
        self._children: list[Child] = []

    def wait_ready(self, within_s: float) -> list[Child]:
        """The children, in the order of their names, once they have all that their roles import. Raises ChildError."""
        pids = self._zygote.answer("its start", within_s)["pids"]
        self._children = [
            Child(name, pid, pipe, partial(self._end, pid), self._patience)
            for name, pid, pipe in zip(self._names, pids, self._pipes, strict=True)
        ]
        return self._children

    def close(self) -> None:
        """Ends all children, and the zygote; at once when it still imports. Idempotent."""
        for child in self._children:
            child.close()
        for pipe in (self._pipe, *self._pipes):
            pipe.close()
        self._end_zygote(_EXIT_S if self._children else 0)

    def _end(self, pid: int, within_s: float) -> int:
        """As its parent, the zygote reaps it. What the zygote's end leaves is dead."""
        try:
            send(self._pipe, {"pid": pid, "within_s": within_s})
            return int(receive(self._pipe)["returncode"])
        except (EOFError, OSError):
            return -signal.SIGKILL

    def _end_zygote(self, within_s: float) -> int:
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
