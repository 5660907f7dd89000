# SPDX-License-Identifier: Apache-2.0
"""The loops of kvlink/control."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from control.cards import make_offer
from control.fake_etcd import FakeEtcd
from control.replicas import LEASE_S, Replica, joined
from loops.rows import FailingOnce, Unexpected, failing, passes, scene

from kvlink.control import SessionState, agent
from kvlink.control.agent import AgentClients
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.rpc import call_spans
from kvlink.control.rpc.eager_future import EagerFuture, eagerly
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.rpc.stream import Stream
from kvlink.control.security.reloading_channel import _Connection
from kvlink.control.values import HandoffResults, Push, PushKind
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.errors import CoordinatorUnavailable


@scene("session")
async def a_session() -> None:
    replica = Replica()
    session = await joined(replica)
    with failing(session, "_listen"):
        session._doubt.set()
        await passes(LEASE_S)
    num_beats = len(replica.beaten)
    await passes(LEASE_S)
    assert session.state is SessionState.JOINED
    assert len(replica.beaten) > num_beats
    await session.close()


@scene("session settles")
async def settles_of_a_session() -> None:
    replica, on_settle = Replica(), FailingOnce()
    session = await joined(replica, on_settle=on_settle)
    await passes(1.0)
    for slot in (1, 2):
        replica.streams[0].pushes.put_nowait(Push(PushKind.SETTLE, slot, 7))
    await passes(LEASE_S)
    assert on_settle.calls == [(2, 7)]
    assert len(replica.joined) == 1, "it costs no membership"
    await session.close()


class _Peer:
    """Stands for the gRPC stream of handoffs."""

    def __init__(self) -> None:
        self.results: asyncio.Queue[HandoffResults | None] = asyncio.Queue()
        self.sent: list[bytes] = []

    async def send_bytes(self, blob: bytes) -> None:
        self.sent.append(blob)

    async def receive(self) -> HandoffResults | None:
        return await self.results.get()

    def cancel(self) -> None:
        pass


async def _answers_after(failed: _Peer) -> None:
    stream = HandoffStream(cast(Any, failed))
    with pytest.raises(CoordinatorUnavailable, match="open another"):
        await stream.offer(make_offer("first"))
    with pytest.raises(CoordinatorUnavailable, match="open another"):
        stream.offer(make_offer("second"))
    await stream.close()
    peer = _Peer()
    async with HandoffStream(cast(Any, peer)) as other:
        peer.results.put_nowait(HandoffResults(1, 0, [], []))
        await other.offer(make_offer("first"))


@scene("handoff sender")
async def a_sender_of_handoffs() -> None:
    peer = _Peer()
    with failing(peer, "send_bytes"):
        await _answers_after(peer)


@scene("handoff receiver")
async def a_receiver_of_handoffs() -> None:
    peer = _Peer()
    with failing(peer, "receive"):
        await _answers_after(peer)


@scene("stream ended")
async def a_stream() -> None:
    etcd = FakeEtcd()
    store = EtcdStore("etcd://127.0.0.1:1/fleet", trust=etcd)
    with failing(Stream, "_note_ending"):
        await store.start()
        etcd.cut()
        await passes()
    assert await store.workers() == []
    await store.close()


@scene("eager future")
async def an_eager_future() -> None:
    heard = FailingOnce()
    for number in (1, 2):
        answer: EagerFuture[int] = eagerly(asyncio.sleep(0, number))
        answer.on_answer = heard
        assert await answer == number
    waiting: EagerFuture[int] = EagerFuture()
    waiting.on_cancel = FailingOnce()
    assert waiting.cancel()
    assert len(heard.calls) == 1


@scene("call spans")
async def spans_of_calls() -> None:
    followed = FailingOnce()
    answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
    with mock.patch.object(call_spans, "_followed", followed):
        call_spans.follow(CoordinatorCalls.OFFER, [make_offer("r"), make_offer("s")], answers)
    for answer in answers:
        answer.set_result(None)
    await passes()
    assert [args[1].request_id for args in followed.calls] == ["s"]


class _Channel:
    """Stands for a gRPC channel, whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[None]] = []
        self.closed = 0

    def unary_unary(self, path: str) -> Any:
        def call() -> asyncio.Future[None]:
            self.calls.append(asyncio.get_running_loop().create_future())
            return self.calls[-1]

        return call

    async def close(self) -> None:
        self.closed += 1


async def _retired(connection: _Connection) -> None:
    channel = cast(_Channel, connection.channel)
    connection.start("unary_unary", "/call")
    connection.retire()
    channel.calls[-1].set_result(None)
    await passes()


@scene("call ended")
async def a_call_of_a_retired_channel() -> None:
    with failing(_Connection, "_ended"):
        await _retired(_Connection(cast(Any, _Channel())))
        channel = _Channel()
        await _retired(_Connection(cast(Any, channel)))
    assert channel.closed == 1


@scene("retired channel")
async def a_retired_channel() -> None:
    channel = _Channel()
    with failing(channel, "close"):
        await _retired(_Connection(cast(Any, channel)))
        await _retired(_Connection(cast(Any, channel)))
    assert channel.closed == 1


@scene("unused client")
async def clients_of_agents() -> None:
    closed: list[str] = []

    class Client:
        def __init__(self, address: str, security: object) -> None:
            self.address = address

        async def close(self) -> None:
            if self.address == "first":
                raise Unexpected
            closed.append(self.address)

    time = SimpleNamespace(now=0.0)
    with mock.patch.object(agent, "AgentClient", Client):
        clients = AgentClients(clock=lambda: time.now)
        for address in ("first", "second", "third"):
            assert clients[address]
            time.now += 301.0
            await passes()
        assert closed == ["second"]
        await clients.close()
