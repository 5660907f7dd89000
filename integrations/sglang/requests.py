# SPDX-License-Identifier: Apache-2.0
"""Keeps each request of SGLang's scheduler within its room and its failure within the request.

SGLang stores status, failure and peers by room alone. All of these belong to the one request that owns the room, and an
exception that left a method would end the scheduler, and with it every request of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvlink.errors import KVLinkError

from .manager import KVLinkManager
from .messages import problem_of_room

_log = logging.getLogger("kvlink.sglang")

Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(otherwise: Any = None) -> Callable[[Method], Method]:
    """Decorates a method that SGLang calls. It returns `otherwise` if the request has left its room, or now fails."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: OwnsRoom, *args: Any, **options: Any) -> Any:
            if not self.owns_room:
                return otherwise
            try:
                return method(self, *args, **options)
            except Exception as error:
                self.fail(method.__name__, error)
                return otherwise

        return call  # type: ignore[return-value]

    return decorate


class OwnsRoom:
    """A sender or a receiver. Without its room it does nothing, and it has failed for `reason`."""

    kv_mgr: KVLinkManager
    bootstrap_room: int
    bootstrap_addr: str
    conclude_state: Any = None
    clear: Any
    owns_room = False
    reason = ""

    # What SGLang reads of a request that never began.
    bootstrap_infos: Any = None
    abort_notified = True
    require_staging = False
    _early_send_wait_event: Any = None

    def __init__(
        self, mgr: KVLinkManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.reason = self.problem() or self._assign()
        if self.reason:
            self.conclude_state = KVPoll.Failed
            _log.warning("refused a request: %s", self.reason)
            return
        self.owns_room = True
        try:
            mgr.forget(bootstrap_room)
            super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)  # type: ignore[call-arg]
            self.opened()
        except Exception as error:
            self.fail("the start of a request", error)

    def problem(self) -> str:
        """Returns why the request cannot be served, or ""."""
        return problem_of_room(self.bootstrap_room)

    def _assign(self) -> str:
        rooms = self.kv_mgr.live_rooms
        owner = rooms.owner(self.bootstrap_room)
        if isinstance(owner, OwnsRoom) and owner.has_failed():
            owner.detach()
        return rooms.assign(self.bootstrap_room, self)

    def opened(self) -> None:
        """Called once the request exists for SGLang."""

    def stop(self) -> None:
        """Ends what kvlink does with the request's pages. Idempotent."""
        raise NotImplementedError

    def tell_failure(self, reason: str) -> None:
        """Marks the room as failed and notifies the other server."""
        raise NotImplementedError

    def has_failed(self) -> bool:
        """Returns whether only SGLang's last calls are left of the request."""
        failed = KVPoll.Failed
        return failed in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room))

    def fail(self, what: str, error: Exception) -> None:
        """Fails this request, and no other, for an error in the method `what`."""
        self.reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, KVLinkError):
            self.kv_mgr.guard.caught(what, self.bootstrap_room, error)
            self.reason = f"{what} failed unexpectedly: {self.reason}"
        self._try(self.stop)
        self._try(self.tell_failure, self.reason)
        self.conclude_state = KVPoll.Failed

    def _try(self, step: Callable[..., object], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            self.kv_mgr.guard.caught("the end of a failed request", self.bootstrap_room, error)

    def detach(self) -> None:
        """Frees the room. Every later call is about this request alone. Idempotent."""
        if self.owns_room:
            self.owns_room = False
            if self.conclude_state != KVPoll.Success:
                self.conclude_state = KVPoll.Failed
                self.reason = self.reason or self.kv_mgr.failure_of(self.bootstrap_room)
            self.kv_mgr.live_rooms.release(self.bootstrap_room, self)

    def failure_exception(self) -> None:
        """Raises the error of the request."""
        if self.owns_room and not self.reason:
            super().failure_exception()  # type: ignore[misc]
        owned, self.conclude_state = self.owns_room, KVPoll.Failed
        self.clear()
        if owned:
            self.kv_mgr.forget(self.bootstrap_room)
        raise KVTransferError(self.bootstrap_room, self.reason or "the request failed on another rank")
