# SPDX-License-Identifier: Apache-2.0
"""Tracks requests whose tickets are sent, and finds those that no reader will come for."""

from __future__ import annotations

import re

_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM names the requests that it makes from one with n above 1 after it: 0_name, 1_name, …"""


class SentTickets:
    """The requests of one server, from the handoff until every worker has reported the lease's end."""

    def __init__(self) -> None:
        self._family_of: dict[str, tuple[str, str] | None] = {}
        self._newest: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._family_of)

    def add(self, request_id: str, prompt: str) -> list[str]:
        """Adds a request that is handed off. Returns those that it replaces. `prompt` is the digest of its prompt.

        These are children of one request with n above 1, whose answer carries only the last one's ticket.
        """
        child = _CHILD.fullmatch(request_id)
        family = (child[1], prompt) if child else None
        self._family_of[request_id] = family
        if family is None:
            return []
        earlier = self._newest.get(family)
        self._newest[family] = request_id
        return [earlier] if earlier is not None else []

    def ended(self, request_id: str) -> None:
        """Removes a request whose lease has ended on every worker. Idempotent."""
        family = self._family_of.pop(request_id, None)
        if family is not None and self._newest.get(family) == request_id:
            del self._newest[family]

    def all(self) -> list[str]:
        """Returns all requests."""
        return list(self._family_of)
