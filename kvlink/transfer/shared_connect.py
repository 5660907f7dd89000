# SPDX-License-Identifier: Apache-2.0
"""Shares attempts to connect between callers. Each caller waits until its own deadline, and the attempt continues."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvlink.errors import Cancelled, KVLinkError, PeerUnreachable, TransferTimeout
from kvlink.runtime.durations import Durations
from kvlink.runtime.supervised import guarded, start_awaited
from kvlink.transfer.peer import Peer
from kvlink.transfer.reconnect import ReconnectBackoff

_MOST_ATTEMPT_S = 5.0
_LEAST_ATTEMPT_S = 1.0
"""The shortest timeout of an attempt, even if its callers have sooner deadlines. Later callers may wait longer."""
_NUM_ATTEMPTS = 3
"""The number of attempts for an owner that refuses. An owner that does not answer may get more."""

_MOST_FAILED = 1024

Key = tuple[str, int]
"""Identifies an owner by worker_id and epoch."""

Attempt = Callable[[Key, str, float, bool], Awaitable[Peer | None]]
"""Connects to the agent at an address within a timeout in seconds. The last argument ignores cached cards."""


@dataclass(eq=False, slots=True)
class _Connect:
    """One running attempt."""

    deadlines: list[float] = field(default_factory=list)
    """The deadlines of the callers that wait for it now."""
    task: asyncio.Task[Peer | None] = field(init=False)

    @property
    def deadline(self) -> float:
        return max(self.deadlines, default=0.0)


class SharedConnects:
    """The attempts of one worker. Only the control loop uses it, and all times refer to `clock`."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        self.durations = Durations()
        """The durations of successful attempts, without back-off."""
        self.num_retries = 0
        self.failed: Counter[str] = Counter()
        """Counts the attempts that failed, by the owner's worker_id. Those of the latest owners only."""
        self._attempt, self._clock = attempt, clock
        self._closed = False
        self._running: dict[Key, _Connect] = {}
        self._backoffs: dict[Key, ReconnectBackoff] = {}

    async def connect(self, key: Key, agent: str, deadline: float) -> Peer | None:
        """Connects, or joins a running attempt. Raises KVLinkError.

        The attempt continues after a caller gives up, because the next caller may use its connection.
        """
        if self._closed:
            raise _closed(key)
        connect = self._running.get(key)
        if connect is None or connect.task.done():
            connect = self._running[key] = _Connect()
            connect.task = start_awaited(self._run(connect, key, agent))
            connect.task.add_done_callback(guarded("connect ended", lambda _: self._ended(connect, key)))
        connect.deadlines.append(deadline)
        try:
            # The owner may be stopped and never answer.
            done, _ = await asyncio.wait([connect.task], timeout=max(deadline - self._clock(), 0))
        finally:
            connect.deadlines.remove(deadline)
        if not done:
            raise self._not_in_time(key)
        if connect.task.cancelled():
            raise _closed(key)
        return connect.task.result()

    def close(self) -> None:
        """Ends all attempts, because the worker is closing. Their callers, and later ones, get Cancelled."""
        self._closed = True
        for connect in self._running.values():
            connect.task.cancel()

    async def _run(self, connect: _Connect, key: Key, agent: str) -> Peer | None:
        self._drop_expired()
        backoff = self._backoffs.setdefault(key, ReconnectBackoff())
        left, first = _NUM_ATTEMPTS, self._clock()
        while True:
            pause = max(backoff.not_before - self._clock(), 0)
            if self._clock() + pause >= connect.deadline:
                raise self._not_in_time(key, f"; next attempt in {pause:.2f} s")
            if pause > 0:
                await asyncio.sleep(pause)
            self.num_retries += backoff.failures > 0
            began = self._clock()
            try:
                timeout_s = min(max(connect.deadline - began, _LEAST_ATTEMPT_S), _MOST_ATTEMPT_S)
                peer = await self._attempt(key, agent, timeout_s, backoff.failures > 0)
            except KVLinkError as error:
                if not error.retryable:
                    del self._backoffs[key]
                    raise
                silent = isinstance(error, PeerUnreachable) and error.silent
                now = self._clock()
                backoff.failed(str(error), began, now, silent)
                left -= 1
                if left <= 0 and not backoff.may_be_slow(now, connect.deadline - first):
                    raise
            else:
                self.durations.add(int((self._clock() - began) * 1e9))
                del self._backoffs[key]
                return peer

    def _ended(self, connect: _Connect, key: Key) -> None:
        if self._running.get(key) is connect:
            del self._running[key]
            if key in self._backoffs and not self._backoffs[key].failures:
                del self._backoffs[key]
        if not connect.task.cancelled() and connect.task.exception() is not None:
            self.failed[key[0]] = self.failed.pop(key[0], 0) + 1
            if len(self.failed) > _MOST_FAILED:
                del self.failed[next(iter(self.failed))]

    def _not_in_time(self, key: Key, when: str = "") -> KVLinkError:
        backoff = self._backoffs.get(key)
        if backoff is not None and backoff.last:
            return PeerUnreachable(f"{key[0]} is not reachable: {backoff.last}{when}")
        return TransferTimeout(f"{key[0]} was not connected within the deadline; its process may be stopped")

    def _drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, backoff in self._backoffs.items() if backoff.is_expired(now)]:
            if key not in self._running:
                del self._backoffs[key]


def _closed(key: Key) -> Cancelled:
    return Cancelled(f"not connected to {key[0]}: this worker is closed")
