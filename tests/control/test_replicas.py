# SPDX-License-Identifier: Apache-2.0
"""Several coordinators over one store, and sessions that move from one to the other."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster
from control.fleet import everyone_refuses
from control.processes import CoordinatorProcess
from control.watching import holds, none_joined
from waiting import closed_port, until

from kvlink.config import WorkerConfig
from kvlink.control import CoordinatorClient, Session, SettleOrder
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.refusal import Replaced
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorUnavailable, UnknownRequest
from kvlink.types import Joined

NewReplica = Callable[..., Awaitable[CoordinatorClient]]
_fleets = itertools.count()


@pytest.fixture
async def replica(etcd: EtcdCluster) -> AsyncIterator[NewReplica]:
    """Starts another coordinator of this test's fleet and returns a client of that one alone."""
    store = f"etcd://{etcd.addresses}/replicas-{next(_fleets)}"
    started: list[tuple[Coordinator, CoordinatorClient]] = []

    async def start(lease_s: float = 30.0) -> CoordinatorClient:
        coordinator = Coordinator(EtcdStore(store, lease_s), lease_s)
        client = CoordinatorClient(await coordinator.start())
        started.append((coordinator, client))
        return client

    yield start
    for coordinator, client in started:
        await client.close()
        await coordinator.close()


async def test_a_claim_at_one_is_woken_by_an_offer_at_another(replica: NewReplica) -> None:
    a, b = await replica(), await replica()
    await a.join(make_card())
    claim = asyncio.create_task(b.claim("r", timeout_s=20.0))
    await until(lambda: holds(b, "waiting_claims"))
    await a.offer(make_offer("r"))
    assert await claim == [make_offer("r").ticket]


async def test_what_one_was_told_the_next_knows_at_once(replica: NewReplica) -> None:
    a, b = await replica(), await replica()
    for number in range(20):
        await a.join(make_card(f"w{number}"))
        assert (await b.worker(f"w{number}")).epoch == 1
        await a.offer(make_offer(f"r{number}", f"w{number}"))
        assert await b.claim(f"r{number}", timeout_s=0.0)
        with pytest.raises(UnknownRequest):
            await a.claim(f"r{number}", timeout_s=0.0)


async def test_a_ticket_is_claimed_once_over_all(replica: NewReplica) -> None:
    clients = [await replica() for _ in range(3)]
    await clients[0].join(make_card())
    names = [f"r{number}" for number in range(50)]
    claims = [asyncio.create_task(client.claim(name, timeout_s=60.0)) for name in names for client in clients]

    def brought() -> list[list[bytes]]:
        return [claim.result() for claim in claims if claim.done()]

    for name in names:
        await clients[1].offer(make_offer(name))
    await until(lambda: len(brought()) >= len(names))
    for name, client in itertools.product(names, clients):
        with pytest.raises(UnknownRequest):
            await client.claim(name, timeout_s=0.0)
    assert sorted(brought()) == sorted([make_offer(name).ticket] for name in names)
    for claim in claims:
        claim.cancel()
    await asyncio.gather(*claims, return_exceptions=True)


async def test_two_that_claim_at_one_moment_do_not_both_get_it(replica: NewReplica) -> None:
    clients = [await replica() for _ in range(2)]
    await clients[0].join(make_card())

    async def claim(client: CoordinatorClient, name: str) -> int:
        try:
            return len(await client.claim(name, timeout_s=0.0))
        except UnknownRequest:
            return 0

    async def race(name: str) -> int:
        await clients[0].offer(make_offer(name))
        return sum(await asyncio.gather(*(claim(client, name) for client in clients)))

    for start in range(0, 200, 20):
        assert await asyncio.gather(*(race(f"r{start + number}") for number in range(20))) == [1] * 20


async def test_a_claimed_ticket_stays_claimed_when_its_worker_was_lost_in_between(
    replica: NewReplica,
) -> None:
    a, b = await replica(2.0), await replica(2.0)
    await a.join(make_card())
    await a.offer(make_offer("taken", ttl_s=60.0))
    assert await b.claim("taken")
    await until(lambda: none_joined(a))  # it does not beat
    assert (await b.join(make_card(), rejoin=True)).epoch == 1
    await b.offer(make_offer("taken", ttl_s=50.0))
    with pytest.raises(UnknownRequest):
        await a.claim("taken", timeout_s=0.0)


async def test_two_processes_never_hold_one_epoch(replica: NewReplica) -> None:
    clients = [await replica() for _ in range(3)]
    memberships = await asyncio.gather(
        *(clients[process % 3].join(make_card(process=process)) for process in range(12))
    )
    epochs = sorted(membership.epoch for membership in memberships)
    assert len(set(epochs)) == 12
    assert [(await client.worker("prefill")).epoch for client in clients] == [epochs[-1]] * 3
    loser = memberships.index(min(memberships))
    with pytest.raises(Replaced, match="give each worker its own"):
        await clients[0].join(make_card(epoch=epochs[0], process=loser), rejoin=True)


async def test_a_watch_at_one_sees_who_joins_at_another(replica: NewReplica) -> None:
    a, b = await replica(), await replica()
    changes = aiter(b.watch())
    first = asyncio.ensure_future(anext(changes))
    await a.join(make_card())
    assert (await first).card == make_card()
    await a.leave("prefill", 1)
    assert (await anext(changes)).card == make_card()
    assert (await a.status()).lost_workers == (await b.status()).lost_workers == 0
    await changes.aclose()  # type: ignore[attr-defined]


async def test_a_settle_at_one_reaches_a_worker_that_beats_at_another(replica: NewReplica) -> None:
    a, b = await replica(), await replica()
    settled: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    session = await Session.join(a, make_card(), lambda *seat: settled.put_nowait(seat))
    await b.settle(SettleOrder("prefill", 1, 7, 70))
    assert await settled.get() == (7, 70)
    await session.close()


