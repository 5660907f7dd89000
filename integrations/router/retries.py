# SPDX-License-Identifier: Apache-2.0
"""Decides what a failure says, and who gets the request next: the table in docs/servers/routers.md. Does no I/O."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections import Counter
from dataclasses import dataclass

from multidict import MultiMapping

_log = logging.getLogger("kvlink.integrations.router")

_MOST_OF_A_ROLE = 2
_MOST_IN_ALL = 3
_OF_THE_ROUTER = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, socket.EAI_SYSTEM)
)
"""Errors of a connection that say nothing about the server: this process or its host is at a limit."""


def is_final(status: int) -> bool:
    """Returns whether a status is the answer to the request. 408, 429 and all from 500 tell about the server only."""
    return status < 500 and status not in (408, 429)


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, with the part of its body that has been read."""

    status: int
    headers: MultiMapping[str]
    begin: bytes


class NotServedError(Exception):
    """A server did not begin to answer, or only with `answer`, which is not final. `request_not_sent`: none came."""

    def __init__(self, reason: str, request_not_sent: bool, answer: Answer | None = None) -> None:
        super().__init__(reason)
        self.request_not_sent = request_not_sent
        self.answer = answer


class OwnLimit(NotServedError):
    """The router itself cannot connect to any server now."""


def own_limit(error: BaseException) -> OwnLimit | None:
    """Returns what to raise for an error of a connection that is not the server's, or None for another one."""
    number = getattr(error, "errno", None)
    if number not in _OF_THE_ROUTER:
        return None
    name = errno.errorcode.get(number, "EAI_SYSTEM")
    text = os.strerror(number) if number > 0 else "no name can be resolved"
    return OwnLimit(
        f"the router is at a limit of its own host ({name}: {text}) and cannot connect to a server; raise the "
        "limit, for open files by ulimit -n, or send fewer requests at once",
        request_not_sent=True,
    )


class Tries:
    """Counts the servers that failed at one request which had reached them, as it may be what ends its servers.

    With `repeats` false, it may have had an effect at the first one.
    """

    def __init__(self, request_id: str, repeats: bool = True) -> None:
        self._request_id = request_id
        self._most = _MOST_OF_A_ROLE if repeats else 1
        self._failed: Counter[str] = Counter()
        self._last: dict[str, NotServedError] = {}

    def __len__(self) -> int:
        return self._failed.total()

    def may_ask(self, role: str) -> bool:
        """Returns whether one more server of this role may get the request."""
        return self._failed[role] < self._most and len(self) < _MOST_IN_ALL

    def failed(self, role: str, error: NotServedError) -> None:
        """Records that a server failed."""
        self._failed[role] += not error.request_not_sent
        self._last[role] = error
        _log.warning("a server failed request=%s error=%s", self._request_id, error)

    def last(self, role: str) -> NotServedError:
        """Returns the last failure of a server of this role."""
        return self._last.get(role) or NotServedError(f"no {role} server is up", request_not_sent=True)
