# SPDX-License-Identifier: Apache-2.0
"""Reaches owners that have a native channel and no agent. Only the control loop uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvlink.control import ConnectReply, SettleOrder
from kvlink.control.codec import CARD
from kvlink.errors import (
    ConfigError,
    PeerUnreachable,
    StaleBlocks,
    TransferTimeout,
    TransportUnavailable,
    UnknownRequest,
)
from kvlink.runtime.background import off_loop
from kvlink.transfer.native_channel import ChannelClient
from kvlink.transfer.peer import Peer
from kvlink.types import NativeChannel, WorkerCard

_CALL_S = 5.0
"""How long an owner may be silent."""
_MAX_OWNERS = 4096

T = TypeVar("T")
Dial = Callable[[NativeChannel, float], ChannelClient]


@dataclass(slots=True)
class _Owner:
    card: WorkerCard
    dialling: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: ChannelClient | None = None


class ChannelClients:
    """Keeps the cards of owners without an agent, which programs give to this reader, and a client for each."""

    def __init__(self, dial: Dial, uses_tls: bool) -> None:
        self._dial = dial
        self._uses_tls = uses_tls
        self._owners: dict[str, _Owner] = {}

    def add(self, sealed: bytes) -> WorkerCard:
        """Remembers the card of an owner. Raises ConfigError."""
        card = CARD.decode(sealed)
        if card.channel is None:
            raise ConfigError(f"the card of {card.worker_id} has no native channel")
        known = self._owners.pop(card.worker_id, None)
        if known is None or known.card.channel != card.channel:
            known = _Owner(card)
        known.card = card
        self._owners[card.worker_id] = known
        if len(self._owners) > _MAX_OWNERS:
            del self._owners[next(iter(self._owners))]
        return card

    async def card(self, worker_id: str, fresh: bool) -> WorkerCard | None:
        """Returns the card of an owner that was added, or None. `fresh` asks the owner. Raises KVLinkError."""
        known = self._owners.get(worker_id)
        if known is None:
            return None
        if not fresh:
            return known.card
        client = await self._client(known)
        card = CARD.decode(await _asked(worker_id, client.card, _CALL_S))
        if card.worker_id != worker_id:
            raise PeerUnreachable(f"{card.worker_id} answers at the native channel of {worker_id}")
        known.card = card
        return card

    async def connect(self, card: WorkerCard, transport: str, hellos: Sequence[bytes]) -> ConnectReply:
        """Sends the hellos of a connection's lanes to their owner. Raises KVLinkError."""
        client = await self._client(self._known(card.worker_id))
        request = card.worker_id, card.epoch, transport, list(hellos)
        return ConnectReply(*await _asked(card.worker_id, client.connect, *request, _CALL_S))

    async def settle(self, order: SettleOrder) -> None:
        """Settles through the channel. Raises UnknownRequest if the owner has restarted."""
        try:
            client = await self._client(self._known(order.worker_id))
            await _asked(order.worker_id, client.settle, order.slot, order.settle_nonce, _CALL_S)
        except StaleBlocks as error:
            raise UnknownRequest(str(error)) from None

    def opened(self, peer: Peer) -> None:
        """Ends a connection, and so its pulls, when its owner's end of the channel closes."""
        known = self._owners.get(peer.card.worker_id)
        if known is not None and known.client is not None and not peer.card.agent:
            known.client.end_with_owner(peer.connection)

    def _known(self, worker_id: str) -> _Owner:
        known = self._owners.get(worker_id)
        if known is None:
            raise PeerUnreachable(
                f"worker {worker_id} has no agent, and its card was not given to this worker"
            )
        return known

    async def _client(self, owner: _Owner) -> ChannelClient:
        """Returns a client that works, and dials if there is none."""
        channel, worker_id = owner.card.channel, owner.card.worker_id
        if channel is None:
            raise PeerUnreachable(f"worker {worker_id} has no native channel any more")
        if self._uses_tls:
            raise TransportUnavailable(
                f"worker {worker_id} has only a native channel, which has no TLS, and this worker uses TLS",
                "Run the owner with an agent",
            )
        async with owner.dialling:
            if owner.client is None or owner.client.ended:
                owner.client = await _asked(worker_id, self._dial, channel, _CALL_S)
        return owner.client


async def _asked(worker_id: str, call: Callable[..., T], *args: object) -> T:
    try:
        return await off_loop(call, *args)
    except TransferTimeout as error:
        raise PeerUnreachable(f"worker {worker_id}: {error}", silent=True) from None