async def test_a_session_goes_to_another_replica_and_takes_nothing_twice(replica: NewReplica) -> None:
    a, b = await replica(), await replica()
    async with CoordinatorClient(f"{a.address},{b.address}") as both:
        session = await Session.join(both, make_card(), lambda slot, nonce: None)
        await session.offer(make_offer("taken", ttl_s=60.0))
        await session.offer(make_offer("kept", ttl_s=60.0))
        assert await a.claim("taken")
        both._channel.avoid(both.next_address)
        session._doubt.set()
        await until(lambda: session.num_rejoins == 1)
        assert session.card.epoch == 1
        assert await b.claim("kept")
        with pytest.raises(UnknownRequest):
            await b.claim("taken", timeout_s=0.0)
        await session.close()


async def test_etcd_away_is_said_and_gets_over_by_itself(etcd: EtcdCluster, replica: NewReplica) -> None:
    client = await replica()
    session = await Session.join(client, make_card(), lambda slot, nonce: None)
    etcd.kill(0)
    try:
        assert (await client.worker("prefill")).epoch == 1
        sentence = await everyone_refuses(client.address)
        assert "does not reach its store: etcd at 127.0.0.1" in sentence
        with pytest.raises(CoordinatorUnavailable, match="its store"):
            await client._channel.attempt(CoordinatorCalls.OFFER, make_offer("r"), 30.0)
        claim = asyncio.create_task(client.claim("r", timeout_s=60.0))
    finally:
        etcd.start(0)
        await asyncio.to_thread(etcd.wait)
    await session.offer(make_offer("r"), timeout_s=30.0)
    assert await claim == [make_offer("r").ticket]
    assert session.card.epoch == 1
    await session.close()


async def test_the_coordinator_that_is_there_answers(coordinator: Coordinator) -> None:
    with closed_port() as one, closed_port() as other:
        for _ in range(5):
            async with CoordinatorClient(f"{one}, {coordinator.address},{other}") as client:
                assert (await client.status()).workers == 0
                assert client.next_address == coordinator.address
                assert (await client.status()).workers == 0, "it stays there"


async def test_nobody_there_names_one_of_them() -> None:
    with closed_port() as one, closed_port() as other:
        addresses = f"{one},{other}"
        async with CoordinatorClient(addresses, timeout_s=3.0) as client:
            with pytest.raises(
                CoordinatorUnavailable, match=r"coordinator at 127\.0\.0\.1:\d+ does not answer"
            ):
                await client.status()
            assert client.address == addresses


async def test_callers_spread_out() -> None:
    addresses = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    first: Counter[str] = Counter()
    for _ in range(300):
        client = CoordinatorClient(",".join(addresses))
        first[client.next_address] += 1
        await client.close()
    assert set(first) == set(addresses)
    assert min(first.values()) > 50


@pytest.mark.parametrize("addresses", ["a:1,", "a:1,b", ",", "a:1;b:2", "a:1,b:x"])
async def test_each_address_must_be_one(addresses: str) -> None:
    with pytest.raises(ConfigError, match="separate several with commas"):
        CoordinatorClient(addresses)


def test_the_setting_takes_several() -> None:
    assert WorkerConfig(coordinator="a:1, b:2").coordinator == "a:1, b:2"
    with pytest.raises(ConfigError, match="'b' is not host:port"):
        WorkerConfig(coordinator="a:1,b")


async def test_one_that_hangs_costs_its_attempt_and_no_more(
    coordinator: Coordinator, coordinator_process
) -> None:
    hangs: CoordinatorProcess = coordinator_process()
    async with CoordinatorClient(f"{hangs.address},{coordinator.address}", timeout_s=10.0) as client:
        while client.next_address != hangs.address:
            client._channel.avoid(client.next_address)
        await client.status()
        hangs.send(signal.SIGSTOP)
        assert (await client.status()).workers == 0
        assert client.next_address == coordinator.address
        hangs.send(signal.SIGCONT)


async def test_a_worker_and_a_watch_move_on(coordinator: Coordinator, coordinator_process) -> None:
    dies: CoordinatorProcess = coordinator_process()
    async with CoordinatorClient(f"{dies.address},{coordinator.address}") as client:
        while client.next_address != dies.address:
            client._channel.avoid(client.next_address)
        session = await Session.join(client, make_card(), lambda slot, nonce: None)
        await session.offer(make_offer("r", ttl_s=60.0))
        changes = aiter(client.watch())
        assert (await anext(changes)).what is Joined.UP
        dies.kill()
        await until(lambda: session.num_rejoins == 1)
        assert await client.claim("r", timeout_s=20.0) == [make_offer("r").ticket]
        assert [card.epoch for card in await client.workers()] == [1]
        next_change = asyncio.ensure_future(anext(changes))
        await session.close()
        assert (await next_change).what is Joined.DOWN
        await changes.aclose()  # type: ignore[attr-defined]


async def test_a_watch_that_fell_behind_begins_again_and_misses_nothing() -> None:
    store = MemoryStore()
    coordinator = Coordinator(store)
    async with CoordinatorClient(await coordinator.start()) as client:
        changes = client.watch()
        await client.join(make_card("a"))
        assert (await anext(changes)).card.worker_id == "a"
        for feed in list(store._watchers):
            feed.close(refusals.watch_fell_behind())
        await client.join(make_card("b", process=2))
        change = await anext(changes)
        assert (change.what, change.card.worker_id) == (Joined.UP, "b")
        await changes.aclose()  # type: ignore[attr-defined]
    await coordinator.close()
