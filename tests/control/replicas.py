# SPDX-License-Identifier: Apache-2.0
"""Coordinators of a simulated world, and the client of a session to them, without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from control.cards import make_card

from kvlink.control import CoordinatorClient, Session
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.values import Membership, Push, PushKind
from kvlink.errors import CoordinatorUnavailable
from kvlink.types import WorkerCard

LEASE_S = 10.0
MEMBERSHIP = Membership(1, LEASE_S, LEASE_S / 4)


class Replica:
    """A coordinator of a simulated world."""

    def __init__(self) -> None:
        self.hangs = False
        self.joined: list[float] = []
        self.beaten: list[float] = []
        self.streams: list[_Stream] = []
        self._unread: list[_Stream] = []

    def take_beat(self, stream: _Stream) -> None:
        self._unread.append(stream)
        if not self.hangs:
            self.go_on()

    def go_on(self) -> None:
        """It reads what came while it was stopped."""
        self.hangs = False
        for stream in self._unread:
            self.beaten.append(asyncio.get_running_loop().time())
            stream.pushes.put_nowait(Push(PushKind.ACK))
        self._unread.clear()


class _Stream:
    def __init__(self, at: Replica, leave: Callable[[], None]) -> None:
        self._at = at
        self.pushes: asyncio.Queue[Push] = asyncio.Queue()
        self.avoid_server = leave

    async def send(self, beat: Beat) -> None:
        CoordinatorCalls.KEEP_ALIVE.request.encode(beat)
        self._at.take_beat(self)

    async def receive(self) -> Push:
        return await self.pushes.get()

    def cancel(self) -> None:
        pass


class Client:
    """As CoordinatorClient, with `replicas` behind it."""

    def __init__(self, *replicas: Replica) -> None:
        self._ends = list(replicas)
        self.has_replicas = len(replicas) > 1
        self.address = "simulated"

    async def join(self, card: WorkerCard, rejoin: bool = False, timeout_s: float = 5.0) -> Membership:
        at = self._ends[0]
        if at.hangs:
            await asyncio.sleep(timeout_s)
            self._leave()
            raise CoordinatorUnavailable("silent")
        at.joined.append(asyncio.get_running_loop().time())
        return MEMBERSHIP

    def keep_alive(self) -> _Stream:
        stream = _Stream(self._ends[0], self._leave)
        self._ends[0].streams.append(stream)
        return stream

    async def leave(self, worker_id: str, epoch: int, timeout_s: float = 1.0) -> None:
        pass

    def _leave(self) -> None:
        self._ends.append(self._ends.pop(0))


async def joined(
    *replicas: Replica,
    on_settle: Callable[[int, int], object] = lambda slot, nonce: None,
    report: Callable[[], WorkerReport | None] = lambda: None,
) -> Session:
    client = cast(CoordinatorClient, Client(*replicas))
    return await Session.join(client, make_card(), on_settle, report=report)
