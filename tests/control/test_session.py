# SPDX-License-Identifier: Apache-2.0
"""Sessions of a worker: joining, beats and pings, settles, and what ends a session."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.processes import CoordinatorProcess
from control.replicas import LEASE_S, MEMBERSHIP, Replica, joined
from control.watching import holds
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run, virtual
from waiting import until

from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient, Session, SessionState, SettleOrder
from kvlink.control.beats import Beats
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.refusal import Replaced
from kvlink.control.rpc import channel, server
from kvlink.control.values import Membership, Watch
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import CoordinatorError, CoordinatorUnavailable, UnknownRequest
from kvlink.runtime.supervised import failures

SHORT_LEASE_S = 0.6

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
    coordinator = Coordinator(store, SHORT_LEASE_S)
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
    process = coordinator_process(SHORT_LEASE_S)
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
    coordinator = Coordinator(store, SHORT_LEASE_S)
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


def test_nothing_is_given_up_while_no_beat_is_under_way() -> None:
    beats = Beats(MEMBERSHIP, 100.0)
    assert beats.give_up_at() == math.inf
    beats.sent(100.0)
    beats.answered()
    assert beats.give_up_at() == math.inf


def test_patience_counts_from_when_the_answered_beat_was_sent() -> None:
    beats = Beats(MEMBERSHIP, 0.0)
    for now in (0.0, 2.5, 5.0):
        beats.sent(now)
    assert beats.give_up_at() == pytest.approx(20 / 3)
    beats.answered()
    assert beats.give_up_at() == pytest.approx(20 / 3)
    beats.answered()
    assert beats.give_up_at() == pytest.approx(2.5 + 20 / 3)


@given(st.lists(st.floats(0.0, 5.0), max_size=12), st.integers(0, 12), st.floats(0.0, 30.0))
def test_who_gives_up_has_a_third_of_the_lease_left(gaps: list[float], answers: int, later: float) -> None:
    """The coordinator renewed the lease when the beat arrived, which was not before it was sent."""
    beats, now, sent = Beats(MEMBERSHIP, 0.0), 0.0, [0.0]
    for gap in gaps:
        now += gap
        beats.sent(now)
        sent.append(now)
    for _ in range(min(answers, len(gaps))):
        beats.answered()
    renewed = sent[min(answers, len(gaps))]
    if answers < len(gaps):
        assert beats.give_up_at() <= renewed + LEASE_S * 2 / 3
    assert now + later + beats.spread_s(now + later) <= max(renewed + LEASE_S, now + later)


@pytest.mark.parametrize(
    ("keep_alive_s", "lease_s", "waited_s", "spread_s"),
    [(2.5, 10.0, 0.0, 2.5), (2.5, 10.0, 6.0, 2.0), (9.0, 30.0, 0.0, 3.0), (2.5, 10.0, 10.5, 0.0)],
    ids=["a beat", "half of what is left of the lease", "a bound", "no time left"],
)
def test_who_rejoins_waits_so_long_at_most(
    keep_alive_s: float, lease_s: float, waited_s: float, spread_s: float
) -> None:
    assert Beats(Membership(1, lease_s, keep_alive_s), 5.0).spread_s(5.0 + waited_s) == spread_s


@pytest.mark.parametrize("hangs_after", [0.0, 1.0, 2.4, 2.6, 7.0, 1234.5])
@virtual
async def test_it_has_joined_another_before_its_lease_ends(hangs_after: float) -> None:
    first, second = Replica(), Replica()
    session = await joined(first, second)
    await asyncio.sleep(hangs_after)
    first.hangs = True
    await asyncio.sleep(2 * LEASE_S)
    (at,) = second.joined
    renewed = max(first.beaten, default=0.0)
    assert renewed + LEASE_S / 2 < at < renewed + LEASE_S * 0.7
    assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
    await session.close()


@pytest.mark.parametrize("seed", range(20))
def test_idle_workers_of_a_lone_coordinator_spread_within_their_leases(seed: int) -> None:
    async def main() -> list[float]:
        random.seed(seed)
        only = Replica()
        sessions = [await joined(only) for _ in range(8)]
        await asyncio.sleep(1.0)
        only.hangs = True
        await asyncio.sleep(5.0)
        only.hangs = False  # what was sent meanwhile is lost with its connection
        await asyncio.sleep(LEASE_S)
        again = only.joined[8:]
        assert len(again) == 8
        for session in sessions:
            await session.close()
        return again

    again = run(main)
    assert max(again) <= LEASE_S
    assert max(again) - min(again) > 0.3, "they come one after the other"


@virtual
async def test_a_coordinator_that_is_slow_is_kept() -> None:
    first, second = Replica(), Replica()
    session = await joined(first, second)
    for _ in range(100):
        await asyncio.sleep(3.0)
        first.hangs = True
        await asyncio.sleep(4.0)
        first.go_on()
    assert (second.joined, session.num_rejoins) == ([], 0)
    await session.close()


@virtual
async def test_a_session_whose_world_is_silent_says_so() -> None:
    first = Replica()
    session = await joined(first)
    before = failures().get("session")
    first.hangs = True
    await asyncio.sleep(60.0)
    assert session.state is SessionState.REJOINING
    assert failures().get("session") == before, "a silent coordinator is not an error of the session"
    first.go_on()
    await asyncio.sleep(10.0)
    assert session.state is SessionState.JOINED
    await session.close()


_SETTINGS, _PING, _GOAWAY = 4, 6, 7
_ACK = 1


def frame(kind: int, flags: int = 0, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 0]) + body


class Peer:
    """One connection that speaks frames."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_connection(split_address(address))
        self._socket.settimeout(30)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields kind, flags and body of incoming frames, and acknowledges settings, as gRPC waits for that."""
        while head := self._file.read(9):
            kind, flags, body = head[3], head[4], self._file.read(int.from_bytes(head[:3], "big"))
            if kind == _SETTINGS and not flags & _ACK:
                self.send(frame(_SETTINGS, _ACK))
            yield kind, flags, body

    def settle(self) -> bytes:
        """Exchanges settings, after whatever was sent before. Returns why the server hangs up; b"": it does not."""
        self.send(frame(_SETTINGS))
        for kind, flags, body in self.frames():
            if kind == _GOAWAY:
                return body
            if kind == _SETTINGS and flags & _ACK:
                break
        return b""

    def pings(self, count: int) -> None:
        """Sends so many at once, as a server that was stopped finds them."""
        self.send(*(frame(_PING, body=number.to_bytes(8, "big")) for number in range(count)))


async def test_pings_that_lay_in_the_socket_are_no_flood(coordinator: Coordinator) -> None:
    with Peer(coordinator.address) as peer:
        peer.pings(8)
        for _ in range(5):
            assert await asyncio.to_thread(peer.settle) == b""


async def test_a_flood_is_one(coordinator: Coordinator) -> None:
    with Peer(coordinator.address) as peer:
        assert await asyncio.to_thread(peer.settle) == b""
        peer.pings(30)
        (why,) = await asyncio.to_thread(
            lambda: [body for kind, _, body in peer.frames() if kind == _GOAWAY][:1]
        )
        assert why.endswith(b"too_many_pings")


def test_clients_ask_less_often_than_servers_bear() -> None:
    ours, theirs = dict(channel._OPTIONS), dict(server._OPTIONS)
    every_ms = int(ours["grpc.keepalive_time_ms"])
    assert every_ms >= 2 * int(theirs["grpc.http2.min_recv_ping_interval_without_data_ms"])
    for options in (ours, theirs):
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]


@pytest.mark.verify
async def test_peers_without_a_call_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**dict(server._OPTIONS), "grpc.keepalive_time_ms": 200}
    monkeypatch.setattr(server, "_OPTIONS", list(options.items()))
    coordinator = Coordinator()
    with Peer(await coordinator.start()) as peer:

        def answered() -> int:
            count = 0
            for kind, flags, body in peer.frames():
                if kind == _PING and not flags & _ACK:
                    peer.send(frame(_PING, _ACK, body))
                    count += 1
                if count == 5:
                    break
            return count

        assert await asyncio.to_thread(answered) == 5
    await coordinator.close()


@pytest.mark.verify
async def test_a_peer_that_has_vanished_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**dict(server._OPTIONS), "grpc.keepalive_time_ms": 200, "grpc.http2.ping_timeout_ms": 300}
    monkeypatch.setattr(server, "_OPTIONS", list(options.items()))
    coordinator = Coordinator()
    with Peer(await coordinator.start()) as peer:
        await asyncio.to_thread(list, peer.frames())  # ends when the server hangs up
    await coordinator.close()


@pytest.mark.verify
async def test_a_stream_of_a_coordinator_that_stands_still_ends(
    coordinator_process: Callable[..., CoordinatorProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**dict(channel._OPTIONS), "grpc.keepalive_time_ms": 200, "grpc.http2.ping_timeout_ms": 300}
    monkeypatch.setattr(channel, "_OPTIONS", list(options.items()))
    process = coordinator_process()
    async with CoordinatorClient(process.address) as client:
        changes = client._channel.receive(CoordinatorCalls.WATCH_WORKERS, Watch())
        assert await anext(changes) == []
        process.send(signal.SIGSTOP)
        with pytest.raises(CoordinatorUnavailable, match="ping timeout"):
            await anext(changes)
        process.send(signal.SIGCONT)
