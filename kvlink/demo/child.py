# SPDX-License-Identifier: Apache-2.0
"""A child process of the demo: `python -m kvlink.demo.child FD ROLE` hosts roles until its parent is gone."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from kvlink.demo.messages import Reply, Role, receive, send
from kvlink.errors import KVLinkError

_PR_SET_PDEATHSIG = 1


class Host:
    """The open roles of this process. A message names a role, what to do, and keyword arguments."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}

    def answer(self, role: str, do: str, arguments: dict[str, Any]) -> Reply:
        """Runs one command; an exception becomes an "error" in the reply."""
        try:
            if do == "open":
                self._roles[role] = _module(role).make(**arguments)
                return {}
            if do == "close":
                self._roles.pop(role).close()
                return {}
            return self._roles[role].commands()[do](**arguments)
        except Exception as error:
            if not isinstance(error, KVLinkError):
                traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Closes what is still open, last opened first."""
        while self._roles:
            self._roles.popitem()[1].close()


def _module(role: str) -> ModuleType:
    return import_module(f"kvlink.demo.{role}_role")


def serve(pipe: Connection) -> None:
    """Says hello, then answers messages in order until the other end of `pipe` closes."""
    host = Host()
    try:
        send(pipe, {})
        while True:
            send(pipe, host.answer(**receive(pipe)))
    except (EOFError, OSError):
        host.close()


def main() -> None:
    """Entry point. The kernel kills this process with its parent, even in the middle of a command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    pipe = Connection(int(sys.argv[1]))
    _module(sys.argv[2])  # torch takes seconds to import; the router starts all children, then waits
    serve(pipe)


if __name__ == "__main__":
    main()
