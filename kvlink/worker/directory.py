# SPDX-License-Identifier: Apache-2.0
"""Finds the cards of owners and connects this reader to their agents. Only the control loop uses it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink import tracing
from kvlink.control import AgentClients, ConnectReply, CoordinatorClient, Security, SettleOrder
from kvlink.errors import AccessDenied, ConfigError, CoordinatorError, CoordinatorUnavailable, PeerUnreachable
from kvlink.tracing import TraceParent
from kvlink.types import WorkerCard
from kvlink.worker.channels import ChannelClients, Dial
from kvlink.worker.reachability import loopback_hint

_MAX_CARDS = 4096


class ControlDirectory:
    """Asks the agent that the ticket names, or else the coordinator. It fetches a card once per worker and epoch."""

    def __init__(self, coordinator: CoordinatorClient | None, security: Security, dial: Dial) -> None:
        """`dial` connects to the native channel of an owner without an agent."""
        self._coordinator = coordinator
        self.channels = ChannelClients(dial, security.keyring is not None)
        self._agents = AgentClients(security)
        self._cards: dict[tuple[str, int], WorkerCard] = {}

    async def card(self, worker_id: str, epoch: int, agent: str, *, fresh: bool) -> WorkerCard:
        """Returns the current card of a worker, whose epoch may be newer. Raises PeerUnreachable, UnknownRequest."""
        known = self._cards.get((worker_id, epoch))
        if known is not None and not fresh:
            return known
        if not agent and (added := await self.channels.card(worker_id, fresh)) is not None:
            return added
        if agent:
            try:
                card = await self._agents[agent].card()
            except CoordinatorUnavailable as error:
                raise _unreachable(worker_id, agent, error) from None
            except AccessDenied as error:
                raise AccessDenied(f"{error}{loopback_hint(agent)}") from None
        elif self._coordinator is not None:
            card = await self._coordinator.worker(worker_id, epoch)
        else:
            raise ConfigError(
                f"the ticket names no agent of {worker_id}; pass coordinator= or set KVLINK_COORDINATOR, or give its "
                "card to add_card()"
            )
        if card.worker_id != worker_id:
            raise PeerUnreachable(
                f"{agent} belongs to {card.worker_id} now, not to {worker_id}{loopback_hint(agent)}"
            )
        if len(self._cards) >= _MAX_CARDS:
            self._cards.pop(next(iter(self._cards)))
        self._cards[worker_id, card.epoch] = card
        return card

    async def connect(self, card: WorkerCard, transport: str, hellos: Sequence[bytes]) -> ConnectReply:
        """Sends the hellos of a connection's lanes to their owner. Raises PeerUnreachable, or the owner's refusal."""
        if not card.agent:
            return await self.channels.connect(card, transport, hellos)
        try:
            return await self._agents[card.agent].connect(card.worker_id, card.epoch, transport, list(hellos))
        except CoordinatorUnavailable as error:
            raise _unreachable(card.worker_id, card.agent, error) from None

    async def settle(self, order: SettleOrder, agent: str, trace: TraceParent | None) -> None:
        """Settles without the data path, through the agent or else the coordinator. Raises CoordinatorError.

        An owner without an agent is told through its native channel, which raises other KVLinkErrors too.
        """
        if not agent:
            return await self.channels.settle(order)
        with tracing.joined(trace):
            try:
                await self._agents[agent].settle(order)
            except CoordinatorError:
                if self._coordinator is None:
                    raise
                await self._coordinator.settle(order)

    async def close(self) -> None:
        """Cancels running calls. Idempotent."""
        await self._agents.close()


def _unreachable(worker_id: str, agent: str, error: CoordinatorUnavailable) -> PeerUnreachable:
    return PeerUnreachable(f"worker {worker_id}: {error}{loopback_hint(agent)}", silent=error.telling < 0)
