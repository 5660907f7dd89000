# SPDX-License-Identifier: Apache-2.0
"""Renews leases at prefill servers for requests that wait here, and releases them when nothing will read the blocks.

It runs in the scheduler's process, on kvlink's control thread. The scheduler itself never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from kvlink.background import ControlThread
from kvlink.control import AgentClients, Renewal, SettleOrder
from kvlink.errors import KVLinkError, UnknownRequest
from kvlink.ticket import LeaseSeat

from .handoff import Handoff, Owner

_log = logging.getLogger("vllm.kvlink")

_TICK_S = 1.0
_AGAIN_S = 2.0
"""The delay of `leave`. A router whose decode request could not follow the prefill retries with its answer by then."""
_BATCH = 1024  # seats in one renewal, the limit of the agent
_CLOSE_S = 2.0


@dataclass(slots=True)
class _Watched:
    handoff: Handoff
    due: float
    """The time of the next renewal, by time.monotonic()."""

    @property
    def every_s(self) -> float:
        return self.handoff.ttl_s / 3


class RemoteLeases:
    """Watches leases. Safe from any thread.

    A renewal that fails is repeated at the next tick; the reader finds out if the lease is gone.
    """

    def __init__(self) -> None:
        self._control = ControlThread.shared()
        self._agents = AgentClients()
        self._watched: dict[str, _Watched] = {}
        self._left: dict[tuple[LeaseSeat, ...], tuple[float, Handoff]] = {}
        self._ticking = self._control.submit(self._tick_for_ever())

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request_id: str, handoff: Handoff) -> None:
        """Renews from the next tick on. A request that is read within a tick costs nothing."""
        self._left.pop(handoff.seats, None)
        self._watched[request_id] = _Watched(handoff, time.monotonic())

    def forget(self, request_id: str) -> None:
        """Stops renewing: the request is being read, or will not be. Idempotent."""
        self._watched.pop(request_id, None)

    def release(self, handoff: Handoff, ranks: Iterable[int]) -> None:
        """Releases the leases of these ranks in the background, because nothing reads from them."""
        for owner in map(handoff.owners.__getitem__, ranks):
            self._in_background(self._release(owner, handoff))

    def leave(self, handoff: Handoff) -> None:
        """Releases all ranks, but later, and not at all if the same handoff is watched by then."""
        self._left[handoff.seats] = time.monotonic() + _AGAIN_S, handoff

    def close(self) -> None:
        """Stops renewing. Idempotent."""
        self._ticking.cancel()
        with contextlib.suppress(KVLinkError):
            self._control.run(self._agents.close(), _CLOSE_S)

    def _in_background(self, job: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(KVLinkError):  # the process is ending
            self._control.submit(job)

    # The following methods run on the control thread.

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            due = [watched for watched in list(self._watched.values()) if watched.due <= now]
            by_owner: dict[Owner, list[tuple[int, int]]] = defaultdict(list)
            for watched in due:
                watched.due = now + watched.every_s
                for owner in watched.handoff.owners:
                    by_owner[owner].extend((seat.slot, seat.settle_nonce) for seat in watched.handoff.seats)
            await asyncio.gather(
                *(self._renew(owner, seats) for owner, seats in by_owner.items()),
                *(self._release(owner, left) for left in self._take_left(now) for owner in left.owners),
            )

    def _take_left(self, now: float) -> list[Handoff]:
        due = [seats for seats, (when, _) in list(self._left.items()) if when <= now]
        return [taken[1] for seats in due if (taken := self._left.pop(seats, None)) is not None]

    async def _renew(self, owner: Owner, seats: list[tuple[int, int]]) -> None:
        try:
            for first in range(0, len(seats), _BATCH):
                renewal = Renewal(owner.worker_id, owner.epoch, seats[first : first + _BATCH])
                await self._agents[owner.agent].renew(renewal)
        except KVLinkError as error:
            _log.warning("leases not renewed worker=%s error=%s", owner.worker_id, error)

    async def _release(self, owner: Owner, handoff: Handoff) -> None:
        seat = handoff.seats[0]
        # A lease has one reader in all: releasing its seat ends the others.
        order = SettleOrder(owner.worker_id, owner.epoch, seat.slot, seat.settle_nonce ^ 1)
        try:
            await self._agents[owner.agent].settle(order)
        except UnknownRequest:  # the lease has ended, or its owner has
            return
        except KVLinkError as error:
            _log.warning("lease not released request=%s error=%s", handoff.request_id, error)
