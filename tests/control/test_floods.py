# SPDX-License-Identifier: Apache-2.0
"""Calls that nobody expects: floods, and arbitrary bytes."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from control.certificates import Pki
from control.codec_values import EXAMPLES, METHODS
from control.test_instructions_of_calls import MOST, State
from control.watching import holds
from hypothesis import given, settings
from hypothesis import strategies as st
from transports.pools import fill, wide
from waiting import until

from kvlink import Worker, WorkerConfig
from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient, Limits, Security
from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.codec import Method
from kvlink.control.limits import HANDSHAKE_MS, MAX_CONNECTIONS
from kvlink.control.refusal import Overloaded
from kvlink.control.rpc import server
from kvlink.control.values import Claim
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.monitoring.status_page import serving
from kvlink.monitoring.status_page.serving import serve_status_page

STRANGERS = 200
TLS_CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303")
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SAYINGS = (
    b"",
    b"\0",
    TLS_CLIENT_HELLO,
    HTTP2_PREFACE[:9],
    HTTP2_PREFACE,
    os.urandom(64),
    b"GET / HTTP/1.1\r\n",
)


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        stack.callback(lambda: [each.close() for each in sockets])
        yield sockets


def crowd(sockets: list[socket.socket], address: str, number: int = STRANGERS) -> None:
    for index in range(number):
        sockets.append(socket.create_connection(split_address(address)))
        sockets[-1].send(SAYINGS[index % len(SAYINGS)])
        sockets[-1].setblocking(False)


def is_closed(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def with_options(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    options = dict(server._OPTIONS)
    for name, value in changed.items():
        assert f"grpc.{name}" in options
        options[f"grpc.{name}"] = value
    monkeypatch.setattr(server, "_OPTIONS", list(options.items()))


@pytest.fixture(params=["plaintext", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Security, Security]:
    pki = Pki(tmp_path)
    return (pki.coordinator(), pki.worker()) if request.param == "tls" else (Security(), Security())


async def test_strangers_at_a_coordinator_cost_nobody_anything(
    ends: tuple[Security, Security], strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they dribble, a worker joins and tickets go through; then those that never spoke are gone."""
    with_options(monkeypatch, server_handshake_timeout_ms=500)
    coordinator = Coordinator(security=ends[0])
    address = await coordinator.start()
    crowd(strangers, address)
    async with CoordinatorClient(address, security=ends[1]) as client:
        await client.join(make_card())
        for number in range(20):
            for stranger in strangers[number::20]:
                with ExitStack() as ignoring:
                    ignoring.push(lambda kind, *_: kind is not None and issubclass(kind, OSError))
                    stranger.send(b"\0")
            await client.offer(make_offer(f"r{number}"))
            assert await client.claim(f"r{number}", timeout_s=5.0)
        silent = strangers[:: len(SAYINGS)]
        await until(lambda: all(map(is_closed, silent)))
    await coordinator.close()


