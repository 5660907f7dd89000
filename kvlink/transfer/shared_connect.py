# SPDX-License-Identifier: Apache-2.0
"""Connects that several callers wait for: each until its own deadline, and the connect goes on for the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvlink.durations import Durations
from kvlink.errors import KVLinkError, PeerUnreachable, TransferTimeout
from kvlink.transfer.peer import Peer
from kvlink.transfer.reconnect import Attempts

_CONNECT_S = 5.0
_FAIR_S = 1.0
"""What an attempt gets at least, however soon its callers' deadlines are: who comes later may wait longer for it."""
_ATTEMPTS = 3
"""To an owner that refuses; one that says nothing may get more."""

Key = tuple[str, int]
"""Of an owner: worker_id, epoch."""

Attempt = Callable[[Key, str, float, bool], Awaitable[Peer | None]]
"""Connects to the agent at an address, in so many seconds. True: what is known of the owner may be old."""


@dataclass(eq=False, slots=True)
class _Connect:
    """One that is under way."""

    deadlines: list[float] = field(default_factory=list)
    """Of the callers that wait for it now."""
    task: asyncio.Task[Peer | None] = field(init=False)

    @property
    def deadline(self) -> float:
        return max(self.deadlines, default=0.0)


class SharedConnects:
    """Of one worker. Used on the control loop only; all times are by `clock`."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        self.durations = Durations()
        """Of those that succeeded, back-off left out."""
        self.num_retries = 0
        self._attempt, self._clock = attempt, clock
        self._under_way: dict[Key, _Connect] = {}
        self._attempts: dict[Key, Attempts] = {}

    async def connect(self, key: Key, agent: str, deadline: float) -> Peer | None:
        """Connects, or joins a connect under way. Raises KVLinkError.

        A caller that gives up leaves the attempt under way to end by itself: its connection may be good for the next.
        """
        connect = self._under_way.get(key)
        if connect is None or connect.task.done():
            connect = self._under_way[key] = _Connect()
            connect.task = asyncio.create_task(self._run(connect, key, agent))
            connect.task.add_done_callback(lambda _: self._ended(connect, key))
        connect.deadlines.append(deadline)
        try:
            # An owner that is stopped answers nobody in time.
            done, _ = await asyncio.wait([connect.task], timeout=max(deadline - self._clock(), 0))
        finally:
            connect.deadlines.remove(deadline)
        if not done:
            raise self._not_in_time(key)
        return connect.task.result()

    async def _run(self, connect: _Connect, key: Key, agent: str) -> Peer | None:
        self._forget_attempts()
        attempts = self._attempts.setdefault(key, Attempts())
        left, first = _ATTEMPTS, self._clock()
        while True:
            pause = max(attempts.not_before - self._clock(), 0)
            if self._clock() + pause >= connect.deadline:
                raise self._not_in_time(key, f"; next attempt in {pause:.2f} s")
            if pause > 0:
                await asyncio.sleep(pause)
            self.num_retries += attempts.failures > 0
            began = self._clock()
            try:
                timeout_s = min(max(connect.deadline - began, _FAIR_S), _CONNECT_S)
                peer = await self._attempt(key, agent, timeout_s, attempts.failures > 0)
            except KVLinkError as error:
                if not error.retryable:
                    del self._attempts[key]
                    raise
                silent = isinstance(error, PeerUnreachable) and error.silent
                now = self._clock()
                attempts.failed(str(error), began, now, silent)
                left -= 1
                if left <= 0 and not attempts.may_be_slow(now, connect.deadline - first):
                    raise
            else:
                self.durations.add(int((self._clock() - began) * 1e9))
                del self._attempts[key]
                return peer

    def _ended(self, connect: _Connect, key: Key) -> None:
        if self._under_way.get(key) is connect:
            del self._under_way[key]
            if key in self._attempts and not self._attempts[key].failures:
                del self._attempts[key]
        if not connect.task.cancelled():
            connect.task.exception()  # nobody may wait any more: asyncio must not complain

    def _not_in_time(self, key: Key, when: str = "") -> KVLinkError:
        attempts = self._attempts.get(key)
        if attempts is not None and attempts.last:
            return PeerUnreachable(f"{key[0]} is not reachable: {attempts.last}{when}")
        return TransferTimeout(f"{key[0]} was not connected within the deadline; its process may be stopped")

    def _forget_attempts(self) -> None:
        now = self._clock()
        for key in [key for key, attempts in self._attempts.items() if attempts.forgotten(now)]:
            if key not in self._under_way:
                del self._attempts[key]
