# SPDX-License-Identifier: Apache-2.0
"""Many at once at one coordinator process: a herd that joins again, watchers that do not read, slow HTTP clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from outages.programs import Coordinator, Program

from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient, Session

pytestmark = pytest.mark.timeout(300)

_HERD = 1_000
_GROWTH_MIB = 60.0

_WATCH = """
import asyncio, sys
from kvlink.control import CoordinatorClient
async def one(client):
    async for change in client.watch():
        if change.card.worker_id == "last":
            return
async def main():
    clients = [CoordinatorClient(sys.argv[1]) for _ in range(int(sys.argv[2]))]
    tasks = [asyncio.create_task(one(client)) for client in clients for _ in range(5)]
    await asyncio.sleep(2)
    print("watching", flush=True)
    await asyncio.gather(*tasks)
    print("seen", flush=True)
asyncio.run(main())
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path, "a", "memory", (), "--http-port", "0")
    yield coordinator
    coordinator.kill()


async def test_a_herd_joins_again_at_once(coordinator: Coordinator) -> None:
    clients = [CoordinatorClient(coordinator.address, timeout_s=60.0) for _ in range(_HERD)]
    cards = [make_card(f"w{number}", process=number + 1) for number in range(_HERD)]
    sessions = [
        await Session.join(client, card, lambda slot, nonce: None, 60.0)
        for client, card in zip(clients, cards, strict=True)
    ]
    for number, session in enumerate(sessions):
        await session.offer(make_offer(f"r{number}", f"w{number}", session.card.epoch, ttl_s=250.0))
    before_mib, before_lines = coordinator.memory_mib(), coordinator.num_lines()
    coordinator.kill()
    coordinator.start()
    began = time.monotonic()
    async with CoordinatorClient(coordinator.address, timeout_s=60.0) as asking:
        longest_s = 0.0
        while (status := await asking.status()).workers < _HERD or status.tickets < _HERD:
            asked = time.monotonic()
            await asking.status()
            longest_s = max(longest_s, time.monotonic() - asked)
            await asyncio.sleep(0.05)
        took_s = time.monotonic() - began
        for number in range(0, _HERD, 20):
            ticket = make_offer(f"r{number}", f"w{number}", sessions[number].card.epoch).ticket
            assert await asking.claim(f"r{number}", timeout_s=30.0) == [ticket]
    lines, mib = coordinator.num_lines() - before_lines, coordinator.memory_mib()
    print(
        f"\n    all back in {took_s:.1f} s, status at most {longest_s:.2f} s, {lines} lines, {mib:.0f} MiB",
        end=" ",
    )
    assert [session.num_rejoins for session in sessions] == [1] * _HERD
    assert lines <= _HERD + 10, "one for each that joins"
    assert mib < before_mib + _GROWTH_MIB
    assert "Traceback" not in coordinator.logged
    await asyncio.gather(*(session.close() for session in sessions))
    await asyncio.gather(*(client.close() for client in clients))


async def test_watchers_that_do_not_read_cost_little_and_see_the_end(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """Changes are not kept for ever for them: their watch begins again, and sees what is so then."""
    command = [sys.executable, "-c", _WATCH, coordinator.address, "10"]
    watching = Program(tmp_path, "watching", command)
    try:
        watching.send(signal.SIGSTOP)
        before_mib, before_lines = coordinator.memory_mib(), coordinator.num_lines()
        async with CoordinatorClient(coordinator.address, timeout_s=60.0) as client:
            for number in range(600):
                joined = await client.join(make_card(f"w{number}", process=number + 1))
                if number == 299:
                    half_mib = coordinator.memory_mib()
                await client.leave(f"w{number}", joined.epoch)
            grown_mib, more_mib = half_mib - before_mib, coordinator.memory_mib() - half_mib
            watching.send(signal.SIGCONT)
            last = await Session.join(
                client, make_card("last", process=99_999), lambda slot, nonce: None, 60.0
            )
            assert await asyncio.to_thread(watching.line, 60.0) == "seen"
            await last.close()
    finally:
        watching.kill()
    print(f"\n    +{grown_mib:.1f} MiB by 600 changes, +{more_mib:.1f} MiB by 600 more", end=" ")
    assert grown_mib < _GROWTH_MIB
    assert more_mib < 10.0
    assert coordinator.num_lines() - before_lines <= 1_210, "one for each that joins or leaves"


async def test_slow_http_clients_keep_neither_scrapes_nor_handoffs_waiting(coordinator: Coordinator) -> None:
    lines = coordinator.num_lines()
    with ExitStack() as stack:
        slow = [
            stack.enter_context(
                socket.create_connection(split_address(coordinator.page.removeprefix("http://")))
            )
            for _ in range(400)
        ]
        for each in slow:
            each.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        took: list[float] = []
        async with CoordinatorClient(coordinator.address, timeout_s=60.0) as client:
            await client.join(make_card())
            for number in range(20):
                began = time.monotonic()
                await asyncio.to_thread(scrape, coordinator.page)
                took.append(time.monotonic() - began)
                await client.offer(make_offer(f"r{number}"))
                assert await client.claim(f"r{number}", timeout_s=30.0)
    print(f"\n    a scrape took at most {max(took):.2f} s", end=" ")
    assert max(took) < 5.0
    assert coordinator.num_lines() - lines <= 15
    assert "Traceback" not in coordinator.logged


def scrape(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert b"kvlink_coordinator_workers" in answer.read()
