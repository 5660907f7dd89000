# SPDX-License-Identifier: Apache-2.0
"""Makes typed calls to a coordinator and to worker agents. Each client belongs to the event loop it is used on.

Every call raises CoordinatorUnavailable when the server cannot be reached within the timeout (5 s by default), and the
exceptions of `kvlink.control.refusal.Reason` when the server refuses the call.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

from kvlink.config.timeouts import given_or
from kvlink.control.codec import AgentCalls, CoordinatorCalls
from kvlink.control.now import now
from kvlink.control.overview import Beat, Overview
from kvlink.control.refusal import Overloaded
from kvlink.control.rpc.channel import Channel
from kvlink.control.rpc.client import Client
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.rpc.stream import Stream
from kvlink.control.security import MEMBER, Security
from kvlink.control.values import (
    Claim,
    ConnectReply,
    ConnectRequest,
    CoordinatorStatus,
    FoundPrefix,
    JoinRequest,
    Membership,
    Nothing,
    Offer,
    PrefixChanges,
    PrefixQuery,
    Push,
    Renewal,
    SettleOrder,
    Watch,
    WorkerChanges,
    WorkerEpoch,
)
from kvlink.errors import CoordinatorUnavailable, UnknownRequest
from kvlink.runtime.backoff import Backoff
from kvlink.types import Joined, WorkerCard, WorkerChange

_MAX_CACHED_CARDS = 4_096
_MAX_GIVEN_UP = 4_096
_AGENT_PATIENCE_S = 0.5
"""A worker that died does not return at its address, so readers should learn of its death soon."""
_CLAIM_TURN_S = 5.0
"""One of several coordinators may hang. A claim that waits longer is sent again under the same claim id."""
_CLAIM_SLACK_S = 2.0
"""The coordinator refuses a claim that timed out. The client waits this much longer for that refusal."""


class CoordinatorClient(Client):
    """Calls the coordinator at "host:port", or any replica of "a:1,b:2". Raises ConfigError for other address forms."""

    def __init__(self, addresses: str, timeout_s: float = 5.0, security: Security | None = None) -> None:
        advice = "Check that `kvlink coordinator` runs there and that this host reaches the port"
        trust = (Security.from_env() if security is None else security).coordinators()
        super().__init__(Channel(addresses, "coordinator", advice, trust=trust), timeout_s)
        self._cards: OrderedDict[tuple[str, int], WorkerCard] = OrderedDict()
        self._given_up: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """Maps (request id, reader) to the claim id of a claim that ended without an answer."""

    def act_as(self, secret: str) -> None:
        """Calls from now on as the process with this secret, whose card has `incarnation_of(secret)`, or as none."""
        self._channel.metadata = ((MEMBER, secret),) if secret else ()

    async def join(
        self, card: WorkerCard, rejoin: bool = False, timeout_s: float | None = None
    ) -> Membership:
        """Publishes a card and proposes its epoch. Returns the granted membership.

        `Session` calls this and keeps the worker joined.
        """
        request = JoinRequest(card, rejoin)
        return await self._channel.call(CoordinatorCalls.JOIN, request, given_or(timeout_s, self._timeout_s))

    def keep_alive(self) -> Stream[Beat, Push]:
        """Opens the stream that carries beats to the coordinator and settle orders back. `Session` uses it."""
        return self._channel.open(CoordinatorCalls.KEEP_ALIVE)

    async def leave(self, worker_id: str, epoch: int, timeout_s: float | None = None) -> None:
        """Removes this epoch of a worker from the coordinator, together with its offers."""
        request = WorkerEpoch(worker_id, epoch)
        await self._channel.call(CoordinatorCalls.LEAVE, request, given_or(timeout_s, self._timeout_s))

    async def worker(self, worker_id: str, epoch: int = 0) -> WorkerCard:
        """Returns the card of a worker, fetched once per epoch and then cached. Epoch 0 means the running one.

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
        """Returns the cards of all joined workers."""
        return await self._channel.call(CoordinatorCalls.LIST_WORKERS, Nothing(), self._timeout_s)

    async def watch(self, worker_ids: Iterable[str] = ()) -> AsyncIterator[WorkerChange]:
        """Yields UP for every joined worker, then each change. Never ends.

        It survives coordinator restarts and readers that fall behind. `worker_ids` limits the watch to at most 1,024
        workers; all workers are watched when it is empty.
        """
        asked = Watch(frozenset(worker_ids))
        known: dict[str, WorkerCard] = {}
        backoff = Backoff()
        while True:
            whole = None
            try:
                async with aclosing(self._channel.receive(CoordinatorCalls.WATCH_WORKERS, asked)) as replies:
                    whole = await anext(replies, None)
                    for change in _difference(known, asked.sees(whole)) if whole is not None else ():
                        yield change
                    async for changes in replies:
                        backoff.reset()
                        # A coordinator of an older release does not filter.
                        for change in asked.sees(changes):
                            _apply(known, change)
                            yield change
            except CoordinatorUnavailable:
                pass
            except Overloaded:
                if whole is None:
                    raise
                # The coordinator ended a watch that fell behind. The next one starts with the whole list.
            await asyncio.sleep(backoff.delay_s())

    async def offer(self, offer: Offer, timeout_s: float | None = None) -> None:
        """Publishes a ticket. `Session.offer` also survives a restart of the coordinator."""
        await self._channel.call(CoordinatorCalls.OFFER, offer, given_or(timeout_s, self._timeout_s))

    async def claim(
        self, request_id: str, timeout_s: float = 30.0, reader: int = 0, num_readers: int = 1
    ) -> list[bytes]:
        """Returns the tickets of all ranks of a request once all ranks have offered. `timeout_s` 0 does not wait.

        A claim that is repeated at another replica, or after a lost reply, returns the same tickets. So does the same
        reader's next claim after one that was cancelled while its tickets were being sent.
        Raises UnknownRequest, or LeaseExpired when the request was offered and not claimed in time.
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
            turn_s = min(left_s, _CLAIM_TURN_S) if self._channel.has_replicas else left_s
            turn_ends = now() + turn_s
            address = self._channel.next_address
            try:
                return await self._channel.attempt(
                    CoordinatorCalls.CLAIM, claim._replace(timeout_s=turn_s), turn_s + _CLAIM_SLACK_S
                )
            except UnknownRequest:
                is_over = turn_s > 0.0 and now() >= turn_ends
                if is_over:
                    self._channel.avoid(address)  # it may have lost its store
                if turn_s == left_s or not is_over:
                    raise
            except CoordinatorUnavailable:
                delay_s = backoff.delay_s()
                if now() + delay_s >= deadline:
                    raise
                await asyncio.sleep(delay_s)

    async def settle(self, order: SettleOrder) -> None:
        """Asks the owner through the coordinator to end a seat, when neither data path nor agent can be reached."""
        await self._channel.call(CoordinatorCalls.SETTLE, order, self._timeout_s)

    def handoffs(self) -> HandoffStream:
        """Opens a stream that sends offers, claims and settles in batches. The caller closes it."""
        return HandoffStream(self._channel.open(CoordinatorCalls.HANDOFFS))

    async def status(self) -> CoordinatorStatus:
        """Returns the counts of the coordinator."""
        return await self._channel.call(CoordinatorCalls.STATUS, Nothing(), self._timeout_s)

    async def overview(self) -> Overview:
        """Returns what workers reported to this coordinator, and statistics of its own calls."""
        return await self._channel.call(CoordinatorCalls.OVERVIEW, Nothing(), self._timeout_s)

    async def publish_prefixes(self, changes: PrefixChanges, timeout_s: float | None = None) -> int:
        """Publishes and withdraws prefixes of a joined worker, and returns the directory's id.

        `PrefixPublisher` calls it, and publishes all again when the id has changed. An older coordinator has no
        directory: this and `find_prefix` raise CoordinatorError that names the missing method.
        """
        timeout_s = given_or(timeout_s, self._timeout_s)
        return await self._channel.call(CoordinatorCalls.PUBLISH_PREFIXES, changes, timeout_s)

    async def find_prefix(self, query: PrefixQuery, timeout_s: float | None = None) -> list[FoundPrefix]:
        """Returns servers that have the longest prefix, best first. Does not retry, because computing is as good."""
        timeout_s = given_or(timeout_s, self._timeout_s)
        return await self._channel.attempt(CoordinatorCalls.FIND_PREFIX, query, timeout_s)


class AgentClient(Client):
    """Calls the WorkerAgent at "host:port". Raises ConfigError for another form of address."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 5.0,
        security: Security | None = None,
        tenant: str | None = None,
    ) -> None:
        """`tenant` is the worker's tenant, where it differs from this process's own."""
        advice = "The worker may have died or restarted elsewhere. Recompute the request"
        trust = (Security.from_env() if security is None else security).workers(tenant)
        super().__init__(Channel(address, "worker agent", advice, _AGENT_PATIENCE_S, trust), timeout_s)

    async def card(self) -> WorkerCard:
        """Returns the card of the worker that listens there now."""
        return await self._channel.call(AgentCalls.GET_CARD, Nothing(), self._timeout_s)

    async def card_at_once(self) -> WorkerCard:
        """Returns the card like `card`, but does not retry."""
        return await self._channel.attempt(AgentCalls.GET_CARD, Nothing(), self._timeout_s)

    async def connect(
        self, worker_id: str, epoch: int, transport: str, hellos: list[bytes], timeout_s: float | None = None
    ) -> ConnectReply:
        """Asks the owner to accept a connection with one hello per lane, and returns its reply.

        Raises UnknownRequest when another worker listens there or the worker has restarted. Also raises what its
        transport raises: TransportUnavailable, AccessDenied, ConfigError.
        """
        request = ConnectRequest(worker_id, epoch, transport, hellos, takes_keys=True)
        return await self._channel.call(AgentCalls.CONNECT, request, given_or(timeout_s, self._timeout_s))

    async def settle(self, order: SettleOrder) -> bool:
        """Ends a seat without the data path. Returns False if the seat had already ended or the nonce is wrong."""
        return await self._channel.call(AgentCalls.SETTLE_SEAT, order, self._timeout_s)

    async def renew(self, renewal: Renewal) -> list[int]:
        """Extends the leases of at most 1,024 seats. Returns the slots whose leases have ended."""
        return await self._channel.call(AgentCalls.RENEW_SEATS, renewal, self._timeout_s)

    async def drain(self, worker: WorkerEpoch) -> int:
        """Lets the worker show that it drains. Returns how many of its offers still pin blocks."""
        return await self._channel.call(AgentCalls.DRAIN, worker, self._timeout_s)


def _apply(known: dict[str, WorkerCard], change: WorkerChange) -> None:
    if change.what is Joined.UP:
        known[change.card.worker_id] = change.card
    else:
        known.pop(change.card.worker_id, None)


def _difference(known: dict[str, WorkerCard], whole: WorkerChanges) -> WorkerChanges:
    """Turns a fresh list into changes against `known`, and updates `known`."""
    now = {change.card.worker_id: change.card for change in whole}
    gone = [card for name, card in known.items() if name not in now or now[name].epoch != card.epoch]
    new = [card for name, card in now.items() if known.get(name) != card]
    known.clear()
    known.update(now)
    return [WorkerChange(Joined.DOWN, card) for card in gone] + [
        WorkerChange(Joined.UP, card) for card in new
    ]
