# SPDX-License-Identifier: Apache-2.0
"""A worker stays joined, and its offers claimable, whatever happens to the coordinator or to itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.processes import CoordinatorProcess
from control.watching import holds
from waiting import until

from kvlink.control import CoordinatorClient, Session, SessionState, SettleOrder
from kvlink.control.refusal import Replaced
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import CoordinatorError, CoordinatorUnavailable, UnknownRequest

LEASE_S = 0.6

StartProcess = Callable[..., CoordinatorProcess]


def ignore(slot: int, settle_nonce: int) -> None:
    pass


class StoreByHand(MemoryStore):
    """Leases of 10 s by a clock that the test moves."""

    def __init__(self) -> None:
        super().__init__(10.0, clock=lambda: self.now)
        self.now = 0.0
        self.beaten = asyncio.Event()

    async def beat(self, worker_id: str, epoch: int) -> bool:
        known = await super().beat(worker_id, epoch)
        self.beaten.set()
        return known

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tick()


@pytest.fixture
async def session(client: CoordinatorClient) -> AsyncIterator[Session]:
    session = await Session.join(client, make_card(), ignore)
    yield session
    await session.close()


async def test_it_says_where_it_stands(session: Session, coordinator: Coordinator) -> None:
    at = coordinator.address
    assert repr(session) == f"Session('prefill' epoch 1 joined at {at}, 0 offers)"
    await session.offer(make_offer("r"))
    await session.close()
    assert repr(session) == f"Session('prefill' epoch 1 closed at {at}, 1 offers)"
    with pytest.raises(CoordinatorError, match="closed"):
        await session.offer(make_offer("r"))


async def test_leaving_ends_the_membership(session: Session, client: CoordinatorClient) -> None:
    assert [card.worker_id for card in await client.workers()] == ["prefill"]
    await session.close()
    await session.close()
    assert await client.workers() == []


async def test_the_granted_epoch_is_in_the_card(session: Session, client: CoordinatorClient) -> None:
    second = await Session.join(client, make_card(epoch=1, process=2), ignore)
    assert second.card.epoch == 2
    await second.close()


async def test_a_settle_through_the_coordinator_reaches_the_worker(client: CoordinatorClient) -> None:
    settled: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    session = await Session.join(client, make_card(), lambda *seat: settled.put_nowait(seat))
    await client.settle(SettleOrder("prefill", 1, 7, 2**63))
    assert await settled.get() == (7, 2**63)
    await session.close()


async def test_a_beating_worker_outlives_its_lease_and_a_silent_one_does_not() -> None:
    store = StoreByHand()
    coordinator = Coordinator(store, LEASE_S)
    async with CoordinatorClient(await coordinator.start()) as client:
        session = await Session.join(client, make_card("beats"), ignore)
        await client.join(make_card("silent"))
        for _ in range(3):
            store.beaten.clear()
            await store.beaten.wait()
            store.pass_time(6.0)
        assert [card.worker_id for card in await client.workers()] == ["beats"]
        await session.close()
    await coordinator.close()


async def test_an_epoch_is_not_shared_by_two_processes(session: Session, client: CoordinatorClient) -> None:
    other = await Session.join(client, make_card(epoch=1, process=2), ignore)
    with pytest.raises(UnknownRequest, match="for epoch 1, and epoch 2 is running"):
        await session.offer(make_offer("r"))
    session._doubt.set()  # as the next beat would find out
    await until(lambda: session.state is SessionState.REPLACED)
    with pytest.raises(Replaced, match="give each process its own"):
        await session.offer(make_offer("r"))
    assert (await client.worker("prefill")).epoch == 2
    assert other.state is SessionState.JOINED
    await session.close()
    assert [card.epoch for card in await client.workers()] == [2], (
        "the replaced one does not leave for the other"
    )
    await other.close()


async def test_a_killed_coordinator_loses_neither_worker_nor_offer(coordinator_process: StartProcess) -> None:
    process = coordinator_process()
    async with CoordinatorClient(process.address) as prefill, CoordinatorClient(process.address) as decode:
        session = await Session.join(prefill, make_card(epoch=9), ignore)
        offers = [make_offer(f"r{number}", epoch=9) for number in range(50)]
        for offer in offers:
            await session.offer(offer)
        session.forget("r49")
        process.restart()
        claimed = await asyncio.gather(*(decode.claim(offer.request_id, 30.0) for offer in offers[:49]))
        assert claimed == [[offer.ticket] for offer in offers[:49]]
        assert (await decode.worker("prefill")).epoch == 9
        with pytest.raises(UnknownRequest):
            await decode.claim("r49", timeout_s=0.0)
        await session.close()


async def test_after_a_loss_idle_workers_take_their_time_and_those_with_an_offer_do_not(
    coordinator_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[tuple[float, float]] = []

    def most(least: float, most: float) -> float:
        spread.append((least, most))
        return 600.0 if least == 0.0 else least  # the others are delays before asking once more

    monkeypatch.setattr(random, "uniform", most)
    coordinator = coordinator_process(600.0)
    async with CoordinatorClient(coordinator.address) as client:
        idle, busy = [
            await Session.join(client, make_card(name, process=number), ignore)
            for number, name in enumerate(("idle", "busy"), 1)
        ]
        coordinator.restart()
        await until(lambda: spread.count((0.0, 3.0)) == 2)
        await busy.offer(make_offer("r", "busy"), timeout_s=20.0)
        await until(lambda: busy.num_rejoins == 1)
        assert busy.state is SessionState.JOINED
        assert (idle.num_rejoins, idle.state) == (0, SessionState.REJOINING)
        await idle.close()
        await busy.close()


async def test_a_claim_that_waits_survives_the_coordinator(coordinator_process: StartProcess) -> None:
    process = coordinator_process()
    async with CoordinatorClient(process.address) as prefill, CoordinatorClient(process.address) as decode:
        session = await Session.join(prefill, make_card(), ignore)
        claim = asyncio.create_task(decode.claim("r", timeout_s=30.0))
        await until(lambda: holds(prefill, "waiting_claims"))
        process.restart()
        await session.offer(make_offer("r"), timeout_s=30.0)
        assert await claim == [make_offer("r").ticket]
        await session.close()


async def test_restarts_under_load_lose_no_hand_off(coordinator_process: StartProcess) -> None:
    process = coordinator_process()
    async with CoordinatorClient(process.address) as prefill, CoordinatorClient(process.address) as decode:
        session = await Session.join(prefill, make_card(), ignore)
        done = 0

        async def hand_off(request_id: str) -> None:
            nonlocal done
            offer = make_offer(request_id)
            await session.offer(offer, timeout_s=60.0)
            assert await decode.claim(request_id, timeout_s=60.0) == [offer.ticket]
            session.forget(request_id)
            done += 1

        async def lane(number: int) -> None:
            for count in range(60):
                await hand_off(f"{number}-{count}")

        load = asyncio.gather(*map(lane, range(4)))
        for milestone in (60, 120):
            await until(lambda milestone=milestone: done >= milestone)
            await asyncio.to_thread(process.restart)
        await load
        assert done == 240
        assert session.num_rejoins >= 2
        await until(lambda: session.state is SessionState.JOINED)
        await session.close()


async def test_a_stopped_coordinator_is_noticed_and_welcome_back(coordinator_process: StartProcess) -> None:
    process = coordinator_process(LEASE_S)
    async with CoordinatorClient(process.address) as client:
        session = await Session.join(client, make_card(), ignore)
        process.send(signal.SIGSTOP)
        await until(lambda: session.state is SessionState.REJOINING)
        with pytest.raises(CoordinatorUnavailable, match=r"'r' is not offered yet.*rejoining"):
            await session.offer(make_offer("r"), timeout_s=0.2)
        process.send(signal.SIGCONT)
        assert await client.claim("r") == [make_offer("r").ticket]  # sent as soon as the coordinator was back
        await until(lambda: session.state is SessionState.JOINED)
        await session.close()


async def test_closing_while_the_coordinator_is_away_is_quick(coordinator_process: StartProcess) -> None:
    process = coordinator_process()
    async with CoordinatorClient(process.address) as client:
        session = await Session.join(client, make_card(), ignore)
        process.kill()
        await asyncio.wait_for(session.close(), 20.0)
        assert session.state is SessionState.CLOSED


_WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from control.cards import make_card, make_offer
from kvlink.control import CoordinatorClient, Session
async def main():
    session = await Session.join(CoordinatorClient(sys.argv[1]), make_card(process=int(sys.argv[3])), print)
    await session.offer(make_offer(sys.argv[4], epoch=session.card.epoch, ttl_s=600.0))
    print(session.card.epoch, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def start_worker(address: str, process: int, request_id: str) -> tuple[subprocess.Popen[str], int]:
    """Returns the process and its epoch once it has joined and offered."""
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-c", _WORKER, address, str(tests), str(process), request_id]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    return worker, int(worker.stdout.readline())


@pytest.mark.verify
async def test_a_worker_that_restarts_gets_a_new_epoch_and_its_old_tickets_are_refused(
    client: CoordinatorClient, coordinator: Coordinator
) -> None:
    first, epoch = await asyncio.to_thread(start_worker, coordinator.address, 1, "old")
    first.kill()
    first.communicate()
    second, next_epoch = await asyncio.to_thread(start_worker, coordinator.address, 2, "new")
    try:
        assert next_epoch == epoch + 1
        with pytest.raises(UnknownRequest, match=rf"'old'.*restarted as epoch {next_epoch}; recompute"):
            await client.claim("old", timeout_s=20.0)
        assert await client.claim("new") == [make_offer("new", epoch=next_epoch).ticket]
    finally:
        second.kill()
        second.communicate()


@pytest.mark.verify
async def test_a_stopped_worker_is_gone_and_comes_back_with_its_offers() -> None:
    store = StoreByHand()
    coordinator = Coordinator(store, LEASE_S)
    worker = None
    try:
        async with CoordinatorClient(await coordinator.start()) as client:
            worker, epoch = await asyncio.to_thread(start_worker, coordinator.address, 1, "r")
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
            store.pass_time(20.0)
            assert await client.workers() == []
            with pytest.raises(UnknownRequest, match="'prefill' stopped beating; recompute"):
                await client.claim("r")
            os.kill(worker.pid, signal.SIGCONT)
            await until(client.workers)
            await until(lambda: holds(client, "tickets"))
            assert (await client.worker("prefill")).epoch == epoch
            assert await client.claim("r") == [make_offer("r", epoch=epoch).ticket]
    finally:
        if worker is not None:
            worker.kill()
            worker.communicate()
        await coordinator.close()
