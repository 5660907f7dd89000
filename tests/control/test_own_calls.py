# SPDX-License-Identifier: Apache-2.0
"""No other process of a tenant calls in a worker's name, at any coordinator of a fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from control.cards import make_card, make_offer
from control.fake_etcd import Clock, FakeEtcd
from coordinator.chains import prefix, query

from kvlink.control import CoordinatorClient
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import NotJoined
from kvlink.control.security import incarnation_of
from kvlink.control.values import PrefixChanges, Push, PushKind, SettleOrder
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.errors import AccessDenied, UnknownRequest

CARD = replace(make_card(), incarnation=incarnation_of("of prefill"))
STRANGER = make_card("stranger", process=9, agent="127.0.0.1:9")


async def beat(client: CoordinatorClient) -> None:
    stream = client.keep_alive()
    try:
        await stream.send(Beat("prefill", 1))
        assert await stream.receive() == Push(PushKind.ACK)
    finally:
        stream.cancel()


async def offer_in_a_batch(client: CoordinatorClient) -> None:
    async with client.handoffs() as stream:
        await stream.offer(make_offer("r")._replace(ticket=b"mine"))


CALLS: dict[str, Callable[[CoordinatorClient], Awaitable[object]]] = {
    "rejoin": lambda client: client.join(replace(CARD, agent="127.0.0.1:9"), rejoin=True),
    "join": lambda client: client.join(CARD),
    "beat": beat,
    "leave": lambda client: client.leave("prefill", 1),
    "offer": lambda client: client.offer(make_offer("r")._replace(ticket=b"mine")),
    "offer in a batch": offer_in_a_batch,
    "publish": lambda client: client.publish_prefixes(PrefixChanges("prefill", 1, (prefix("abx", "abc"),))),
    "withdraw": lambda client: client.publish_prefixes(PrefixChanges("prefill", 1, withdrawn=("abc",))),
}


@pytest.fixture(params=["memory", "etcd"])
async def addresses(
    request: pytest.FixtureRequest, fake_etcd: FakeEtcd, clock: Clock
) -> AsyncIterator[list[str]]:
    """Those of one coordinator, or of two that share a store."""
    async with AsyncExitStack() as opened:
        started = []
        for _ in range(1 if request.param == "memory" else 2):
            fleet = EtcdStore("etcd://127.0.0.1:1/fleet", clock=clock, trust=fake_etcd)
            coordinator = Coordinator(None if request.param == "memory" else fleet)
            opened.push_async_callback(coordinator.close)
            started.append(await coordinator.start())
        yield started


@pytest.fixture
async def owner(addresses: list[str]) -> AsyncIterator[CoordinatorClient]:
    """The client of a worker that has joined, and offers and publishes something."""
    async with CoordinatorClient(addresses[0]) as client:
        client.act_as("of prefill")
        await client.join(CARD)
        await client.offer(make_offer("r"))
        await client.publish_prefixes(PrefixChanges("prefill", 1, (prefix("abc"),)))
        yield client


@pytest.mark.parametrize("secret", ["", "another", "kvm1"])
@pytest.mark.parametrize("call", CALLS)
async def test_nobody_calls_in_the_name_of_another(
    owner: CoordinatorClient, addresses: list[str], call: str, secret: str
) -> None:
    async with CoordinatorClient(addresses[-1]) as stranger:
        await stranger.join(STRANGER)
        stranger.act_as(secret)
        with pytest.raises(AccessDenied, match="'prefill' is another process than the caller") as refused:
            await CALLS[call](stranger)
        assert "of prefill" not in str(refused.value)
        assert await stranger.worker("prefill") == CARD
        assert await stranger.claim("r", 0.0) == [make_offer("r").ticket]
    [found] = await owner.find_prefix(query("abcx"))
    assert (found.num_keys, found.worker_ids) == (3, ("prefill",))


async def test_nobody_ends_anothers_stream_or_report(owner: CoordinatorClient, addresses: list[str]) -> None:
    stream = owner.keep_alive()
    await stream.send(Beat("prefill", 1, WorkerReport(lease_slots=64)))
    assert await stream.receive() == Push(PushKind.ACK)
    async with CoordinatorClient(addresses[0]) as stranger:
        with pytest.raises(AccessDenied):
            await beat(stranger)
    [view] = (await owner.overview()).workers
    assert view.report is not None
    assert view.report.lease_slots == 64
    order = SettleOrder("prefill", 1, 3, 4)
    await owner.settle(order)
    assert await stream.receive() == Push(PushKind.SETTLE, order.slot, order.settle_nonce)
    stream.cancel()


@pytest.mark.parametrize("call", CALLS)
async def test_all_processes_with_the_secret_act_for_the_worker(
    owner: CoordinatorClient, addresses: list[str], call: str
) -> None:
    async with CoordinatorClient(addresses[-1]) as scheduler:
        scheduler.act_as("of prefill")
        await CALLS[call](scheduler)


@pytest.mark.parametrize("change", [{"epoch": 0}, {"epoch": 2}, {"worker_id": "nobody"}])
async def test_a_worker_names_its_own_epoch(
    owner: CoordinatorClient, addresses: list[str], change: dict[str, Any]
) -> None:
    async with CoordinatorClient(addresses[-1]) as client:
        client.act_as("of prefill")
        stream = client.keep_alive()
        await stream.send(Beat("prefill", 1)._replace(**change))
        assert await stream.receive() == Push(PushKind.REJOIN)
        with pytest.raises((NotJoined, UnknownRequest)):
            await client.offer(make_offer("s")._replace(**change))
        with pytest.raises((NotJoined, UnknownRequest)):
            await client.publish_prefixes(PrefixChanges("prefill", 1, (prefix("xyz"),))._replace(**change))


async def test_no_incarnation_is_taken_before_its_process_has_joined(addresses: list[str]) -> None:
    """A coordinator that has lost its memory knows no worker, and cards show their incarnations to everybody."""
    async with CoordinatorClient(addresses[-1]) as stranger:
        stranger.act_as("another")
        with pytest.raises(AccessDenied):
            await stranger.join(replace(CARD, agent="127.0.0.1:9"), rejoin=True)
    async with CoordinatorClient(addresses[0]) as client:
        client.act_as("of prefill")
        assert (await client.join(CARD, rejoin=True)).epoch == 1


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"join", "rejoin"}))
async def test_a_worker_of_an_earlier_release_has_no_secret(addresses: list[str], call: str) -> None:
    async with CoordinatorClient(addresses[0]) as client, CoordinatorClient(addresses[-1]) as anybody:
        await client.join(make_card())
        await CALLS[call](anybody)


def test_texts_that_are_no_secret_make_no_incarnation() -> None:
    assert (
        incarnation_of("") == incarnation_of("x" * 257) == incarnation_of(None) == incarnation_of(b"x") == b""
    )
    assert len(incarnation_of("x")) == 16
