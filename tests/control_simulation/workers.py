# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulated fleet: workers, which own and read tickets, and who watches them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from control.cards import make_card
from control_simulation.invariants import Asked, Ledger
from control_simulation.network import Network
from control_simulation.processes import Process, true_time
from control_simulation.serving import SimulatedSecurity

from kvlink.control import AgentClient, CoordinatorClient, Offer, Session, SessionState, WorkerAgent
from kvlink.control.now import now
from kvlink.control.overview import Beat
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.security import incarnation_of
from kvlink.control.values import (
    Claim,
    Prefix,
    PrefixChanges,
    PrefixQuery,
    PushKind,
    Renewal,
    SettleOrder,
    WorkerEpoch,
)
from kvlink.errors import CoordinatorError, CoordinatorUnavailable, KVLinkError
from kvlink.types import Joined

TTL_S = 30.0
CLAIM_S = 20.0
_AGENT_PORT = 7500
_SCOPE, _TOKENS = bytes(16), 16
_EVERY_KEY = b"common00"
"""All prefixes begin with it."""
_SLACK_S = 0.01
_processes = itertools.count(1)


def restart_numbers() -> None:
    """Before another run."""
    global _processes
    _processes = itertools.count(1)


class _Client(CoordinatorClient):
    """Checks that no offer is sent with more time than it has left."""

    def __init__(self, coordinators: str, security: SimulatedSecurity, ledger: Ledger) -> None:
        super().__init__(coordinators, security=security)
        self._ledger = ledger
        self.ends: dict[bytes, float] = {}
        """Maps tickets to when they end, by the clock of this process."""

    async def offer(self, offer: Offer, timeout_s: float | None = None) -> None:
        if offer.ticket in self.ends:
            self._check(offer)
        await super().offer(offer, timeout_s)

    def handoffs(self) -> HandoffStream:
        stream = super().handoffs()
        plain = stream.offer

        def checked(offer: Offer) -> asyncio.Future[None]:
            self._check(offer)
            return plain(offer)

        stream.offer = checked  # type: ignore[method-assign]
        return stream

    def _check(self, offer: Offer) -> None:
        over_s = offer.ttl_s - (self.ends[offer.ticket] - now())
        if over_s > _SLACK_S:
            self._ledger.violated(f"{offer} is sent with {over_s:.1f} s more than it has left")


