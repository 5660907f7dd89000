# SPDX-License-Identifier: Apache-2.0
"""Connects a worker to the control plane: its agent, its session, and the requests that it publishes and claims."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from kvlink import tracing
from kvlink.config import WorkerConfig, parse_channel
from kvlink.config.addresses import numeric
from kvlink.control import CoordinatorClient, Offer, Security, Session, SessionState, WorkerAgent
from kvlink.control.codec import CARD
from kvlink.control.overview import WorkerReport
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.security import incarnation_of
from kvlink.control.values import FoundPrefix, Prefix, PrefixQuery, WorkerEpoch
from kvlink.errors import ConfigError, KVLinkError
from kvlink.hardware.host_identity import this_host
from kvlink.runtime.background import off_loop
from kvlink.runtime.durations import Durations
from kvlink.runtime.supervised import start_job, start_loop
from kvlink.ticket import Ticket
from kvlink.transfer.engine import Engine
from kvlink.transfer.path_log import log_start
from kvlink.types import NativeChannel, WorkerCard
from kvlink.worker.directory import ControlDirectory
from kvlink.worker.port_events import PortLog
from kvlink.worker.reachability import advertised_host, loopback_problem

_log = logging.getLogger("kvlink.worker")
_TELL_S = 1.0

OwnEngine = Callable[[], Engine]
"""Returns the engine that runs now."""


class WorkerMembership:
    """Created and used on the control loop, which owns all gRPC objects. Without a coordinator only the agent runs."""

    def __init__(self, config: WorkerConfig, engine: OwnEngine) -> None:
        self._config = config
        self._engine = engine
        self._settle_local = lambda slot, nonce: engine().core.settle_local(slot, nonce)
        self._security = security = Security.of(config)
        at = config.coordinator
        self._client = CoordinatorClient(at, security=security) if at else None
        self.secret = ""
        """Proves to coordinators that a call comes from this worker, after `join`."""
        self._agent = WorkerAgent(
            lambda *request: engine().accept(*request),
            settle=self._settle_local,
            renew=lambda slot, nonce: engine().core.renew(slot, nonce),
            security=security,
            drain=self._asked_to_drain,
        )
        self._card: WorkerCard | None = None
        self._telling: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._ports: PortLog | None = None
        self.directory = ControlDirectory(
            self._client, security, lambda to, timeout_s: engine().channel.dial(to, timeout_s)
        )
        self.claims = Durations()
        """The durations of claims that returned tickets, including the time that they waited."""
        self._publishing: list[tuple[CoordinatorClient, PrefixPublisher, asyncio.Task[None]]] = []
        """For each coordinator: each has a directory of its own."""
        self.prefix_lookups = Counter[str]()
        """Counts lookups in the directory of prefixes by outcome: "found", "none" or "failed"."""
        self.report: Callable[[], WorkerReport | None] = lambda: None
        """Returns the report that each beat sends to the coordinator."""

    @classmethod
    async def of(cls, config: WorkerConfig, engine: OwnEngine) -> WorkerMembership:
        """Returns a membership that `open` starts. `leave` ends it, whether or not `open` has succeeded."""
        reason, fix = loopback_problem(config)
        if reason:
            _log.warning("%s; %s", reason, fix)
        return cls(config, engine)

    async def open(self) -> None:
        """Starts the agent, which admits no peer before `join`. Raises ConfigError if its port is not available."""
        config = self._config
        await self._agent.start(config.host, config.agent_port, advertised_host(config))

    @property
    def has_coordinator(self) -> bool:
        """Whether tickets can be published and claimed."""
        return self._client is not None

    def require_coordinator(self, what: str) -> None:
        """Raises ConfigError, which names `what`, if there is no coordinator."""
        if not self.has_coordinator:
            raise ConfigError(f"{what} needs a coordinator: pass coordinator= or set KVLINK_COORDINATOR")

    @property
    def joined(self) -> bool | None:
        """Whether the coordinator knows this worker. None without a coordinator."""
        return None if self._session is None else self._session.state is SessionState.JOINED

    @property
    def num_rejoins(self) -> int:
        """How often the connection to the coordinator was lost and restored."""
        return 0 if self._session is None else self._session.num_rejoins

    async def join(self, worker_id: str, engine: Engine) -> WorkerCard:
        """Publishes and returns the worker's card with the granted epoch. Raises CoordinatorUnavailable."""
        await self._leave_session()
        self.secret = secrets.token_urlsafe(16)
        card = WorkerCard(
            worker_id=worker_id,
            epoch=engine.epoch,
            incarnation=incarnation_of(self.secret),
            agent=self._agent.address,
            host=this_host(),
            layouts=engine.pool.groups,
            region_bytes=tuple(region.num_bytes for region in engine.pool.regions),
            transports=engine.cards(),
            channel=await off_loop(self._channel, engine),  # it may ask a name server
        )
        if self._client is not None:
            self._client.act_as(self.secret)
            self._session = await Session.join(
                self._client, card, self._settle_local, report=lambda: self.report()
            )
            card = self._session.card
        self._card = card
        self._agent.publish(card)
        if card.channel is not None:
            engine.channel.publish(CARD.encode(card))
        log_start(worker_id, card.agent, card.transports)
        self._leave_ports()
        self._ports = PortLog(engine, worker_id)
        return card

    def _channel(self, engine: Engine) -> NativeChannel | None:
        """Listens for readers without gRPC, if that is configured. Raises ConfigError."""
        config = self._config
        port = parse_channel(config.channel)
        if port is None:
            return None
        if self._security.keyring is not None:
            raise ConfigError(
                "KVLINK_CHANNEL: the native channel has no TLS; unset it, or the KVLINK_TLS_ files"
            )
        host = advertised_host(config)
        self._security.allow_plaintext(host, f"KVLINK_CHANNEL={config.channel}: the native channel at {host}")
        advertise = numeric(config.advertise, "KVLINK_ADVERTISE", config.host) if config.advertise else ""
        return engine.channel.listen(engine.core, config.host, port, advertise)

    @property
    def draining(self) -> bool:
        """Whether this worker shows that it ends soon."""
        return self._card is not None and self._card.draining

    def begin_drain(self) -> None:
        """Shows in the card, at the agent and the coordinator, that this worker ends soon. Idempotent."""
        if self._card is None or self._card.draining:
            return
        self._card = replace(self._card, draining=True)
        self._agent.publish(self._card)
        if self._card.channel is not None:
            self._engine().channel.publish(CARD.encode(self._card))
        if self._session is not None:
            self._session.card = self._card  # a rejoin publishes it too
            self._telling = start_job("drain notice", self._tell(self._card))

    def _asked_to_drain(self) -> int:
        self.begin_drain()
        return self._engine().lease_counts().active

    async def _tell(self, card: WorkerCard) -> None:
        assert self._client is not None
        try:
            await self._client.join(card, rejoin=True, timeout_s=_TELL_S)
        except KVLinkError as error:
            _log.warning("cannot tell the coordinator that worker=%s drains error=%s", card.worker_id, error)

    async def leave(self) -> None:
        """Leaves the session and closes agent, directory and client, each although another one fails. Idempotent."""
        async with AsyncExitStack() as closing:  # in the reverse order
            if self._client is not None:
                closing.push_async_callback(self._client.close)
            closing.push_async_callback(self.directory.close)
            closing.push_async_callback(self._agent.close)
            closing.push_async_callback(self._leave_session)
            if self._telling is not None:  # the coordinator would keep a worker that joins after it has left
                closing.push_async_callback(asyncio.wait, [self._telling])
            closing.callback(self._leave_ports)
            for client, _, task in self._publishing:
                closing.push_async_callback(client.close)
                closing.callback(task.cancel)

    async def publish(self, ticket: Ticket) -> None:
        """Sends a ticket to the coordinator and keeps it there until `forget`. Raises CoordinatorError."""
        if self._session is None:
            return
        offer = Offer(
            request_id=ticket.request_id,
            worker_id=ticket.worker_id,
            epoch=ticket.epoch,
            ttl_s=ticket.ttl_s,
            rank=ticket.rank,
            num_ranks=ticket.num_ranks,
            num_seats=len(ticket.seats),
            ticket=ticket.to_bytes(),
        )
        with tracing.joined(ticket.trace):
            await self._session.offer(offer)

    def forget(self, request_id: str) -> None:
        """Removes an ended offer, so that it is not published again after the coordinator restarts."""
        if self._session is not None:
            self._session.forget(request_id)

    async def claim(
        self, request_id: str, timeout_s: float, reader: int, num_readers: int
    ) -> Sequence[Ticket]:
        """Claims a request and waits at most `timeout_s` seconds for the tickets of all ranks.

        Raises UnknownRequest, LeaseExpired, CoordinatorUnavailable.
        """
        if self._client is None:
            return []
        began = time.perf_counter_ns()
        blobs = await self._client.claim(request_id, timeout_s, reader, num_readers)
        self.claims.add(time.perf_counter_ns() - began)
        return [Ticket.from_bytes(blob) for blob in blobs]

    @property
    def num_prefixes(self) -> int:
        """How many prefixes this worker publishes."""
        return max((len(publisher) for _, publisher, _ in self._publishing), default=0)

    def publish_prefix(self, prefix: Prefix, is_live: Callable[[], bool]) -> None:
        """Keeps a prefix in the directories of all coordinators while `is_live` returns True."""
        session = self._session
        if session is None or self._client is None:
            return
        if not self._publishing:
            for address in self._client.address.split(","):
                client = CoordinatorClient(address, security=self._security)
                client.act_as(self.secret)
                publisher = PrefixPublisher(
                    client, lambda: WorkerEpoch(session.card.worker_id, session.card.epoch)
                )
                task = start_loop("prefix publisher", publisher.run)
                self._publishing.append((client, publisher, task))
        for _, publisher, _ in self._publishing:
            publisher.publish(prefix, is_live)

    def withdraw_prefix(self, request_id: str) -> None:
        """Withdraws a prefix from the directories."""
        for _, publisher, _ in self._publishing:
            publisher.withdraw(request_id)

    async def find_prefix(self, query: PrefixQuery, timeout_s: float) -> list[FoundPrefix]:
        """Returns servers that have the longest prefix. Raises CoordinatorError."""
        if self._client is None:
            return []
        outcome = "failed"
        try:
            found = await self._client.find_prefix(query, timeout_s)
            outcome = "found" if found else "none"
        finally:
            self.prefix_lookups[outcome] += 1
        return found

    def _leave_ports(self) -> None:
        if self._ports is not None:
            self._ports.close()
            self._ports = None

    async def _leave_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
