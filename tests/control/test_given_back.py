# SPDX-License-Identifier: Apache-2.0
"""A claim is cancelled while its tickets are on their way to it: they can be claimed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from control.cards import make_card, make_offer
from control.fake_etcd import FakeEtcd
from control.watching import holds
from waiting import until

from kvlink.control import Claim, CoordinatorClient, SettleOrder
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import CoordinatorUnavailable, UnknownRequest

TICKET = make_offer("r").ticket


def over_fake_etcd() -> Store:
    return EtcdStore("etcd://127.0.0.1:1/fleet", trust=FakeEtcd())


@pytest.fixture(params=[MemoryStore, over_fake_etcd])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[CoordinatorClient]:
    """Yields a client of a coordinator over each store, with one worker."""
    coordinator = Coordinator(request.param())
    async with CoordinatorClient(await coordinator.start()) as client:
        await client.join(make_card())
        yield client
    await coordinator.close()


@asynccontextmanager
async def deaf(
    client: CoordinatorClient, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[HandoffStream, list[object]]]:
    """A stream that does not look at the results that it receives."""
    async with client.handoffs() as stream:
        unread: list[object] = []
        patch.setattr(stream, "_resolve", unread.append)
        yield stream, unread


@pytest.mark.parametrize("claim_id", [b"", b"mine"])
async def test_tickets_on_their_way_to_a_withdrawn_claim_go_to_another(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch, claim_id: bytes
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        given_up = stream.claim(Claim("r", 30.0, claim_id=claim_id))
        await until(lambda: holds(client, "waiting_claims"))
        await client.offer(make_offer("r"))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", timeout_s=10.0) == [TICKET]
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)


async def test_they_go_to_one_that_waits_already(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r"))
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        async with client.handoffs() as other:
            waits = other.claim(Claim("r", 30.0))
            await until(lambda: holds(client, "waiting_claims"))
            given_up.cancel()
            assert await waits == [TICKET]


async def test_other_readers_of_the_request_keep_theirs(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r", seats=2))
        assert await client.claim("r", 10.0, reader=0, num_readers=2) == [TICKET]
        given_up = stream.claim(Claim("r", 30.0, 1, 2, b"mine"))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", 10.0, reader=1, num_readers=2) == [TICKET]
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)


async def test_all_ranks_come_back(client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.join(make_card("second", process=2))
    offers = [make_offer("r", of=2), make_offer("r", "second", rank=1, of=2)]
    async with deaf(client, monkeypatch) as (stream, unread):
        for offer in offers:
            await client.offer(offer)
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", timeout_s=10.0) == [offer.ticket for offer in offers]


async def test_a_worker_that_left_does_not_come_back_with_its_ticket(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r"))
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        await client.leave("prefill", 1)
        given_up.cancel()
        stream.settle(SettleOrder("prefill", 1, 1, 1))  # is answered after the withdrawal
        await until(lambda: len(unread) == 2)
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)
        assert (await client.status()).tickets == 0


@pytest.mark.parametrize("why", [asyncio.CancelledError(), CoordinatorUnavailable("no answer")], ids=repr)
async def test_a_single_claim_whose_answer_got_lost_brings_its_tickets_when_made_again(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch, why: BaseException
) -> None:
    attempt: Callable[..., object] = client._channel.attempt

    async def lost(*args: object) -> None:
        await attempt(*args)
        raise why

    await client.offer(make_offer("r"))
    with monkeypatch.context() as patched:
        patched.setattr(client._channel, "attempt", lost)
        with pytest.raises(type(why)):
            await client.claim("r", timeout_s=0.0)
    with pytest.raises(UnknownRequest):
        await client.claim("r", timeout_s=0.0, reader=1, num_readers=2)
    assert await client.claim("r", timeout_s=0.0) == [TICKET]
    with pytest.raises(UnknownRequest):
        await client.claim("r", timeout_s=0.0)
