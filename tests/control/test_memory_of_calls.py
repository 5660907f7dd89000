# SPDX-License-Identifier: Apache-2.0
"""A call leaves no memory behind, however it ends and without a garbage collector."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.codec_values import METHODS
from control.raw import raw_channel
from control.uncollected import BROKEN, DENIED, TRANSPORT

from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient, Security
from kvlink.control.codec import AgentCalls, Method
from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.overview import Beat
from kvlink.control.security.host_tokens import Prover
from kvlink.control.values import (
    Claim,
    ConnectRequest,
    HandoffBatch,
    JoinRequest,
    Nothing,
    Prefix,
    PrefixChanges,
    PrefixQuery,
    Renewal,
    SettleOrder,
    Watch,
    WorkerEpoch,
)

MESSAGE_BYTES = 4 << 20
MOST_KEPT_BYTES = 32 << 20
BATCHES = 3
"""Each batch of calls adds what a call keeps. Only one of them adds what an allocator keeps for a thread."""
AT_ONCE = 4
KEYS = bytes(range(8)) * 2


class Servers(NamedTuple):
    coordinator: str
    agent: str
    pid: int

    def address_of(self, method: Method[Any, Any]) -> str:
        return self.agent if method.service == AgentCalls.SERVICE else self.coordinator

    def resident(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    program = Path(__file__).with_name("uncollected.py")
    path = os.pathsep.join((str(program.parents[1]), *sys.path))
    process = subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    yield Servers(*process.stdout.readline().split(), process.pid)
    process.communicate("")


def prefix(name: str, **changed: Any) -> Prefix:
    return Prefix(name, 60.0, 0, 1, bytes(16), 16, KEYS, b"ticket")._replace(**changed)


WORKER = WorkerEpoch("prefill", 1)
ANOTHER = WorkerEpoch("another", 1)
RESTARTED = WorkerEpoch("prefill", 9)
SETTLES = [SettleOrder(*worker, 1, 2) for worker in (WORKER, ANOTHER, RESTARTED)]
# Requests that are accepted, and others that are refused at each check behind the codec.
VALUES: dict[str, list[Any]] = {
    "Join": [JoinRequest(make_card()), JoinRequest(make_card(process=3), rejoin=True)],
    "KeepAlive": [Beat(*WORKER), Beat(*ANOTHER)],
    "Leave": [ANOTHER],
    "GetWorker": [WORKER, ANOTHER, RESTARTED],
    "ListWorkers": [Nothing()],
    "WatchWorkers": [Watch()],
    "Offer": [
        make_offer("once"),
        make_offer("r", "another"),
        make_offer("r", epoch=9),
        make_offer("once")._replace(num_ranks=3),
    ],
    "Claim": [Claim("r", 0.0), Claim("once", 0.0, 0, 2, b"again")],
    "Settle": SETTLES,
    "Handoffs": [
        HandoffBatch(
            [make_offer("s"), make_offer("s", "another")], SETTLES, [Claim("s", 0.0), Claim("t", 0.0)], ()
        ),
    ],
    "PublishPrefixes": [
        PrefixChanges(*WORKER, (prefix("p"),), ("q",)),
        PrefixChanges(*ANOTHER),
        PrefixChanges(*RESTARTED),
    ],
    "FindPrefix": [PrefixQuery(bytes(16), 16, KEYS), PrefixQuery(bytes(16), 16, KEYS, worker_id="other")],
    "Status": [Nothing()],
    "Overview": [Nothing()],
    "GetCard": [Nothing()],
    "Connect": [
        ConnectRequest(*WORKER, TRANSPORT, (b"hello",), True),
        ConnectRequest(*WORKER, "carrier pigeon", (b"hello",), True),
        ConnectRequest(*WORKER, BROKEN, (b"hello",), True),
        ConnectRequest(*ANOTHER, TRANSPORT, (b"hello",), True),
    ],
    "SettleSeat": SETTLES,
    "RenewSeats": [Renewal(*worker, [(1, 2)]) for worker in (WORKER, ANOTHER)],
    "Drain": [WORKER, ANOTHER],
}
PADDING = b"\xc2\x3e" + b"\x80\x80\x80\x02" + bytes(MESSAGE_BYTES)
"""A field of MESSAGE_BYTES that no message has, so that every request is as large."""


def requests(method: Method[Any, Any]) -> list[bytes]:
    """Returns large requests: those of VALUES, one that is cut off, and one with names that are not UTF-8."""
    found = [method.request.encode(value) + PADDING for value in VALUES[method.name]]
    return [*found, PADDING[:-1], PADDING + b"\x0a\x02\xff\xff"]


Call = Callable[[], Awaitable[Any]]
Ending = Callable[[Any, Servers, Method[Any, Any], bytes], Awaitable[None]]
STREAMS = {Calls.KEEP_ALIVE.name, Calls.HANDOFFS.name}
STREAMED = {*STREAMS, Calls.WATCH_WORKERS.name}


def begin(channel: Any, method: Method[Any, Any], blob: bytes, metadata: Any = ()) -> Any:
    """Begins a call of any kind, which sends one message, and returns it."""
    if method.name in STREAMS:
        return channel.stream_stream(method.path)(iter([blob]), metadata=metadata)
    kind = channel.unary_stream if method.name == Calls.WATCH_WORKERS.name else channel.unary_unary
    return kind(method.path)(blob, metadata=metadata)


async def answered(channel: Any, method: Method[Any, Any], blob: bytes, metadata: Any = ()) -> None:
    """Waits until the server accepts or refuses the call: a watch is ended after its first reply."""
    call = begin(channel, method, blob, metadata)
    try:
        if method.name in STREAMS:
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await (call.read() if method.name == Calls.WATCH_WORKERS.name else call)
    except grpc.aio.AioRpcError:
        pass
    call.cancel()


async def end_at_the_server(channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes) -> None:
    await answered(channel, method, blob)


async def deny(channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes) -> None:
    await answered(channel, method, blob, [("authorization", f"Bearer {DENIED}")])


async def ask_as_a_stranger(channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes) -> None:
    async with grpc.aio.insecure_channel(servers.address_of(method)) as own:
        await answered(own, method, blob)


async def cancel(channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes) -> None:
    call = begin(channel, method, blob)
    await asyncio.sleep(0)
    call.cancel()


async def cancel_while_it_waits(
    channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes
) -> None:
    """Claims wait for an offer, and streams for their peer."""
    claim = Claim("never", 60.0)
    waiting = {Calls.CLAIM: claim, Calls.HANDOFFS: HandoffBatch([], [], [claim], ())}
    if method in waiting:
        call = begin(channel, method, method.request.encode(waiting[method]) + PADDING)
        async with CoordinatorClient(servers.coordinator) as client:
            while not (await client.status()).waiting_claims:
                pass
    else:
        call = begin(channel, method, blob)
        await call.read()
    call.cancel()


async def cut(channel: Any, servers: Servers, method: Method[Any, Any], blob: bytes) -> None:
    """Closes the connection when half of the message has passed."""
    host, port = split_address(servers.address_of(method))
    gone = asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection(host, port)
        back = asyncio.ensure_future(_copied(upstream[0], writer, 1 << 40))
        await _copied(reader, upstream[1], MESSAGE_BYTES // 2)
        back.cancel()
        for each in (writer, upstream[1]):
            each.transport.abort()
        gone.set()

    between = await asyncio.start_server(forward, "127.0.0.1", 0)
    tokens = Security().host_tokens()
    assert tokens is not None
    port_between = between.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port_between}") as own:
        call = begin(own, method, blob, Prover(tokens, port)().sent)
        await gone.wait()
        call.cancel()
    between.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int) -> None:
    while most > 0 and (some := await reader.read(min(most, 1 << 16))):
        most -= len(some)
        writer.write(some)
        await writer.drain()


ENDINGS: tuple[Ending, ...] = (end_at_the_server, deny, ask_as_a_stranger, cancel, cut)
WAITING = (Calls.CLAIM, Calls.HANDOFFS, Calls.KEEP_ALIVE, Calls.WATCH_WORKERS)
MANY = (pytest.mark.verify, pytest.mark.timeout(300))
CASES = [
    *((method, ending, 20, ()) for method in METHODS for ending in ENDINGS),
    *((method, cancel_while_it_waits, 20, ()) for method in WAITING),
    *((method, end_at_the_server, 1_000, MANY) for method in METHODS),
]


@pytest.mark.parametrize(
    ("method", "ending", "num_calls"),
    [
        pytest.param(
            method, ending, num_calls, id=f"{method.name}-{ending.__name__}-{num_calls}", marks=marks
        )
        for method, ending, num_calls, marks in CASES
    ],
)
async def test_a_call_leaves_nothing_behind(
    servers: Servers, method: Method[Any, Any], ending: Ending, num_calls: int
) -> None:
    async with (
        raw_channel(servers.address_of(method)) as channel,
        raw_channel(servers.coordinator) as joining,
    ):
        await answered(joining, Calls.JOIN, Calls.JOIN.request.encode(JoinRequest(make_card())))
        blobs = requests(method) if ending is end_at_the_server else requests(method)[:1]

        async def call(rounds: int) -> None:
            for blob in blobs * rounds:
                await asyncio.gather(*[ending(channel, servers, method, blob) for _ in range(AT_ONCE)])

        await call(1)
        grown = [await _grown(servers, call, -(-num_calls // AT_ONCE // len(blobs)))]
        while grown[-1] >= MOST_KEPT_BYTES and len(grown) < BATCHES:
            grown.append(await _grown(servers, call, -(-num_calls // AT_ONCE // len(blobs))))
    assert min(grown) < MOST_KEPT_BYTES


async def _grown(servers: Servers, call: Callable[[int], Awaitable[None]], rounds: int) -> int:
    before = servers.resident()
    await call(rounds)
    return servers.resident() - before
