# SPDX-License-Identifier: Apache-2.0
"""Makes each call of a worker and a reader once, in one order; runs with any release."""

from __future__ import annotations

from contextlib import aclosing

from control.cards import make_card, make_offer

from kvlink.control import AgentClient, Claim, CoordinatorClient, SettleOrder
from kvlink.control.values import PushKind
from kvlink.errors import UnknownRequest
from kvlink.types import Joined

try:
    from kvlink.control.overview import Beat
except ModuleNotFoundError:  # releases before reports
    from kvlink.control.values import WorkerEpoch as Beat  # type: ignore[assignment]

ORDER = SettleOrder("prefill", 1, 3, 0xFEDCBA9876543210)
HELLOS, REPLIES, CONNECTION = [b"hello 0", b"hello 1"], [b"reply 0", b"reply 1"], 77


async def with_coordinator(address: str) -> None:
    """Joins, hands requests over in both ways, settles, leaves."""
    async with CoordinatorClient(address) as client:
        assert (await client.join(make_card())).epoch == 1
        beats = client.keep_alive()
        await beats.send(Beat("prefill", 1))
        assert (await beats.receive()).kind is PushKind.ACK  # type: ignore[union-attr]
        await client.settle(ORDER)
        assert await beats.receive() == (PushKind.SETTLE, ORDER.slot, ORDER.settle_nonce)
        await beats.finish()
        assert await beats.receive() is None
        await _look(client)
        await _handoff(client)
        assert (await client.status())[1:10] == (1, 0, 0, 1, 0, 2, 2, 0, 2)
        await client.leave("prefill", 1)


async def _look(client: CoordinatorClient) -> None:
    assert await client.worker("prefill") == make_card()
    assert await client.workers() == [make_card()]
    async with aclosing(client.watch()) as changes:  # type: ignore[type-var]
        change = await anext(changes)
    assert (change.what, change.card) == (Joined.UP, make_card())


async def _handoff(client: CoordinatorClient) -> None:
    alone, batched = make_offer("alone"), make_offer("batched")
    await client.offer(alone)
    assert await client.claim("alone", timeout_s=5.0) == [alone.ticket]
    async with client.handoffs() as stream:
        await stream.offer(batched)
        assert await stream.claim(Claim("batched", 5.0)) == [batched.ticket]
        await stream.settle(ORDER)
    try:
        await client.claim("never offered", timeout_s=0.0)
    except UnknownRequest as refused:
        assert "never offered" in str(refused)
    else:
        raise AssertionError("it was not refused")


async def with_agent(address: str) -> None:
    """Makes the calls of a reader to the owner it reads from."""
    async with AgentClient(address) as client:
        assert await client.card() == make_card()
        reply = await client.connect("prefill", 1, "tcp", HELLOS)
        assert (reply.connection_id, list(reply.replies)) == (CONNECTION, REPLIES)
        assert await client.settle(ORDER) is True
        assert await client.settle(ORDER._replace(slot=9)) is False


def accept(
    transport: str, hellos: list[bytes], takes_keys: bool = False, caller: int = 0
) -> tuple[int, list[bytes]]:
    """The owner's transport."""
    assert (transport, list(hellos)) == ("tcp", HELLOS)
    return CONNECTION, REPLIES


def settle(slot: int, nonce: int) -> bool:
    """The owner's lease table."""
    return (slot, nonce) == (ORDER.slot, ORDER.settle_nonce)
