# SPDX-License-Identifier: Apache-2.0
"""Runs a child process of the demo: it hosts roles until its parent closes the pipe."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from kvlink.demo.messages import Reply, Role, receive, send
from kvlink.errors import KVLinkError

# Roles are named, not imported: kvlink uses its integrations as a user of the engine does, not as a part of itself.
_BATCHING = "kvlink.integrations.transformers.demo"
ROLES = {
    "coordinator": "kvlink.demo.coordinator_role:CoordinatorRole",
    "prefill": "kvlink.demo.stages:Prefill",
    "decode": "kvlink.demo.stages:Decode",
    "reference": "kvlink.demo.stages:Reference",
    "transformers prefill": f"{_BATCHING}:PrefillRole",
    "transformers decode": f"{_BATCHING}:DecodeRole",
    "transformers reference": f"{_BATCHING}:ReferenceRole",
}


class Host:
    """Holds the open roles of this process. A message names a role, a command, and keyword arguments."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}

    def answer(self, role: str, do: str, arguments: dict[str, Any]) -> Reply:
        """Runs one command. An exception becomes an "error" in the reply."""
        try:
            if do == "open":
                self._roles[role] = role_type(role)(**arguments)
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
        """Closes the roles that are still open, the last opened first."""
        while self._roles:
            self._roles.popitem()[1].close()


def role_type(role: str) -> Callable[..., Role]:
    """Returns the class of a role, imported on first use. Calling it opens the role."""
    found: Callable[..., Role] = resolve_name(ROLES[role])
    return found


def serve(pipe: Connection) -> None:
    """Answers messages in order until the other end of `pipe` closes."""
    host = Host()
    try:
        while True:
            send(pipe, host.answer(**receive(pipe)))
    except (EOFError, OSError):
        host.close()
