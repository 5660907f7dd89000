# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulated fleet: workers, which own and read tickets, and who watches them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

from control.cards import make_card
from control_simulation.invariants import Ledger
from control_simulation.network import Network
from control_simulation.processes import Process
from control_simulation.serving import SimulatedSecurity

from kvlink.control import CoordinatorClient, Offer, Session, SessionState, WorkerAgent
from kvlink.control.values import Claim, SettleOrder
from kvlink.errors import CoordinatorUnavailable, KVLinkError
from kvlink.types import Joined

TTL_S = 30.0
CLAIM_S = 20.0
_AGENT_PORT = 7500
_processes = itertools.count(1)


def restart_numbers() -> None:
    """Before another run."""
    global _processes
    _processes = itertools.count(1)


class Worker:
    """One process under a worker_id."""

    def __init__(
        self, network: Network, ledger: Ledger, worker_id: str, host: str, coordinators: str
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = next(_processes)
        self.process = Process(f"{worker_id}#{self.incarnation}", host)
        self.session: Session | None = None
        self.settled: set[int] = set()
        self._network = network
        self._ledger = ledger
        self._security = SimulatedSecurity(network=network, process=self.process)
        self._coordinators = coordinators
        self._client: CoordinatorClient
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

    async def _run(self) -> None:
        agent = WorkerAgent(_accept, lambda *_: True, lambda *_: True, security=self._security)
        address = await agent.start(self.process.host, _AGENT_PORT)
        self._client = CoordinatorClient(self._coordinators, security=self._security)
        proposed = int(asyncio.get_running_loop().time() * 1000) + 1
        card = make_card(self.worker_id, proposed, self.incarnation, address)
        while self.session is None:
            try:
                self.session = await Session.join(self._client, card, lambda slot, _: self.settled.add(slot))
            except KVLinkError:
                await asyncio.sleep(random.uniform(0.5, 1.5))
        agent.publish(self.session.card)
        self._ledger.granted(self.worker_id, self.process.name, self.session.card.epoch)

    def offer(self, request_id: str) -> asyncio.Task[Any]:
        assert self.session is not None
        session, card = self.session, self.session.card
        ticket = f"{request_id} of {self.process.name}".encode()
        offer = Offer(request_id, card.worker_id, card.epoch, TTL_S, 0, 1, 1, ticket)

        async def run() -> None:
            with contextlib.suppress(KVLinkError):  # the session goes on trying, or the reader hears of it
                await session.offer(offer)

        return self.process.start(run())

    def forget(self, request_id: str) -> None:
        if self.session is not None:
            self.session.forget(request_id)

    def claim(self, request_id: str, by_stream: bool, ended: Callable[[bool], None]) -> asyncio.Task[Any]:
        """`ended(whether there were tickets)`."""

        async def run() -> None:
            claim_id = random.randbytes(16)
            try:
                if by_stream:
                    tickets = await self._claim_by_stream(request_id, claim_id)
                else:
                    tickets = await self._client.claim(request_id, CLAIM_S)
            except KVLinkError:
                ended(False)
                return
            self._ledger.claimed(request_id, claim_id, tickets)
            ended(True)

        return self.process.start(run())

    async def _claim_by_stream(self, request_id: str, claim_id: bytes) -> list[bytes]:
        """As the client does without a stream: asks again, under the same id."""
        now = asyncio.get_running_loop().time
        deadline = now() + CLAIM_S
        while True:
            left_s = deadline - now()
            asked = self._client.next_address
            try:
                async with self._client.handoffs() as stream:
                    claim = Claim(request_id, max(0.1, min(left_s, 5.0)), claim_id=claim_id)
                    return await asyncio.wait_for(stream.claim(claim), max(0.2, min(left_s, 7.0)))
            except (CoordinatorUnavailable, asyncio.TimeoutError):
                if now() >= deadline:
                    raise CoordinatorUnavailable("in vain") from None
            except KVLinkError:
                if now() >= deadline:
                    raise
            self._client._channel.avoid(asked)  # other calls may have left it already
            await asyncio.sleep(random.uniform(0.05, 0.3))

    def settle(self, owner: Worker, slot: int) -> asyncio.Task[Any]:
        """Through the coordinator."""
        assert owner.session is not None
        order = SettleOrder(owner.worker_id, owner.session.card.epoch, slot, 1000 + slot)

        async def run() -> None:
            with contextlib.suppress(KVLinkError):
                await self._client.settle(order)

        return self.process.start(run())


class Watcher:
    """Follows who is joined; `pause_s` makes it slow."""

    def __init__(
        self, network: Network, name: str, host: str, coordinators: str, pause_s: float = 0.0
    ) -> None:
        self.process = Process(name, host)
        self.known: dict[str, int] = {}
        self._pause_s = pause_s
        self._client_of = lambda: CoordinatorClient(
            coordinators, security=SimulatedSecurity(network=network, process=self.process)
        )
        self.process.start(self._run())

    async def _run(self) -> None:
        async for change in self._client_of().watch():
            if change.what is Joined.UP:
                self.known[change.card.worker_id] = change.card.epoch
            else:
                self.known.pop(change.card.worker_id, None)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)


def _accept(*_: object) -> Any:
    raise AssertionError("no reader connects here")
