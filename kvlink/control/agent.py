# SPDX-License-Identifier: Apache-2.0
"""Serves a worker's peers: its card, new connections, and settles of readers whose data path failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvlink.config.addresses import joined, split_address
from kvlink.control.client import AgentClient
from kvlink.control.codec import AgentCalls as Calls
from kvlink.control.limits import MAX_CONNECTS, MAX_CONNECTS_OF_ONE
from kvlink.control.now import now
from kvlink.control.refusal import Reason, RefusedError, named
from kvlink.control.rpc.peer_address import caller_number
from kvlink.control.rpc.server import GrpcServer
from kvlink.control.security import Security, agent_gate
from kvlink.control.values import ConnectReply, ConnectRequest, Nothing, Renewal, SettleOrder, WorkerEpoch
from kvlink.errors import Cancelled
from kvlink.runtime.background import off_loop
from kvlink.runtime.forks import check_grpc
from kvlink.runtime.supervised import start_job
from kvlink.types import WorkerCard

Accepted = tuple[int, list[bytes]] | tuple[int, list[bytes], Sequence[bytes], Sequence[bytes]]
Accept = Callable[[str, list[bytes], bool, int], Accepted]
"""Maps (transport, hellos, takes keys, caller) to (connection id, replies[, pool keys, lease keys]).

The keys are returned only where they differ from the card's. Runs on its own thread, may block, and may raise
KVLinkError."""
OnSeat = Callable[[int, int], bool]
"""Maps (slot, settle nonce) to whether there is such a seat. Runs on the event loop and must not block."""
OnDrain = Callable[[], int]
"""Lets the worker drain, and returns how many offers are left. Runs on the event loop and must not block."""


class WorkerAgent:
    """Listens after `start`, and refuses callers until `publish`. Belongs to the event loop that starts it."""

    def __init__(
        self,
        accept: Accept,
        settle: OnSeat,
        renew: OnSeat,
        reflect: bool = False,
        security: Security | None = None,
        drain: OnDrain = lambda: 0,
    ) -> None:
        """Under TLS, it answers only workers of its own tenant. Raises ConfigError if its certificate names none."""
        self._accept = accept
        self._settle = settle
        self._renew = renew
        self._on_drain = drain
        self._card: WorkerCard | None = None
        self._connecting: Counter[int] = Counter()
        security = Security.from_env() if security is None else security
        self._server = GrpcServer("worker agent", reflect, security, agent_gate(security.tenant()))
        self._server.unary(Calls.GET_CARD, self._get_card)
        self._server.unary(Calls.CONNECT, self._connect)
        self._server.unary(Calls.SETTLE_SEAT, self._settle_seat)
        self._server.unary(Calls.RENEW_SEATS, self._renew_seats)
        self._server.unary(Calls.DRAIN, self._drain)
        self.address = ""

    def __repr__(self) -> str:
        who = f"{self._card.worker_id!r} epoch {self._card.epoch}" if self._card else "no card yet"
        return f"WorkerAgent({self.address or 'not started'}, {who})"

    async def start(self, host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> str:
        """Listens and returns the "host:port" that peers connect to, with the host `advertise` if that is given.

        Port 0 picks a free port. Raises ConfigError when it cannot listen on the port.
        """
        self.address = await self._server.start(host, port)
        if advertise:
            self.address = joined(advertise, split_address(self.address)[1])
        return self.address

    def publish(self, card: WorkerCard) -> None:
        """Sets the card of this worker and starts to answer callers."""
        self._card = card

    async def close(self) -> None:
        """Stops listening. Closing again has no effect."""
        self._card = None
        await self._server.stop(0.2)

    def _published(self) -> WorkerCard:
        if self._card is None:
            raise RefusedError(
                Reason.NOT_READY, f"the worker at {self.address} is starting or closing; retry"
            )
        return self._card

    def _check_me(self, worker_id: str, epoch: int) -> None:
        card = self._published()
        if card.worker_id != worker_id:
            raise RefusedError(
                Reason.RESTARTED,
                f"the agent at {self.address} belongs to worker {named(card.worker_id)}, but the call is for "
                f"{named(worker_id)}: the address was reused. Fetch the card of the worker again",
            )
        if card.epoch != epoch:
            raise RefusedError(
                Reason.RESTARTED,
                f"worker {named(worker_id)} restarted: the call is for epoch {epoch}, and {card.epoch} is running",
            )

    async def _get_card(self, _: Nothing) -> WorkerCard:
        return self._published()

    async def _connect(self, request: ConnectRequest) -> ConnectReply:
        self._check_me(request.worker_id, request.epoch)
        caller = caller_number()
        if self._connecting[caller] >= MAX_CONNECTS_OF_ONE or self._connecting.total() >= MAX_CONNECTS:
            raise RefusedError(
                Reason.TOO_MANY,
                f"the worker at {self.address} is already admitting {self._connecting.total()} readers, "
                f"{self._connecting[caller]} of them for this caller; retry in a moment",
            )
        try:
            accepting = off_loop(self._accept, request.transport, request.hellos, request.takes_keys, caller)
        except Cancelled:
            raise RefusedError(
                Reason.NOT_READY, f"the process of the worker at {self.address} is ending"
            ) from None
        self._connecting[caller] += 1
        try:
            return ConnectReply(*await accepting)
        finally:
            self._connecting[caller] -= 1
            self._connecting += Counter()  # drops callers without a connection in progress

    async def _settle_seat(self, order: SettleOrder) -> bool:
        self._check_me(order.worker_id, order.epoch)
        return self._settle(order.slot, order.settle_nonce)

    async def _renew_seats(self, renewal: Renewal) -> list[int]:
        self._check_me(renewal.worker_id, renewal.epoch)
        return [slot for slot, nonce in renewal.seats if not self._renew(slot, nonce)]

    async def _drain(self, worker: WorkerEpoch) -> int:
        self._check_me(worker.worker_id, worker.epoch)
        return self._on_drain()


_UNUSED_S = 300.0  # far longer than any call, so no call runs on a client that is closed as unused


class AgentClients:
    """Maps "host:port" to a client, and closes clients that were not used for five minutes.

    Workers come and go, each at another port. An instance belongs to the event loop that it is used on, and may be
    created on any thread. Raises ConfigError in a forked child of a process in which kvlink ran.
    """

    def __init__(self, security: Security | None = None, clock: Callable[[], float] = now) -> None:
        check_grpc()
        self._security = security
        self._clock = clock
        self._kept: dict[str, tuple[AgentClient, float]] = {}
        """Clients and the times of their last use, in the order of these times."""
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, address: str) -> AgentClient:
        """Returns the client to use for the next call only. Raises ConfigError for another form of address."""
        now = self._clock()
        client, _ = self._kept.pop(address, (None, 0.0))
        client = client or AgentClient(address, security=self._security)
        self._kept[address] = client, now
        self._close_unused(now)
        return client

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        while self._kept:
            await self._kept.popitem()[1][0].close()
        await asyncio.gather(*self._closing)

    def _close_unused(self, now: float) -> None:
        while self._kept:
            address, (client, asked_for) = next(iter(self._kept.items()))
            if asked_for >= now - _UNUSED_S:
                return
            del self._kept[address]
            closing = start_job("unused client", client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
