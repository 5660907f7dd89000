# SPDX-License-Identifier: Apache-2.0
"""Renews leases at prefill servers for requests that wait here, and releases them when nothing will read the blocks.

It runs in the scheduler's process, on kvlink's control thread. The scheduler itself never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

from kvlink.control import AgentClients, Renewal, SettleOrder
from kvlink.errors import KVLinkError, UnknownRequest
from kvlink.runtime import supervised
from kvlink.runtime.background import ControlThread
from kvlink.ticket import LeaseSeat

from ...request_names import printable
from ..wire.handoff import Handoff, Owner
from .renewals import LONGEST_S, Renewals, Seat

_log = logging.getLogger("vllm.kvlink")

_LOOP = "vllm-leases"
_TICK_S = 1.0
_AGAIN_S = 2.0
"""The delay of `leave`. A router whose decode request could not follow the prefill retries with its answer by then."""
_BATCH = 1024  # seats in one renewal, the limit of the agent
_CLOSE_S = 2.0


class RemoteLeases:
    """Watches leases. Safe from any thread. `clock` gives seconds, and is called on any thread.

    A renewal that fails is repeated after a third of the lease's time; the reader finds out if the lease is gone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._control = ControlThread.shared()
        self._agents = AgentClients()
        self._renewals = Renewals(clock())
        self._left: dict[tuple[LeaseSeat, ...], tuple[float, Handoff]] = {}
        self._calls: dict[Owner, asyncio.Task[None]] = {}
        """The renewals that run. An agent that does not answer delays no other one."""
        self._releases: set[asyncio.Task[None]] = set()
        self._ticking = self._control.submit(supervised.keep_running(_LOOP, self._tick_for_ever))

    def __len__(self) -> int:
        return len(self._renewals)

    def watch(self, request_id: str, handoff: Handoff) -> None:
        """Renews from the next tick on. A request that is read within a tick costs nothing."""
        self._left.pop(handoff.seats, None)
        self._renewals.watch(request_id, handoff, self._clock())

    def stepped(self, *, advanced: bool) -> None:
        """Notes a step of the engine; `advanced`: it computes tokens, or asked for requests that wait."""
        self._renewals.stepped(self._clock(), advanced=advanced)

    def loading(self, request_id: str) -> None:
        """Notes that the workers load the request."""
        self._renewals.loading(request_id)

    def has_let_go(self, request_id: str) -> bool:
        """Returns whether its renewals have stopped, so that the lease has ended or soon will."""
        return self._renewals.has_let_go(request_id)

    def forget(self, request_id: str) -> None:
        """Stops renewing: the request is being read, or will not be. Idempotent."""
        self._renewals.forget(request_id)

    def release(self, handoff: Handoff, ranks: Iterable[int]) -> None:
        """Releases the leases of these ranks in the background, because nothing reads from them."""
        with contextlib.suppress(KVLinkError):  # the process is ending
            owners = [handoff.owners[rank] for rank in ranks]
            self._control.in_background(self._release_all(handoff, owners), "leases not released")

    def leave(self, handoff: Handoff) -> None:
        """Releases all ranks, but later, and not at all if the same handoff is watched by then."""
        self._left[handoff.seats] = self._clock() + _AGAIN_S, handoff

    def close(self) -> None:
        """Stops renewing. Idempotent."""
        self._ticking.cancel()
        with contextlib.suppress(KVLinkError):
            self._control.run(self._agents.close(), _CLOSE_S)

    # The following methods run on the control thread.

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick()

    def tick(self) -> None:
        """Starts what is due now."""
        now = self._clock()
        self._let_go(now)
        self._calls = {owner: call for owner, call in self._calls.items() if not call.done()}
        for owner, seats in self._renewals.due(now).items():
            if owner not in self._calls:
                self._calls[owner] = supervised.start_job(_LOOP, self._renew(owner, seats))
        for left in self._take_left(now):
            self._start_release(left, left.owners)

    def _let_go(self, now: float) -> None:
        stopped = self._renewals.let_go(now)
        if stopped:
            _log.warning(
                "leases of %d waiting request(s) are not renewed any more, so that prefill has its blocks back: they "
                "have waited for %.0f s, or this engine is paused or hangs, as it has computed nothing for %.0f s. "
                "Their prompts are computed here",
                len(stopped),
                LONGEST_S,
                self._renewals.still_s(now),
            )

    def _take_left(self, now: float) -> list[Handoff]:
        due = [seats for seats, (when, _) in list(self._left.items()) if when <= now]
        return [taken[1] for seats in due if (taken := self._left.pop(seats, None)) is not None]

    async def _release_all(self, handoff: Handoff, owners: Iterable[Owner]) -> None:
        self._start_release(handoff, owners)

    def _start_release(self, handoff: Handoff, owners: Iterable[Owner]) -> None:
        self._releases = {job for job in self._releases if not job.done()}
        self._releases.update(supervised.start_job(_LOOP, self._release(owner, handoff)) for owner in owners)

    async def _renew(self, owner: Owner, seats: list[Seat]) -> None:
        try:
            for first in range(0, len(seats), _BATCH):
                renewal = Renewal(owner.worker_id, owner.epoch, seats[first : first + _BATCH])
                await self._agents[owner.agent].renew(renewal)
        except KVLinkError as error:
            _log.warning("leases not renewed worker=%s error=%.300r", printable(owner.worker_id), error)

    async def _release(self, owner: Owner, handoff: Handoff) -> None:
        seat = handoff.seats[0]
        # A lease has one reader in all: releasing its seat ends the others.
        order = SettleOrder(owner.worker_id, owner.epoch, seat.slot, seat.settle_nonce ^ 1)
        try:
            await self._agents[owner.agent].settle(order)
        except UnknownRequest:  # the lease has ended, or its owner has
            return
        except KVLinkError as error:
            _log.warning("lease not released request=%s error=%.300r", printable(handoff.request_id), error)
