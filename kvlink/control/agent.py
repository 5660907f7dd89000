# SPDX-License-Identifier: Apache-2.0
"""What a worker answers to its peers: its card, new connections, and settles whose data path is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvlink.addresses import joined, split_address
from kvlink.background import off_loop
from kvlink.control.codec import AgentCalls as Calls
from kvlink.control.limits import MAX_CONNECTS, MAX_CONNECTS_OF_ONE
from kvlink.control.refusal import Reason, Refused, named
from kvlink.control.rpc.peer_address import caller_number
from kvlink.control.rpc.server import Host
from kvlink.control.security import Security, agent_gate
from kvlink.control.values import ConnectReply, ConnectRequest, Nothing, Renewal, SettleOrder
from kvlink.errors import Cancelled
from kvlink.types import WorkerCard

Accepted = tuple[int, list[bytes]] | tuple[int, list[bytes], Sequence[bytes], Sequence[bytes]]
Accept = Callable[[str, list[bytes], bool, int], Accepted]
"""(transport, hellos, takes keys, caller) -> (connection id, replies) and where they are not the card's, the keys.

On its own thread: may block, may raise KVLinkError."""
OnSeat = Callable[[int, int], bool]
"""(slot, settle nonce) -> whether there is such a seat. Called on the event loop: must not block."""


class WorkerAgent:
    """Listens from `start` on; refuses callers until `publish`. Belongs to the event loop that starts it."""

    def __init__(
        self,
        accept: Accept,
        settle: OnSeat,
        renew: OnSeat,
        reflect: bool = False,
        security: Security | None = None,
    ) -> None:
        """Under TLS it answers only workers of its own tenant. Raises ConfigError when its certificate names none."""
        self._accept = accept
        self._settle = settle
        self._renew = renew
        self._card: WorkerCard | None = None
        self._connecting: Counter[int] = Counter()
        security = Security.from_env() if security is None else security
        self._host = Host("worker agent", reflect, security, agent_gate(security.tenant()))
        self._host.unary(Calls.GET_CARD, self._get_card)
        self._host.unary(Calls.CONNECT, self._connect)
        self._host.unary(Calls.SETTLE_SEAT, self._settle_seat)
        self._host.unary(Calls.RENEW_SEATS, self._renew_seats)
        self.address = ""

    def __repr__(self) -> str:
        who = f"{self._card.worker_id!r} epoch {self._card.epoch}" if self._card else "no card yet"
        return f"WorkerAgent({self.address or 'not started'}, {who})"

    async def start(self, host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> str:
        """Listens (port 0: any) and returns the "host:port" that peers dial, at `advertise` if given.

        Raises ConfigError when the port cannot be had.
        """
        self.address = await self._host.start(host, port)
        if advertise:
            self.address = joined(advertise, split_address(self.address)[1])
        return self.address

    def publish(self, card: WorkerCard) -> None:
        """Sets who this worker is, from now on."""
        self._card = card

    async def close(self) -> None:
        """Idempotent."""
        self._card = None
        await self._host.stop(0.2)

    def _published(self) -> WorkerCard:
        if self._card is None:
            raise Refused(Reason.NOT_READY, f"the worker at {self.address} is starting or closing; ask again")
        return self._card

    def _check_me(self, worker_id: str, epoch: int) -> None:
        card = self._published()
        if card.worker_id != worker_id:
            raise Refused(
                Reason.RESTARTED,
                f"the agent at {self.address} belongs to worker {named(card.worker_id)}, and "
                f"{named(worker_id)} was asked for: the address was reused",
            )
        if card.epoch != epoch:
            raise Refused(
                Reason.RESTARTED,
                f"worker {named(worker_id)} restarted: epoch {epoch} asked, {card.epoch} running",
            )

    async def _get_card(self, _: Nothing) -> WorkerCard:
        return self._published()

    async def _connect(self, request: ConnectRequest) -> ConnectReply:
        self._check_me(request.worker_id, request.epoch)
        caller = caller_number()
        if self._connecting[caller] >= MAX_CONNECTS_OF_ONE or self._connecting.total() >= MAX_CONNECTS:
            raise Refused(
                Reason.TOO_MANY,
                f"{self._connecting.total()} readers are being admitted, {self._connecting[caller]} of them yours; "
                "ask again in a moment",
            )
        try:
            accepting = off_loop(self._accept, request.transport, request.hellos, request.takes_keys, caller)
        except Cancelled:
            raise Refused(Reason.NOT_READY, f"the process of {self.address} is ending") from None
        self._connecting[caller] += 1
        try:
            return ConnectReply(*await accepting)
        finally:
            self._connecting[caller] -= 1
            self._connecting += Counter()  # forgets callers that have none

    async def _settle_seat(self, order: SettleOrder) -> bool:
        self._check_me(order.worker_id, order.epoch)
        return self._settle(order.slot, order.settle_nonce)

    async def _renew_seats(self, renewal: Renewal) -> list[int]:
        self._check_me(renewal.worker_id, renewal.epoch)
        return [slot for slot, nonce in renewal.seats if not self._renew(slot, nonce)]
