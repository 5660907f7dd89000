# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 pings: servers ask connections that have no call, and bear those that clients ask with."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator

import pytest
from control.processes import CoordinatorProcess

from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.rpc import channel, server
from kvlink.control.values import Watch
from kvlink.coordinator import Coordinator
from kvlink.errors import CoordinatorUnavailable

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
        """Sends so many at once, as a server that stood still finds them."""
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
