# SPDX-License-Identifier: Apache-2.0
"""The client's end of gRPC over the simulated network: channels and calls, as far as kvlink uses those of grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any, ClassVar

import grpc
import grpc.aio
from control_simulation.network import Connection, Network
from control_simulation.processes import Process

_CONNECT_S = 2.0
_BACKOFF_S = (0.1, 1.0)
WINDOW_BYTES = 64 << 10
"""A stream takes this many bytes before the other end reads any."""

Metadata = Sequence[tuple[str, str]]
_numbers = itertools.count(1)


def failure(code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


class Message(bytes):
    """A request of a method, which counts for as long as a server has it."""

    num_kept: ClassVar[Counter[str]] = Counter()
    """The bytes, by method."""
    path: str

    def __new__(cls, blob: bytes, path: str) -> Message:
        message = super().__new__(cls, blob)
        message.path = path
        Message.num_kept[path] += len(blob)
        return message

    def __del__(self) -> None:
        Message.num_kept[self.path] -= len(self)


class Inbox:
    """Messages of one direction of a call, until they are read; whoever writes waits while there are too many."""

    def __init__(self) -> None:
        self._blobs: deque[bytes] = deque()
        self._unread = 0
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.is_over = False

    def put(self, blob: bytes) -> None:
        self._blobs.append(blob)
        _wake(self._news)

    def end(self) -> None:
        """No more will come."""
        self.is_over = True
        _wake(self._news)
        _wake(self._room)

    async def get(self) -> bytes | None:
        """None: there are no more."""
        while not self._blobs:
            if self.is_over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        blob = self._blobs.popleft()
        self._unread -= len(blob)
        _wake(self._room)
        return blob

    async def room(self, blob: bytes) -> None:
        """Waits for room on the writer's side, before `blob` is sent."""
        while self._unread > WINDOW_BYTES and not self.is_over:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._unread += len(blob)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class ClientCall:
    """One call. It begins by itself; `end` is called once."""

    def __init__(self, channel: SimulatedChannel, path: str, metadata: Metadata | None) -> None:
        self.number = next(_numbers)
        self.path = path
        self.metadata = metadata or ()
        self.replies = Inbox()
        self.requests = Inbox()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status: tuple[grpc.StatusCode, str, Metadata] = (grpc.StatusCode.OK, "", ())
        self._channel = channel
        self._connection: Connection | None = None
        self._callbacks: list[Callable[[ClientCall], None]] = []
        self.asking: asyncio.Task[None] | None = None
        self._began = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        try:
            connection = await self._channel.connected(self)
        except OSError as error:
            words = f"failed to connect to all addresses; last error: {error}"
            self.end(grpc.StatusCode.UNAVAILABLE, words)
            return
        if self.done.done():
            return
        self._connection = connection
        connection.up.send(f"call {self.path}", partial(connection.server.begin, connection, self))

    def end(self, code: grpc.StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        if self.done.done():
            return
        self.status = code, details, trailers
        self.done.set_result(None)
        self.replies.end()
        self.requests.end()
        self._channel.forget(self)
        for callback in self._callbacks:
            callback(self)

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Ends it here, and lets the server know."""
        if not self.done.done():
            if self._connection is not None:
                number, calls = self.number, self._connection.calls
                self._connection.up.send("cancel", lambda: number in calls and calls[number].cancel())
            self.end(code, details)

    def error(self) -> grpc.aio.AioRpcError:
        return failure(*self.status)

    def add_done_callback(self, callback: Callable[[ClientCall], None]) -> None:
        self._callbacks.append(callback)
        if self.done.done():
            callback(self)

    def cancel(self) -> bool:
        self.give_up(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def write(self, blob: bytes) -> None:
        await asyncio.shield(self._began)
        if not self.done.done():
            await self.requests.room(blob)
        if self.done.done():
            raise self.error() if self.status[0] is not grpc.StatusCode.OK else asyncio.InvalidStateError()
        assert self._connection is not None
        request = Message(blob + self._channel.process.says_more, self.path)
        self._connection.up.send(f"request {len(blob)}", partial(self.requests.put, request))

    async def done_writing(self) -> None:
        await asyncio.shield(self._began)
        if self._connection is not None:
            self._connection.up.send("no more requests", self.requests.end)

    async def read(self) -> Any:
        blob = await self.replies.get()
        if blob is not None:
            return blob
        if self.status[0] is not grpc.StatusCode.OK:
            raise self.error()
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (blob := await self.read()) is not grpc.aio.EOF:
            yield blob

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata(*self.status[2])


class _UnaryCall:
    """One call with one reply, which is awaited."""

    def __init__(self, call: ClientCall, blob: bytes, timeout_s: float) -> None:
        self._call = call
        self._answer = self._answered(blob, timeout_s)
        self.add_done_callback = call.add_done_callback

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._answer.__await__()

    async def _answered(self, blob: bytes, timeout_s: float) -> bytes:
        call = self._call
        try:
            await asyncio.wait_for(self._exchange(blob), timeout_s)
        except asyncio.TimeoutError:
            call.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            raise call.error() from None
        finally:
            call.cancel()
        return await call.replies.get() or b""

    async def _exchange(self, blob: bytes) -> None:
        await self._call.write(blob)
        await asyncio.shield(self._call.done)
        if self._call.status[0] is not grpc.StatusCode.OK:
            raise self._call.error()


class SimulatedChannel:
    """The part of grpc.aio.Channel that kvlink uses, of one process to one address."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self.process = process
        self._address = address
        self._connecting: asyncio.Task[Connection] | None = None
        self._retry_at = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._calls: dict[ClientCall, None] = {}

    def unary_unary(self, path: str) -> Callable[..., Any]:
        return lambda blob, timeout, metadata=None: _UnaryCall(
            ClientCall(self, path, metadata), blob, timeout
        )

    def unary_stream(self, path: str) -> Callable[..., ClientCall]:
        def call(blob: bytes, metadata: Metadata | None = None) -> ClientCall:
            calling = ClientCall(self, path, metadata)

            async def ask() -> None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await calling.write(blob)

            calling.asking = asyncio.get_running_loop().create_task(ask())
            return calling

        return call

    def stream_stream(self, path: str) -> Callable[..., ClientCall]:
        return lambda metadata=None: ClientCall(self, path, metadata)

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()
        if self._connecting is not None and self._is_connected():
            self._connecting.result().close(self.process, "channel closed")

    def _is_connected(self) -> bool:
        attempt = self._connecting
        return (
            attempt is not None
            and attempt.done()
            and not attempt.cancelled()
            and attempt.exception() is None
            and attempt.result().is_open
        )

    async def connected(self, call: ClientCall) -> Connection:
        """Raises OSError."""
        self._calls[call] = None
        now = asyncio.get_running_loop().time()
        attempt = self._connecting
        if attempt is None or (attempt.done() and not self._is_connected() and now >= self._retry_at):
            attempt = self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(attempt)

    async def _connect(self) -> Connection:
        try:
            connection = await self._network.connect(self.process, self, self._address, _CONNECT_S)
        except OSError:
            self._retry_at = asyncio.get_running_loop().time() + self._backoff_s
            self._backoff_s = min(1.6 * self._backoff_s, _BACKOFF_S[1])
            raise
        self._backoff_s = _BACKOFF_S[0]
        return connection

    def forget(self, call: ClientCall) -> None:
        self._calls.pop(call, None)

    def broken(self, connection: Connection, why: str) -> None:
        """As of `End`."""
        for call in list(self._calls):
            if call._connection is connection:
                call.end(grpc.StatusCode.UNAVAILABLE, why)
