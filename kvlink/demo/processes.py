# SPDX-License-Identifier: Apache-2.0
"""Starts, calls and ends the child processes of the router. No child outlives its parent."""

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
# A fork would lack threads that an import started. Each role computes on one thread anyway.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ChildError(KVLinkError):
    """A role answered with an error, too late, or not at all."""


class Child:
    """One child process, named after its main role. Its stdout and stderr go to this process's stderr.

    `end` waits for the given number of seconds, then kills the child, and returns its status like Popen.returncode.
    `patience` multiplies every deadline.
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
        """Runs one command of a role in the child and returns its reply. Raises ChildError with the role's error."""
        self.ask(role, do, **arguments)
        return self.answer(f"{role} {do}", within_s)

    def ask(self, role: str, do: str, **arguments: Any) -> None:
        """Starts a command. The caller must take its answer before the next command. Raises ChildError."""
        try:
            send(self._pipe, {"role": role, "do": do, "arguments": arguments})
        except OSError:
            raise ChildError(f"{self._label()} ended before {role} {do}; see its messages above") from None

    def answer(self, what: str, within_s: float = 60.0) -> Reply:
        """Returns the next reply. `what` names the command in errors. Raises ChildError."""
        timeout_s = within_s * self._patience
        if not self._pipe.poll(timeout_s):
            self._end_within(0)  # a late answer would be taken for that of the next command
            raise ChildError(f"{self._label()} did not answer {what} within {timeout_s:g} s and was killed")
        try:
            reply = receive(self._pipe)
        except (EOFError, OSError):
            returncode = self._end_within(_EXIT_S)
            raise ChildError(
                f"{self._label()} ended with status {returncode} in {what}; see its messages above"
            ) from None
        if "error" in reply:
            raise ChildError(f"{what}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Closes the pipe, and kills a child that does not end by itself. Idempotent."""
        self._pipe.close()
        self._end_within(_EXIT_S)

    def _end_within(self, timeout_s: float) -> int:
        if self._returncode is None:
            self._returncode = self._end(timeout_s)
        return self._returncode

    def _label(self) -> str:
        return f"the {self.name} process {self.pid}"


class Family:
    """Children that are forks of one process, the zygote, which starts at once and imports `roles` for all of them."""

    def __init__(self, names: Sequence[str], patience: float = 1.0, roles: Sequence[str] = ()) -> None:
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
                [sys.executable, "-m", "kvlink.demo.zygote", ",".join(roles), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | _ONE_THREAD,
            )
        self._zygote = Child("zygote", self._process.pid, self._pipe, self._end_zygote, patience)
        self._children: list[Child] = []

    def wait_ready(self, within_s: float) -> list[Child]:
        """Waits until the children have imported their roles, and returns them in the order of their names.

        Raises ChildError.
        """
        pids = self._zygote.answer("its start", within_s)["pids"]
        self._children = [
            Child(name, pid, pipe, partial(self._end, pid), self._patience)
            for name, pid, pipe in zip(self._names, pids, self._pipes, strict=True)
        ]
        return self._children

    def close(self) -> None:
        """Ends all children and the zygote, without waiting if it is still importing. Idempotent."""
        for child in self._children:
            child.close()
        for pipe in (self._pipe, *self._pipes):
            pipe.close()
        self._end_zygote(_EXIT_S if self._children else 0)

    def _end(self, pid: int, within_s: float) -> int:
        """Ends a child through the zygote, which is its parent and reaps it. Without a zygote the child is dead."""
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