class Worker:
    """One process under a worker_id. `agent` is the address in its card, if that is not its own."""

    def __init__(
        self,
        network: Network,
        ledger: Ledger,
        worker_id: str,
        host: str,
        coordinators: str,
        agent: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = next(_processes)
        self.process = Process(f"{worker_id}#{self.incarnation}", host)
        self.session: Session | None = None
        self.settled: set[int] = set()
        self.renewed: set[int] = set()
        self.began = true_time()
        self.prefix_since = float("inf")
        self._network = network
        self._ledger = ledger
        self._security = SimulatedSecurity(network=network, process=self.process)
        self._coordinators = coordinators
        self._advertised = agent
        self.client: _Client
        self.process.start(self._run())

    def __repr__(self) -> str:
        return f"{self.process!r} {self.session!r}"

    @property
    def is_joined(self) -> bool:
        return self.session is not None and self.session.state is SessionState.JOINED

    @property
    def num_rejoins(self) -> int:
        return 0 if self.session is None else self.session.num_rejoins

    @property
    def is_replaced(self) -> bool:
        return self.session is not None and self.session.state is SessionState.REPLACED

    @property
    def epoch(self) -> int:
        assert self.session is not None
        return self.session.card.epoch

    async def _run(self) -> None:
        secret = f"secret of {self.process.name}"
        self._agent = WorkerAgent(
            lambda *_: (7, [b"reply"]),
            self._note_settled,
            self._note_renewed,
            security=self._security,
            drain=self._drain,
        )
        self.address = await self._agent.start(self.process.host, _AGENT_PORT)
        self.client = _Client(self._coordinators, self._security, self._ledger)
        self.client.act_as(secret)
        # Hosts do not agree on the date.
        proposed = 10_000_000 + int(true_time() * 1000) + random.choice((0, 0, 9_000_000, -9_000_000))
        card = make_card(self.worker_id, proposed, self.incarnation, self._advertised or self.address)
        card = replace(card, incarnation=incarnation_of(secret))
        while self.session is None:
            era = self._ledger.era
            try:
                self.session = await Session.join(self.client, card, self._note_settled)
            except KVLinkError:
                await asyncio.sleep(random.uniform(0.5, 1.5))
        self._agent.publish(self.session.card)
        self._ledger.granted(self.worker_id, self.process.name, self.epoch, era)
        self._publisher = PrefixPublisher(self.client, lambda: WorkerEpoch(self.worker_id, self.epoch))
        self._publishing = asyncio.get_running_loop().create_task(self._publisher.run())
        self.publish()

    def _note_settled(self, slot: int, nonce: int) -> bool:
        if self._ledger.settles.get(slot) != self.process.name or nonce != 1000 + slot:
            self._ledger.violated(
                f"{self.process} is told to settle {slot} of {self._ledger.settles.get(slot)}"
            )
        self.settled.add(slot)
        return True

    def _note_renewed(self, slot: int, nonce: int) -> bool:
        self.renewed.add(slot)
        return nonce == 1000 + slot

    def _drain(self) -> int:
        """As kvlink.worker.membership does."""
        assert self.session is not None
        card = self.session.card = replace(self.session.card, draining=True)
        self._agent.publish(card)
        self._try(self.client.join(card, rejoin=True))
        return 0

    def _try(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[bool]:
        """Runs `work` in this process. Returns whether it was not refused."""

        async def run() -> bool:
            try:
                await work
            except KVLinkError:
                return False
            return True

        return self.process.start(run())

    # Tickets.

    def offer(self, request_id: str, rank: int = 0, num_ranks: int = 1, seats: int = 1, ttl_s: float = TTL_S,
              version: int = 0) -> asyncio.Task[bool]:  # fmt: skip
        """Returns whether the store has the ticket. The session goes on trying otherwise."""
        assert self.session is not None
        session, card = self.session, self.session.card
        ticket = f"{request_id} rank {rank} version {version} of {self.process.name}".encode()
        offer = Offer(request_id, card.worker_id, card.epoch, ttl_s, rank, num_ranks, seats, ticket)
        self._ledger.offered(request_id, rank, ticket, ttl_s)

        async def publish() -> None:
            self.client.ends[ticket] = now() + ttl_s
            await session.offer(offer)
            self._ledger.acked(request_id, rank, ticket)

        return self._try(publish())

    def forget(self, request_id: str) -> None:
        if self.session is not None:
            self.session.forget(request_id)

    def claim(
        self,
        request_id: str,
        by_stream: bool,
        ended: Callable[[bool], None],
        reader: int = 0,
        readers: int = 1,
        timeout_s: float = CLAIM_S,
    ) -> asyncio.Task[Asked | None]:
        """`ended(whether there were tickets)`. Returns the claim that got them."""

        async def run() -> Asked | None:
            asked = self._ledger.asks(request_id, random.randbytes(16), reader)
            well = await self.ask(asked, by_stream, readers, timeout_s)
            ended(well)
            return asked if well else None

        return self.process.start(run())

    async def ask(self, asked: Asked, by_stream: bool, readers: int = 1, timeout_s: float = CLAIM_S) -> bool:
        """Claims, or claims again. Returns whether there were tickets. Belongs into this process."""
        claim = Claim(asked.request_id, timeout_s, asked.reader, readers, asked.claim_id)
        try:
            tickets = await (self._claim_by_stream(claim) if by_stream else self.client._claim(claim))
        except KVLinkError:
            return False
        self._ledger.claimed(asked, tickets)
        return True

    async def _claim_by_stream(self, claim: Claim) -> list[bytes]:
        """As the client does without a stream: asks again, under the same id."""
        deadline = now() + claim.timeout_s
        while True:
            left_s = deadline - now()
            asked = self.client.next_address
            try:
                async with self.client.handoffs() as stream:
                    again = claim._replace(timeout_s=max(0.1, min(left_s, 5.0)))
                    return await asyncio.wait_for(stream.claim(again), max(0.2, min(left_s, 7.0)))
            except (CoordinatorUnavailable, asyncio.TimeoutError):
                if now() >= deadline:
                    raise CoordinatorUnavailable("in vain") from None
            except KVLinkError:
                if now() >= deadline:
                    raise
            self.client._channel.avoid(asked)  # other calls may have left it already
            await asyncio.sleep(random.uniform(0.05, 0.3))

    def claim_and_cancel(
        self, request_id: str, after_s: float, by_stream: bool, ended: Callable[[bool], None]
    ) -> None:
        """Gives up after `after_s`, and claims again: under the same id, or in a stream, which has withdrawn it."""

        async def run() -> None:
            asked = self._ledger.asks(request_id, random.randbytes(16))
            trying = self._cancel_in_stream(asked, after_s) if by_stream else self.ask(asked, by_stream)
            well = False
            with contextlib.suppress(KVLinkError, asyncio.TimeoutError):
                well = await (trying if by_stream else asyncio.wait_for(trying, after_s))
            if not well:
                self._ledger.done["claim cancelled"] += 1
                again = self._ledger.asks(request_id, random.randbytes(16) if by_stream else asked.claim_id)
                well = await self.ask(again, by_stream)
            ended(well)

        self.process.start(run())

    async def _cancel_in_stream(self, asked: Asked, after_s: float) -> bool:
        async with self.client.handoffs() as stream:
            answer = stream.claim(Claim(asked.request_id, CLAIM_S, claim_id=asked.claim_id))
            done, _ = await asyncio.wait([answer], timeout=after_s)
            if done:
                self._ledger.claimed(asked, answer.result())
                return True
            answer.cancel()
            await asyncio.sleep(0.5)  # the withdrawal is sent
            return False

    def claim_and_withdraw(
        self, request_id: str, meanwhile: Callable[[], Awaitable[object]], ended: Callable[[bool], None]
    ) -> None:
        """Takes the tickets, and withdraws the claim later, when somebody else may have those of the request."""

        async def run() -> None:
            asked = self._ledger.asks(request_id, random.randbytes(16))
            try:
                async with self.client.handoffs() as stream:
                    claim = Claim(request_id, 5.0, claim_id=asked.claim_id)
                    self._ledger.claimed(asked, await stream.claim(claim))
                    await meanwhile()
                    self._ledger.released(asked)
                    stream._batch(None).add_withdrawn(0)
                    stream._work.set()
                    await asyncio.sleep(0.5)
                    self._ledger.done["claim withdrawn late"] += 1
                    ended(True)
            except KVLinkError:
                ended(False)

        self.process.start(run())

    # Seats.

    def settle(self, owner: Worker, slot: int, by_stream: bool = False) -> asyncio.Task[bool]:
        """Through the coordinator. Returns whether that accepted the order."""
        order = SettleOrder(owner.worker_id, owner.epoch, slot, 1000 + slot)
        self._ledger.settles[slot] = owner.process.name

        async def send() -> None:
            if not by_stream:
                await self.client.settle(order)
                return
            async with self.client.handoffs() as stream:
                await stream.settle(order)

        return self._try(send())

    def visit(self, owner: Worker, slot: int) -> asyncio.Task[bool]:
        """Calls each method of the owner's agent. Returns whether all were answered."""

        async def call() -> None:
            self._ledger.settles[slot] = owner.process.name
            name = owner.worker_id, owner.epoch
            async with AgentClient(owner.address, security=self._security) as agent:
                card = await agent.card()
                if (card.worker_id, card.epoch) != name or not await agent.settle(
                    SettleOrder(*name, slot, 1000 + slot)
                ):
                    raise CoordinatorError("another one")
                unknown = await agent.renew(Renewal(*name, [(slot, 1000 + slot), (slot, 1)]))
                reply = await agent.connect(*name, "tcp", [b"hello"])
                if unknown != [slot] or reply.connection_id != 7:
                    raise CoordinatorError("wrong answers")

        return self._try(call())

    def let_drain(self, owner: Worker) -> asyncio.Task[bool]:
        async def call() -> None:
            async with AgentClient(owner.address, security=self._security) as agent:
                await agent.drain(WorkerEpoch(owner.worker_id, owner.epoch))

        return self._try(call())

    # Prefixes.

    @property
    def keys(self) -> bytes:
        """Those that this process has."""
        return _EVERY_KEY + f"{self.incarnation:08d}".encode() * 2

    def publish(self) -> None:
        """Publishes what this process has, or again."""
        prefix = Prefix("prefix", 60.0, 0, 1, _SCOPE, _TOKENS, self.keys, self.process.name.encode())
        self.prefix_since = true_time()
        self._publisher.publish(prefix, lambda: True)

    def withdraw(self) -> None:
        self.prefix_since = float("inf")
        self._publisher.withdraw("prefix")

    def find(self, owner: Worker) -> asyncio.Task[list[bytes] | None]:
        """Returns the tickets of whoever has the longest prefix of the owner's keys, or None without an answer."""

        async def run() -> list[bytes] | None:
            query = PrefixQuery(_SCOPE, _TOKENS, owner.keys + b"further0", 1)
            try:
                found = await self.client.find_prefix(query)
            except KVLinkError:
                return None
            return [ticket for each in found for ticket in each.tickets]

        return self.process.start(run())

    def pretend(self, victim: Worker, number: int) -> None:
        """Does in the name of another worker what only that one may do."""
        assert victim.session is not None
        name, card = (victim.worker_id, victim.epoch), victim.session.card
        stolen = Prefix("prefix", 60.0, 0, 1, _SCOPE, _TOKENS, victim.keys, b"stolen")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: self.client.leave(*name),
            lambda: self.client.join(replace(card, agent="10.9.9.9:9"), rejoin=True),
            lambda: self.client.offer(Offer("stolen", *name, TTL_S, 0, 1, 1, b"stolen")),
            lambda: self.client.publish_prefixes(PrefixChanges(*name, (stolen,))),
            lambda: self.client.publish_prefixes(PrefixChanges(*name, (), ("prefix",))),
            partial(self._beat_as, *name),
        ]

        async def run() -> None:
            runs_before = victim.process.runs and victim.is_joined
            try:
                await calls[number % len(calls)]()
            except CoordinatorUnavailable:
                return
            except KVLinkError:
                self._ledger.done["denied"] += 1
                return
            if runs_before:
                self._ledger.violated(
                    f"{self.process} may act as {victim.process}: call {number % len(calls)}"
                )

        self.process.start(run())

    async def _beat_as(self, worker_id: str, epoch: int) -> None:
        stream = self.client.keep_alive()
        try:
            await stream.send(Beat(worker_id, epoch))
            push = await asyncio.wait_for(stream.receive(), 2.0)
            if push is not None and push.kind is PushKind.REJOIN:
                raise CoordinatorUnavailable("it does not know the victim")
        except asyncio.TimeoutError:
            raise CoordinatorUnavailable("no answer") from None
        finally:
            stream.cancel()


class Watcher:
    """Follows who is joined; `pause_s` makes it slow."""

    def __init__(
        self, network: Network, name: str, host: str, coordinators: str, pause_s: float = 0.0
    ) -> None:
        self.process = Process(name, host)
        self.known: dict[str, tuple[int, bool]] = {}
        """Maps each worker_id to its epoch, and whether it drains."""
        self._pause_s = pause_s
        self._client_of = lambda: CoordinatorClient(
            coordinators, security=SimulatedSecurity(network=network, process=self.process)
        )
        self.process.start(self._run())

    async def _run(self) -> None:
        async for change in self._client_of().watch():
            if change.what is Joined.UP:
                self.known[change.card.worker_id] = (change.card.epoch, change.card.draining)
            else:
                self.known.pop(change.card.worker_id, None)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
