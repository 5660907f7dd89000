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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvlink.control import AgentClients, Renewal, SettleOrder
from kvlink.errors import KVLinkError, UnknownRequest
from kvlink.runtime import supervised
from kvlink.runtime.background import ControlThread
from kvlink.ticket import LeaseSeat

from ...request_names import printable
from ..wire.handoff import Handoff, Owner

STILL_S = 10.0
"""The least time without progress after which renewals stop. It is a lease's time if that is longer.

A step may take long: the first one of several ranks compiles, and a long prompt computes for seconds on a CPU.
"""
LONGEST_S = 600.0
"""The longest time that a request's lease is renewed. The clients of OpenAI's libraries give up by then."""

Seat = tuple[int, int]
"""The slot of a seat and its settle nonce."""


@dataclass(slots=True)
class _Watched:
    handoff: Handoff
    since: float
    due: float
    loading: bool = False
    let_go: bool = False


class Renewals:
    """The handoffs of requests that wait here. `now` is the time of the first one's clock, and never goes back.

    Progress is a step that computes tokens or asks for waiting requests. A paused engine makes such steps only for
    requests that it still answers, although it may step for another reason: handoffs of its own that others read. For
    a load that was started every step is progress, because steps take its result.

    So a lease outlives the last progress by two of its own lengths, or by 10 s and one length if that is more.
    """

    def __init__(self, now: float) -> None:
        self._watched: dict[str, _Watched] = {}
        self._stepped = self._advanced = now

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request_id: str, handoff: Handoff, now: float) -> None:
        """Renews from now on. The first time is due at once."""
        self._watched[request_id] = _Watched(handoff, now, due=now)

    def forget(self, request_id: str) -> None:
        """Stops renewing: the request is being read, or will not be. Idempotent."""
        self._watched.pop(request_id, None)

    def stepped(self, now: float, *, advanced: bool) -> None:
        """Notes a step of the engine; `advanced`: it computes tokens, or asked for requests that wait."""
        self._stepped = now
        if advanced:
            self._advanced = now

    def loading(self, request_id: str) -> None:
        """Notes that the workers load the request."""
        if (watched := self._watched.get(request_id)) is not None:
            watched.loading = True

    def has_let_go(self, request_id: str) -> bool:
        """Returns whether its renewals have stopped, so that the lease has ended or soon will."""
        return (watched := self._watched.get(request_id)) is not None and watched.let_go

    def still_s(self, now: float) -> float:
        """Returns how long ago the engine made progress."""
        return now - self._advanced

    def let_go(self, now: float) -> list[str]:
        """Stops what is due and has no reader that makes progress. Returns the ids of these requests."""
        stopped = [
            request_id
            for request_id, watched in list(self._watched.items())
            if not watched.let_go and watched.due <= now and not self._progresses(watched, now)
        ]
        for request_id in stopped:
            if (watched := self._watched.get(request_id)) is not None:  # another thread forgets
                watched.let_go = True
        return stopped

    def due(self, now: float) -> dict[Owner, list[Seat]]:
        """Returns what to renew now, by owner. It is due again after a third of its lease."""
        seats: dict[Owner, dict[Seat, None]] = defaultdict(dict)
        for watched in list(self._watched.values()):
            if watched.let_go or watched.due > now:
                continue
            watched.due = now + watched.handoff.ttl_s / 3
            mine = dict.fromkeys((seat.slot, seat.settle_nonce) for seat in watched.handoff.seats)
            for owner in watched.handoff.owners:
                seats[owner].update(mine)
        return {owner: list(theirs) for owner, theirs in seats.items()}

    def _progresses(self, watched: _Watched, now: float) -> bool:
        last = max(self._stepped if watched.loading else self._advanced, watched.since)
        patience_s = max(watched.handoff.ttl_s, STILL_S)
        return now - last <= patience_s and now - watched.since <= LONGEST_S


_log = logging.getLogger("vllm.kvlink")

_LOOP = "vllm-leases"
_TICK_S = 1.0
_AGAIN_S = 2.0
"""The delay of `release_later`. A router whose decode request could not follow the prefill retries within it."""
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

    def release_later(self, handoff: Handoff) -> None:
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


_SPENT = 4096

Key = tuple[str, int, int, int]
"""Identifies a lease: worker, epoch, slot and nonce of a handoff's first seat."""


def key_of(handoff: Handoff) -> Key:
    """Returns the key of a handoff's lease."""
    owner, seat = handoff.owners[0], handoff.seats[0]
    return owner.worker_id, owner.epoch, seat.slot, seat.settle_nonce


@dataclass(slots=True)
class _Shared:
    live: set[str] = field(default_factory=set)
    settled_by: str = ""
    """The request whose load ends the lease: it was alone when the load began."""
    read: bool = False


class SharedLeases:
    """The requests under each lease, and the leases that this server has ended."""

    def __init__(self) -> None:
        self._shared: dict[Key, _Shared] = {}
        self._spent: dict[Key, bool] = {}  # whether a load was begun under it

    def join(self, handoff: Handoff, request_id: str) -> None:
        """Adds a request that came with this handoff."""
        self._shared.setdefault(key_of(handoff), _Shared()).live.add(request_id)

    def are_there(self, handoff: Handoff) -> bool:
        """Returns whether a request is under this lease."""
        return key_of(handoff) in self._shared

    def is_spent(self, handoff: Handoff) -> bool:
        """Returns whether this server has ended the lease, so that nothing can be read under it."""
        return key_of(handoff) in self._spent

    def was_used(self, handoff: Handoff) -> bool:
        """Returns whether this server has ended the lease after a load, well or not."""
        return self._spent.get(key_of(handoff), False)

    def must_wait(self, handoff: Handoff, request_id: str) -> bool:
        """Returns whether another request's load will end the lease, which would make this one's stale."""
        shared = self._shared.get(key_of(handoff))
        return shared is not None and shared.settled_by not in ("", request_id)

    def settles(self, handoff: Handoff, request_id: str) -> bool:
        """Returns whether a load that begins now ends the lease, because no other request is under it."""
        shared = self._shared[key_of(handoff)]
        if shared.live != {request_id}:
            return False
        shared.settled_by = request_id
        return True

    def has_read(self, handoff: Handoff) -> None:
        """Records that a load under this lease succeeded."""
        if (shared := self._shared.get(key_of(handoff))) is not None:
            shared.read = True

    def was_read(self, handoff: Handoff) -> bool:
        """Returns whether a load of the requests under this lease succeeded."""
        shared = self._shared.get(key_of(handoff))
        return shared is not None and shared.read

    def release_later(self, handoff: Handoff, request_id: str) -> bool:
        """Removes a request. Returns whether it was the last under its lease; False if it was not under it."""
        key = key_of(handoff)
        shared = self._shared.get(key)
        if shared is None or request_id not in shared.live:
            return False
        shared.live.discard(request_id)
        if shared.settled_by == request_id:
            shared.settled_by = ""
        if shared.live:
            return False
        del self._shared[key]
        return True

    def spend(self, handoff: Handoff, *, used: bool) -> None:
        """Records that the lease ends. `used` says that a load was begun under it."""
        self._spent[key_of(handoff)] = used
        while len(self._spent) > _SPENT:
            del self._spent[next(iter(self._spent))]
