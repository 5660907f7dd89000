# SPDX-License-Identifier: Apache-2.0
"""The router's side of a child process: start, call, end. No child outlives its parent."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import Any

from kvlink.demo.messages import Reply, receive, send
from kvlink.errors import KVLinkError

_EXIT_S = 5.0


class ChildError(KVLinkError):
    """A role answered with an error, too late, or not at all."""


class Child:
    """One child process, named after its main role. Its stdout and stderr go to our stderr."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ready = False
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvlink.demo.child", str(theirs.fileno()), name],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
            )

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the child has imported what its role needs. Raises ChildError."""
        self._receive("its start", timeout_s)
        self._ready = True

    def call(self, role: str, do: str, *, within_s: float = 60.0, **arguments: Any) -> Reply:
        """Runs one command of a role in the child. Raises ChildError with what the role said."""
        what = f"{role} {do}"
        try:
            send(self._pipe, {"role": role, "do": do, "arguments": arguments})
        except OSError:
            raise ChildError(f"{self._who()} is gone before {what}; its messages are above") from None
        reply = self._receive(what, within_s)
        if "error" in reply:
            raise ChildError(f"{what}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Hangs up; kills a child that does not end by itself, or still imports. Idempotent."""
        self._pipe.close()
        if self._ready:
            self._await_exit()
        else:
            self._kill()

    def _receive(self, what: str, timeout_s: float) -> Reply:
        if not self._pipe.poll(timeout_s):
            self._kill()  # what it would answer later belongs to no question
            raise ChildError(f"{self._who()} gave no answer to {what} within {timeout_s:g} s and was killed")
        try:
            return receive(self._pipe)
        except (EOFError, OSError):
            self._await_exit()
            raise ChildError(
                f"{self._who()} ended with {self._process.returncode} in {what}; its messages are above"
            ) from None

    def _await_exit(self) -> None:
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _who(self) -> str:
        return f"the {self.name} process {self.pid}"
