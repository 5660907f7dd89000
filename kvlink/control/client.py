# SPDX-License-Identifier: Apache-2.0
"""Typed calls to a coordinator and to worker agents. Each client belongs to the event loop it is used on.

Every call raises CoordinatorUnavailable when the far end stays away for the whole timeout (5 s unless said
otherwise), and the exceptions of `kvlink.control.refusal.Reason` for what it refuses.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import TypeVar

from kvlink.backoff import Backoff
from kvlink.control.codec import AgentCalls, CoordinatorCalls
from kvlink.control.now import now
from kvlink.control.overview import Beat, Overview
from kvlink.control.refusal import Overloaded
from kvlink.control.rpc.channel import Channel
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.rpc.stream import Stream
from kvlink.control.security import Security
from kvlink.control.values import (
    Claim,
    ConnectReply,
    ConnectRequest,
    CoordinatorStatus,
    JoinRequest,
    Membership,
    Nothing,
    Offer,
    Push,
    Renewal,
    SettleOrder,
    Watch,
    WorkerChanges,
    WorkerEpoch,
)
from kvlink.errors import CoordinatorUnavailable, UnknownRequest
from kvlink.timeouts import given_or
from kvlink.types import Joined, WorkerCard, WorkerChange

_C = TypeVar("_C", bound="_Client")

_MAX_CACHED_CARDS = 4_096
_MAX_GIVEN_UP = 4_096
_AGENT_PATIENCE_S = 0.5
"""A worker that died does not come back at its address: readers should hear of it soon."""
_CLAIM_TURN_S = 5.0
"""One of several coordinators may hang: a claim that waits longer asks again, under its id."""
_CLAIM_SLACK_S = 2.0
"""A claim that waited in vain is refused by the coordinator; the client gives up this much later."""


class _Client:
    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s

    @property
    def address(self) -> str:
        """host:port of the far end, or several with commas between."""
        return self._channel.address

    @property
    def asks(self) -> str:
        """The one of them that the next call goes to."""
        return self._channel.asks

    @property
    def has_choice(self) -> bool:
        """Whether there are several addresses."""
        return self._channel.has_choice

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._channel!r})"

    async def close(self) -> None:
        """Ends running calls. Idempotent."""
        await self._channel.close()

    async def __aenter__(self: _C) -> _C:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class CoordinatorClient(_Client):
    """Speaks to the coordinator at "host:port", or to any replica of "a:1,b:2". Raises ConfigError for other forms."""

    def __init__(self, addresses: str, timeout_s: float = 5.0, security: Security | None = None) -> None:
        advice = "Check that `kvlink coordinator` runs there and that this host reaches the port"
        trust = (Security.from_env() if security is None else security).coordinators()
        super().__init__(Channel(addresses, "coordinator", advice, trust=trust), timeout_s)
        self._cards: OrderedDict[tuple[str, int], WorkerCard] = OrderedDict()
        self._given_up: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """Claim ids by request and reader, of claims that ended without an answer."""

    async def join(
        self, card: WorkerCard, rejoin: bool = False, timeout_s: float | None = None
    ) -> Membership:
        """Publishes a card and proposes its epoch. `Session` does this and stays joined."""
        request = JoinRequest(card, rejoin)
        return await self._channel.call(CoordinatorCalls.JOIN, request, given_or(timeout_s, self._timeout_s))

    def keep_alive(self) -> Stream[Beat, Push]:
        """Beats up, settle orders down. `Session` does this."""
        return self._channel.open(CoordinatorCalls.KEEP_ALIVE)

    async def leave(self, worker_id: str, epoch: int, timeout_s: float | None = None) -> None:
        """Ends this life of a worker; what it offered is dropped."""
        request = WorkerEpoch(worker_id, epoch)
        await self._channel.call(CoordinatorCalls.LEAVE, request, given_or(timeout_s, self._timeout_s))

    async def worker(self, worker_id: str, epoch: int = 0) -> WorkerCard:
        """The card of a worker (epoch 0: whichever runs now). Asked once for each epoch, then remembered.

        Raises UnknownRequest when the worker is not joined or runs under another epoch.
        """
        cached = self._cards.get((worker_id, epoch))
        if cached is not None:
            self._cards.move_to_end((worker_id, epoch))
            return cached
        request = WorkerEpoch(worker_id, epoch)
        card = await self._channel.call(CoordinatorCalls.GET_WORKER, request, self._timeout_s)
        self._cards[worker_id, card.epoch] = card
        if len(self._cards) > _MAX_CACHED_CARDS:
            self._cards.popitem(last=False)
        return card

    async def workers(self) -> list[WorkerCard]:
        """Everyone who is joined."""
        return await self._channel.call(CoordinatorCalls.LIST_WORKERS, Nothing(), self._timeout_s)

    async def watch(self, worker_ids: Iterable[str] = ()) -> AsyncIterator[WorkerChange]:
        """UP for everyone who is joined, then what changes. Never ends; bridges coordinator restarts and a slow reader.

        worker_ids: only of these, at most 1,024; everyone when not given.
        """
        asked = Watch(frozenset(worker_ids))
        known: dict[str, WorkerCard] = {}
        backoff = Backoff()
        while True:
            whole = None
            try:
                async with aclosing(self._changes(asked)) as replies:
                    whole = await anext(replies, None)
                    for change in _difference(known, asked.sees(whole)) if whole is not None else ():
                        yield change
                    async for changes in replies:
                        backoff.reset()
                        for change in asked.sees(changes):  # which an older coordinator does not know
                            _apply(known, change)
                            yield change
            except CoordinatorUnavailable:
                pass
            except Overloaded:
                if whole is None:
                    raise
                # The coordinator keeps no more changes for a watch that does not read them: it begins again.
            await asyncio.sleep(backoff.delay_s())

    def _changes(self, asked: Watch) -> AsyncGenerator[WorkerChanges, None]:
        return self._channel.receive(CoordinatorCalls.WATCH_WORKERS, asked)

    async def offer(self, offer: Offer, timeout_s: float | None = None) -> None:
        """Publishes a ticket. `Session.offer` also survives a restart of the coordinator."""
        await self._channel.call(CoordinatorCalls.OFFER, offer, given_or(timeout_s, self._timeout_s))

    async def claim(
        self, request_id: str, timeout_s: float = 30.0, reader: int = 0, num_readers: int = 1
    ) -> list[bytes]:
        """The tickets of all ranks of a request, once all have offered. `timeout_s` 0: now or never.

        Asked again of another replica, or after a lost reply, it brings the same tickets. So does the next claim of
        the same reader after one that was cancelled while its tickets were on their way.
        Raises UnknownRequest, or LeaseExpired when it was offered and not claimed in time.
        """
        claim_id = self._given_up.pop((request_id, reader), None) or os.urandom(16)
        try:
            return await self._claim(Claim(request_id, timeout_s, reader, num_readers, claim_id))
        except (asyncio.CancelledError, CoordinatorUnavailable):
            self._given_up[request_id, reader] = claim_id
            if len(self._given_up) > _MAX_GIVEN_UP:
                self._given_up.popitem(last=False)
            raise

    async def _claim(self, claim: Claim) -> list[bytes]:
        deadline = now() + claim.timeout_s
        backoff = Backoff()
        while True:
            left_s = max(0.0, deadline - now())
            turn_s = min(left_s, _CLAIM_TURN_S) if self._channel.has_choice else left_s
            turn_ends = now() + turn_s
            asked = self._channel.asks
            try:
                return await self._channel.attempt(
                    CoordinatorCalls.CLAIM, claim._replace(timeout_s=turn_s), turn_s + _CLAIM_SLACK_S
                )
            except UnknownRequest:
                is_over = turn_s > 0.0 and now() >= turn_ends
                if is_over:
                    self._channel.leave(asked)  # it may have lost its store
                if turn_s == left_s or not is_over:
                    raise
            except CoordinatorUnavailable:
                delay_s = backoff.delay_s()
                if now() + delay_s >= deadline:
                    raise
                await asyncio.sleep(delay_s)

    async def settle(self, order: SettleOrder) -> None:
        """Asks the owner through the coordinator to end a seat, when neither data path nor agent is left."""
        await self._channel.call(CoordinatorCalls.SETTLE, order, self._timeout_s)

    def handoffs(self) -> HandoffStream:
        """Offers, claims and settles in batches. Close it."""
        return HandoffStream(self._channel.open(CoordinatorCalls.HANDOFFS))

    async def status(self) -> CoordinatorStatus:
        """Counts."""
        return await self._channel.call(CoordinatorCalls.STATUS, Nothing(), self._timeout_s)

    async def overview(self) -> Overview:
        """What workers reported to this coordinator, and how its own calls fare."""
        return await self._channel.call(CoordinatorCalls.OVERVIEW, Nothing(), self._timeout_s)


class AgentClient(_Client):
    """Speaks to the WorkerAgent at "host:port". Raises ConfigError for another form of address."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 5.0,
        security: Security | None = None,
        tenant: str | None = None,
    ) -> None:
        """`tenant`: the worker's, where it is not this process's own."""
        advice = "The worker may have died or restarted elsewhere: recompute the request"
        trust = (Security.from_env() if security is None else security).workers(tenant)
        super().__init__(Channel(address, "worker agent", advice, _AGENT_PATIENCE_S, trust), timeout_s)

    async def card(self) -> WorkerCard:
        """Who listens there now."""
        return await self._channel.call(AgentCalls.GET_CARD, Nothing(), self._timeout_s)

    async def card_at_once(self) -> WorkerCard:
        """As `card`, without asking again."""
        return await self._channel.attempt(AgentCalls.GET_CARD, Nothing(), self._timeout_s)

    async def connect(
        self, worker_id: str, epoch: int, transport: str, hellos: list[bytes], timeout_s: float | None = None
    ) -> ConnectReply:
        """Introduces a connection's lanes.

        Raises UnknownRequest when the worker is another one or has restarted, and what its transport raises:
        TransportUnavailable, AccessDenied, ConfigError.
        """
        request = ConnectRequest(worker_id, epoch, transport, hellos, takes_keys=True)
        return await self._channel.call(AgentCalls.CONNECT, request, given_or(timeout_s, self._timeout_s))

    async def settle(self, order: SettleOrder) -> bool:
        """Without the data path. False: the seat had ended already, or the nonce is wrong."""
        return await self._channel.call(AgentCalls.SETTLE_SEAT, order, self._timeout_s)

    async def renew(self, renewal: Renewal) -> list[int]:
        """Asks for time for at most 1,024 seats. Returns the slots whose leases have ended."""
        return await self._channel.call(AgentCalls.RENEW_SEATS, renewal, self._timeout_s)


def _apply(known: dict[str, WorkerCard], change: WorkerChange) -> None:
    if change.what is Joined.UP:
        known[change.card.worker_id] = change.card
    else:
        known.pop(change.card.worker_id, None)


def _difference(known: dict[str, WorkerCard], whole: WorkerChanges) -> WorkerChanges:
    """Turns a fresh list into changes against `known`, and updates that."""
    now = {change.card.worker_id: change.card for change in whole}
    gone = [card for name, card in known.items() if name not in now or now[name].epoch != card.epoch]
    new = [card for name, card in now.items() if known.get(name) != card]
    known.clear()
    known.update(now)
    return [WorkerChange(Joined.DOWN, card) for card in gone] + [
        WorkerChange(Joined.UP, card) for card in new
    ]