async def test_connections_beyond_the_limit_are_closed_and_make_room_when_they_go(
    ends: tuple[Security, Security], strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_options(monkeypatch, max_allowed_incoming_connections=8)
    coordinator = Coordinator(security=ends[0])
    address = await coordinator.start()
    for _ in range(20):
        strangers.append(socket.create_connection(split_address(address)))
        strangers[-1].setblocking(False)
    await until(lambda: sum(map(is_closed, strangers)) >= 12)
    for stranger in strangers:
        stranger.close()
    async with CoordinatorClient(address, timeout_s=20.0, security=ends[1]) as client:
        assert (await client.status()).workers == 0
    await coordinator.close()


def test_servers_have_limits() -> None:
    options = dict(server._OPTIONS)
    assert options["grpc.max_allowed_incoming_connections"] == MAX_CONNECTIONS < 1 << 16
    assert options["grpc.server_handshake_timeout_ms"] == HANDSHAKE_MS <= 30_000


@pytest.fixture
async def small() -> AsyncIterator[CoordinatorClient]:
    limits = Limits(workers=2, tickets_per_worker=3, ticket_bytes=200, waiting_claims=2)
    coordinator = Coordinator(MemoryStore(limits=limits))
    async with CoordinatorClient(await coordinator.start()) as client:
        await client.join(make_card("a"))
        await client.join(make_card("b", process=2))
        yield client
    await coordinator.close()


async def test_who_asks_for_too_much_is_told_so_and_others_are_served(small: CoordinatorClient) -> None:
    with pytest.raises(Overloaded, match="2 workers have joined"):
        await small.join(make_card("c", process=3))
    for number in range(3):
        await small.offer(make_offer(f"a{number}", "a"))
    with pytest.raises(Overloaded, match="worker 'a' has 3 unclaimed tickets"):
        await small.offer(make_offer("a3", "a"))
    await small.offer(make_offer("b0", "b"))
    waiting = [asyncio.create_task(small.claim(f"w{number}", 30.0)) for number in range(2)]
    await until(lambda: holds(small, "waiting_claims", 2))
    with pytest.raises(Overloaded, match="2 claims are waiting"):
        await small.claim("w2", timeout_s=0.2)
    for task in waiting:
        task.cancel()
    assert await small.claim("b0", timeout_s=1.0) == [make_offer("b0", "b").ticket]


async def test_large_tickets_are_bounded_together(small: CoordinatorClient) -> None:
    large = make_offer("r", "a")._replace(ticket=bytes(150))
    await small.offer(large)
    with pytest.raises(
        Overloaded, match="a ticket of worker 'b' does not fit into the coordinator's limit of 200 bytes"
    ):
        await small.offer(make_offer("s", "b")._replace(ticket=bytes(51)))
    await small.offer(large._replace(ticket=bytes(100)))
    await small.offer(make_offer("s", "b")._replace(ticket=bytes(100)))
    assert await small.claim("r", timeout_s=1.0) == [bytes(100)]
    await small.offer(make_offer("t", "b")._replace(ticket=bytes(100)))


@pytest.mark.verify
async def test_strangers_at_the_page_cost_the_coordinator_little(
    strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get some connections and a while, and there is room for who asks all the time."""
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 50)
    monkeypatch.setattr(serving, "CONNECTION_S", 2.0)
    coordinator = Coordinator()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        await asyncio.to_thread(crowd, strangers, url.removeprefix("http://"))
        async with ClientSession(url) as session, session.get("/metrics") as answer:
            assert "kvlink_coordinator_workers 0.0" in await answer.text()
        assert not all(map(is_closed, strangers)), "it did not wait for them to go"
        await until(lambda: sum(map(is_closed, strangers)) >= STRANGERS - 50)
        await until(lambda: all(map(is_closed, strangers)))
    await coordinator.close()


@pytest.mark.verify
def test_strangers_at_a_worker_cost_its_readers_nothing(strangers: list[socket.socket]) -> None:
    """At its agent and at its tcp port, before and while readers come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pool = wide(num_blocks=16)
    owner = Worker(pool.make(), "owner", transports="tcp", config=WorkerConfig(port=port))
    fill(owner.pool, 1)
    for address in (owner.card.agent, f"127.0.0.1:{port}"):
        crowd(strangers, address)
    with owner:
        for number in range(3):
            with Worker(pool.make(), f"reader {number}", transports="tcp") as reader:
                assert reader.pull(owner.offer(f"r{number}", [1, 2]), [1, 2]).wait(20)
                assert (reader.pool.numpy(0)[: 3 << 14] == owner.pool.numpy(0)[: 3 << 14])[1 << 14 :].all()
            crowd(strangers, f"127.0.0.1:{port}", 50)


MOST_KEPT_BYTES = 4 << 20
VALUES = {id(codec): values for codec, values in EXAMPLES}
SURROGATE = b"\xed\xa0\x80"
CHUNKS = st.sampled_from([SURROGATE, b"\xff" * 9, b"\0", b"\x80" * 10, b"\x0a\x03" + SURROGATE])


@st.composite
def blobs(draw: st.DrawFn, method: Method[Any, Any]) -> tuple[bytes, int]:
    """A valid message, most of the time with bytes cut out, changed or put in; and how often it is repeated.

    Hypothesis keeps what it drew, so the repeated message is made outside of it.
    """
    values = VALUES.get(id(method.request))
    blob = bytearray(method.request.encode(draw(values)) if values is not None else b"")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(blob)))
        blob[at : at + draw(st.integers(0, 4))] = draw(CHUNKS | st.binary(max_size=4))
    return bytes(blob), draw(st.sampled_from([1, 1, 1, 200]))


async def call(method: Method[Any, Any], messages: list[bytes]) -> None:
    state = State()
    await state.store.start()
    try:
        await state.serve(method, messages)
        assert state.steps.most <= MOST
        await state.store.join(state.card, False)
        await state.call(Calls.OFFER, make_offer("honest"))
        answer = await state.call(Calls.CLAIM, Claim("honest", 0.0))
        assert answer.code is grpc.StatusCode.OK
        assert Calls.CLAIM.reply.decode(answer.replies[0]) == [make_offer("honest").ticket]
    finally:
        await state.close()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_any_bytes(method: Method[Any, Any]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(blobs(method), min_size=1, max_size=2))
    def run(messages: list[tuple[bytes, int]]) -> None:
        asyncio.run(call(method, [blob * times for blob, times in messages]))

    run()
    tracemalloc.start()
    run()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < MOST_KEPT_BYTES
