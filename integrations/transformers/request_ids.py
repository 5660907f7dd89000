# SPDX-License-Identifier: Apache-2.0
"""Refuses a request whose id another one has: transformers keeps one table an id, and would mix the two up."""

from __future__ import annotations

import threading
from typing import Any

from kvlink.errors import ConfigError

from ..request_names import printable


class RequestIds:
    """The ids of a manager's requests: those that were given to the handoff, and the manager's own.

    Clients choose the ids. Every call of a handoff that starts a request passes `reserve`. Safe from any thread.
    """

    def __init__(self, scheduler: Any, input_queue: Any) -> None:
        self._scheduler, self._input = scheduler, input_queue
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._number = 0

    def reserve(self, request_id: str | None, prefix: str) -> str:
        """Takes an id until `release` and returns it; None draws a free one that starts with `prefix`.

        Raises ConfigError for an id that a request has, which runs, waits, or is in the manager's input queue.
        """
        with self._lock:
            while request_id is None:
                drawn = f"{prefix}-{self._number}"
                self._number += 1
                request_id = None if self._is_taken(drawn) else drawn
            if self._is_taken(checked_id(request_id)):
                raise taken(request_id)
            self._taken.add(request_id)
            return request_id

    def release(self, request_id: str) -> None:
        """Gives the id of a request that has ended back. Idempotent."""
        with self._lock:
            self._taken.discard(request_id)

    def is_scheduled(self, request_id: object) -> bool:
        """Returns whether transformers' scheduler has a request of this id."""
        return request_id in self._scheduler.active_requests or request_id in self._scheduler.waiting_requests

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._taken or self.is_scheduled(request_id) or self._is_queued(request_id)

    def _is_queued(self, request_id: str) -> bool:
        with self._input.mutex:
            return any(state.request_id == request_id for state in self._input.queue)


def checked_id(request_id: object) -> str:
    """Returns an id that is text. Raises ConfigError for others."""
    if not isinstance(request_id, str):
        raise ConfigError(f"a request_id must be text, not {type(request_id).__name__}")
    return request_id


def taken(request_id: str) -> ConfigError:
    """Returns the error for the second request of an id."""
    return ConfigError(
        f"request {printable(request_id)} already runs here; give each request its own request_id"
    )
