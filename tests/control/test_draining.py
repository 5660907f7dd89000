# SPDX-License-Identifier: Apache-2.0
"""A coordinator that is told to end: claims that wait go elsewhere, and none fails."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster
from control.fleet import Fleet, Load
from control.raw import raw_channel
from waiting import until

from kvlink.control import Claim, CoordinatorClient, Session
from kvlink.control.codec import CoordinatorCalls
from kvlink.coordinator import Coordinator, serve
from kvlink.coordinator.coordinator import tune_gc
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.errors import ConfigError, CoordinatorUnavailable

pytestmark = pytest.mark.claims_move_on

SAID_UNDER_LOAD = re.compile(
    r"the watch of etcd lags behind, moving it to another member revision=\d+ seen=\d+|"
    r"Aborting method \[\S+\] due to server stop\."
)


@pytest.fixture
async def pair(
    etcd: EtcdCluster, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two replicas that one name stands for: localhost, at one port."""
    store = f"etcd://{etcd.addresses}/{request.node.name}"
    first, second = (Coordinator(EtcdStore(store, 10.0), 10.0) for _ in range(2))
    port = int((await first.start("127.0.0.1")).rpartition(":")[2])
    try:
        await second.start("::1", port)
    except ConfigError as error:
        await first.close()
        pytest.skip(f"needs IPv6 on loopback: {error}")
    yield first, second
    await first.close()
    await second.close()


async def until_waiting(*coordinators: Coordinator) -> Coordinator:
    """The one at which a claim waits."""

    async def waiting() -> list[Coordinator]:
        return [each for each in coordinators if (await each.status()).waiting_claims]

    return (await until(waiting))[0]


async def test_at_sigterm_claims_that_wait_are_sent_away_and_nothing_is_left() -> None:
    started: list[Coordinator] = []
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def beside(coordinator: Coordinator) -> AsyncIterator[None]:
        started.append(coordinator)
        yield
        assert "draining" in repr(coordinator)

    serving = asyncio.create_task(
        serve(port=0, on_ready=lambda address, _: ready.set_result(address), background_service=beside)
    )
    async with raw_channel(await ready) as channel:
        claim = CoordinatorCalls.CLAIM.request.encode(Claim("r", 60.0))
        waiting = channel.unary_unary("/kvlink.v1.Coordinator/Claim")(claim)
        await until_waiting(*started)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="is shutting down; retry"):
            await waiting
        await serving
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert (await started[0].status()).waiting_claims == 0


def test_what_was_imported_is_not_looked_at_again_by_the_collector() -> None:
    class Cycle:
        pass

    before, cycle = gc.get_threshold(), Cycle()
    cycle.itself = cycle  # type: ignore[attr-defined]
    gone = weakref.ref(cycle)
    del cycle
    try:
        tune_gc()
        assert gone() is None
        assert gc.get_freeze_count() > 1_000
        assert gc.get_threshold() == (50_000, 20, 20)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


async def test_no_claim_fails_while_replicas_restart_in_turn(etcd: EtcdCluster) -> None:
    fleet = Fleet(etcd, 2, name="in-turn")
    async with Load(fleet.addresses) as load:
        for victim in fleet.replicas:
            await load.goes_on(50)
            victim.send(signal.SIGTERM)
            _, output = await asyncio.to_thread(victim.process.communicate)
            assert victim.process.returncode == 0
            assert [line for line in output.splitlines() if not SAID_UNDER_LOAD.fullmatch(line)] == []
            await load.goes_on(50)
            await asyncio.to_thread(victim.start)
    load.check()
    assert len(load.brought) == load.num_offered
    fleet.close()


async def test_one_name_for_all_leads_to_those_that_stay(pair: tuple[Coordinator, Coordinator]) -> None:
    async with CoordinatorClient(f"localhost:{pair[0].address.rpartition(':')[2]}") as client:
        await client.join(make_card())
        waits = asyncio.create_task(client.claim("waits", timeout_s=60.0))
        leaves = await until_waiting(*pair)
        leaving = asyncio.create_task(leaves.drain())
        for number in range(20):
            offer = make_offer(f"r{number}")
            await client.offer(offer)
            assert await client.claim(offer.request_id) == [offer.ticket]
        await leaving
        (stays,) = set(pair) - {leaves}
        await until_waiting(stays)
        await client.offer(make_offer("waits"))
        assert await waits == [make_offer("waits").ticket]
        await leaves.close()


async def test_a_stream_ends_and_says_that_it_may_be_opened_again(coordinator: Coordinator) -> None:
    async with CoordinatorClient(coordinator.address) as client, client.handoffs() as stream:
        waits = stream.claim(Claim("waits", 60.0))
        await until_waiting(coordinator)
        await coordinator.drain()
        with pytest.raises(CoordinatorUnavailable, match="shutting down; retry") as refused:
            await waits
        assert refused.value.retryable


async def test_a_lone_coordinator_restarts_between_claim_and_offer() -> None:
    before, after = Coordinator(), Coordinator()
    async with CoordinatorClient(await before.start()) as client:
        waits = asyncio.create_task(client.claim("r", timeout_s=60.0))
        await until_waiting(before)
        refused = asyncio.create_task(client._channel.attempt(CoordinatorCalls.CLAIM, Claim("s", 60.0), 60.0))
        await until(lambda: len(before._store._offers.waiting) == 2)  # type: ignore[attr-defined]
        await before.drain()
        with pytest.raises(CoordinatorUnavailable, match="is shutting down; retry"):
            await refused
        await before.close()
        await after.start(port=int(before.address.rpartition(":")[2]))
        await client.join(make_card())
        await client.offer(make_offer("r"))
        assert await waits == [make_offer("r").ticket]
    await after.close()


async def test_claims_whose_tickets_were_on_their_way_get_them_again() -> None:
    """The worker says them again to the process that comes next, which knows nothing of the claim."""
    before, after = Coordinator(), Coordinator()
    async with CoordinatorClient(await before.start()) as client:
        session = await Session.join(client, make_card(), lambda slot, nonce: None)
        await session.offer(make_offer("r", ttl_s=600.0))
        claim = Claim("r", 60.0, claim_id=b"mine")
        assert await client._channel.attempt(CoordinatorCalls.CLAIM, claim, 60.0)
        await before.drain()
        await before.close()
        await after.start(port=int(before.address.rpartition(":")[2]))
        assert await client._channel.call(CoordinatorCalls.CLAIM, claim, 60.0) == [make_offer("r").ticket]
        await session.close()
    await after.close()
