# SPDX-License-Identifier: Apache-2.0
"""Starts, calls and ends the child processes of the demo, which are forks of one process that imports for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from kvlink.errors import KVLinkError

Reply = dict[str, Any]
"""A JSON object. It stands in for the HTTP API of a server: a ticket crosses as text, and block data never does."""

_EXIT_S = 5.0
_FORKS = multiprocessing.get_context("forkserver")


class ChildError(KVLinkError):
    """A role answered with an error, too late, or not at all."""


class Host:
    """Holds the open roles of a process by name."""

    def __init__(self) -> None:
        self._roles: dict[str, Any] = {}

    def answer(self, role: str, do: str, arguments: dict[str, Any]) -> Any:
        """Calls a method of a role. An exception becomes an "error" in the reply.

        "open" makes the role by its argument `kind`, such as "kvlink.demo.servers:Prefill", and "close" removes it.
        """
        try:
            if do == "open":
                self._roles[role] = resolve_name(arguments.pop("kind"))(**arguments)
                return {}
            opened = self._roles.pop(role) if do == "close" else self._roles[role]
            return getattr(opened, do)(**arguments) or {}
        except Exception as error:
            if not isinstance(error, KVLinkError):
                traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}


def _serve(pipe: Connection) -> None:
    """Answers messages in order until the other end of `pipe` closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends its children
    os.dup2(2, 1)
    host = Host()
    with suppress(EOFError, OSError):
        while True:
            pipe.send(host.answer(*pipe.recv()))


class Child:
    """One child process, named after its main role. `patience` multiplies every deadline.

    Its stdout and stderr go to this process's stderr. It ends once this process has closed it, or has ended itself.
    """

    def __init__(self, name: str, patience: float = 1.0) -> None:
        self._patience = patience
        self._pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_serve, args=(theirs,), name=name, daemon=True)
        with theirs:
            try:
                self._process.start()
            except (EOFError, OSError):
                raise ChildError(f"the {name} process did not start; see its messages above") from None

    @property
    def pid(self) -> int:
        """Returns the process id."""
        return self._process.pid or 0

    def call(self, role: str, do: str, *, within_s: float = 60.0, **arguments: Any) -> Any:
        """Runs one method of a role in the child and returns its reply. Raises ChildError with the role's error."""
        self.ask(role, do, **arguments)
        return self.answer(f"{role} {do}", within_s)

    def ask(self, role: str, do: str, **arguments: Any) -> None:
        """Starts a method. The caller must take its answer before the next one. Raises ChildError."""
        try:
            self._pipe.send((role, do, arguments))
        except OSError:
            raise ChildError(f"{self._label()} ended before {role} {do}; see its messages above") from None

    def answer(self, what: str, within_s: float = 60.0) -> Any:
        """Returns the next reply. `what` names the method in errors. Raises ChildError."""
        timeout_s = within_s * self._patience
        if not self._pipe.poll(timeout_s):
            self._end(0)  # a late answer would be taken for that of the next method
            raise ChildError(f"{self._label()} did not answer {what} within {timeout_s:g} s and was killed")
        try:
            reply = self._pipe.recv()
        except (EOFError, OSError):
            self._end(_EXIT_S)
            raise ChildError(
                f"{self._label()} ended with status {self._process.exitcode} in {what}; see its messages above"
            ) from None
        if "error" in reply:
            raise ChildError(f"{what}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Closes the pipe, and kills a child that does not end by itself. Idempotent."""
        self._pipe.close()
        self._end(_EXIT_S)

    def _end(self, within_s: float) -> None:
        self._process.join(within_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _label(self) -> str:
        return f"the {self._process.name} process {self.pid}"


def import_once(*modules: str) -> None:
    """Lets the process that children are forks of import `modules`, if it has not started yet.

    It computes on one thread, because a fork would lack the threads that an import starts.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    _FORKS.set_forkserver_preload(["__main__", *modules])
