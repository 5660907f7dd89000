# SPDX-License-Identifier: Apache-2.0
"""Clients that know several coordinators: one is asked while it answers, then the next."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import pytest
from control.cards import make_card, make_offer
from control.processes import CoordinatorProcess
from waiting import closed_port, until

from kvlink.config import WorkerConfig
from kvlink.control import CoordinatorClient, Session
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorUnavailable
from kvlink.types import Joined


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
