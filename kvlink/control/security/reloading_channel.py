# SPDX-License-Identifier: Apache-2.0
"""Provides client channels whose certificates are reloaded, and channels whose both ends prove a token in each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvlink.control.refusal import REASON_TRAILER, Reason
from kvlink.control.security.host_tokens import Metadata, not_proven
from kvlink.runtime.supervised import guarded, start_job

Options = Sequence[tuple[str, Any]]


class ProvingChannel:
    """Implements the part of grpc.aio.Channel that kvlink uses.

    It adds the metadata of `prove` to every call, and believes only answers of a server that proves itself, too. With
    `believes_all`, any answer is believed, because plaintext is allowed everywhere.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        prove: Callable[[], Metadata],
        address: str,
        *,
        believes_all: bool = False,
    ) -> None:
        self._channel = channel
        self._prove = prove
        self._address = address
        self._believes_all = believes_all

    def unary_unary(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, self._channel.unary_unary(path, *codecs, **rest))

    def unary_stream(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, self._channel.unary_stream(path, *codecs, **rest))

    def stream_stream(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, self._channel.stream_stream(path, *codecs, **rest))

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        await self._channel.close()

    def _start(self, method: Any, *request: Any, metadata: Any = None, **rest: Any) -> Any:
        proof = self._prove()
        call = method(*request, metadata=(*(metadata or ()), *proof.sent), **rest)
        return call if self._believes_all else _ProvenCall(call, proof, self._address)


class _ProvenCall:
    """Implements the part of a call of grpc.aio that kvlink uses. Replies and refusals must be proven to be believed.

    Errors that gRPC makes, and the refusal to answer this caller, tell nothing that another program could gain by.
    """

    def __init__(self, call: Any, proof: Metadata, address: str) -> None:
        self._call = call
        self._proof = proof
        self._address = address
        self._is_proven = False
        self._failure: grpc.aio.AioRpcError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._reply().__await__()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        while (reply := await self.read()) is not grpc.aio.EOF:
            yield reply

    async def read(self) -> Any:
        """Implements the method of a streaming call."""
        if not self._is_proven and not await self._prove():
            raise await self._ending() if self._call.done() else self._unproven()
        return await self._call.read()

    async def code(self) -> grpc.StatusCode:
        """Implements the method of grpc.aio.Call, as the following ones do."""
        return (await self._ending()).code()

    async def details(self) -> str | None:
        return (await self._ending()).details()

    async def trailing_metadata(self) -> Any:
        return (await self._ending()).trailing_metadata()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(lambda _: callback(self))

    async def _reply(self) -> bytes:
        try:
            reply: bytes = await self._call
        except grpc.aio.AioRpcError as error:
            raise self._believed(error) from None
        if not await self._prove():
            raise self._unproven()
        return reply

    async def _prove(self) -> bool:
        self._is_proven = self._proof.is_proven(await self._call.initial_metadata())
        return self._is_proven

    async def _ending(self) -> grpc.aio.AioRpcError:
        if self._failure is not None:
            return self._failure
        call = self._call
        code, details = await call.code(), await call.details()
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        return self._believed(grpc.aio.AioRpcError(code, initial, trailing, details))

    def _believed(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns the error, or another one in place of a refusal that is not proven."""
        reason = str(dict(error.trailing_metadata() or ()).get(REASON_TRAILER, ""))
        is_told = reason not in ("", Reason.DENIED.name, Reason.NOT_READY.name)
        is_ok = error.code() is grpc.StatusCode.OK
        if (is_told or is_ok) and not self._proof.is_proven(error.initial_metadata()):
            return self._unproven()
        return error

    def _unproven(self) -> grpc.aio.AioRpcError:
        reason = Reason.DENIED
        self._failure = grpc.aio.AioRpcError(
            grpc.StatusCode[reason.status],
            grpc.aio.Metadata(),
            grpc.aio.Metadata((REASON_TRAILER, reason.name)),
            not_proven(self._address),
        )
        self._call.cancel()
        return self._failure


class _Connection:
    """Counts the calls that run on one connection. After `retire`, it closes when the last call ends."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._methods: dict[str, Any] = {}
        self._running = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    def start(self, kind: str, path: str, *request: Any, **rest: Any) -> Any:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = getattr(self.channel, kind)(path)
        call = method(*request, **rest)
        self._running += 1
        call.add_done_callback(guarded("call ended", self._ended))
        return call

    def retire(self) -> None:
        self._retired = True
        self._close_if_idle()

    def is_closed(self) -> bool:
        return self._closing is not None and self._closing.done()

    def _ended(self, _: object) -> None:
        self._running -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self._running and self._closing is None:
            self._closing = start_job("retired channel", self.channel.close())


class ReloadingChannel:
    """Implements the part of grpc.aio.Channel that kvlink uses. Belongs to the event loop it is used on.

    It calls `version()` for every call, and `connect()` for another channel when the version has changed.
    """

    def __init__(self, version: Callable[[], object], connect: Callable[[], Any]) -> None:
        self._version = version
        self._connect = connect
        self._made_of = version()
        self._connections = [_Connection(connect())]

    def unary_unary(self, path: str) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, "unary_unary", path)

    def unary_stream(self, path: str) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, "unary_stream", path)

    def stream_stream(self, path: str) -> Callable[..., Any]:
        """Implements the method of grpc.aio.Channel."""
        return partial(self._start, "stream_stream", path)

    async def close(self) -> None:
        """Cancels running calls, also those on retired connections. Closing again has no effect."""
        for connection in self._connections:
            await connection.channel.close()

    def _start(self, kind: str, path: str, *request: Any, **rest: Any) -> Any:
        version = self._version()
        if version != self._made_of:
            self._made_of = version
            self._connections[-1].retire()
            self._connections = [each for each in self._connections if not each.is_closed()]
            self._connections.append(_Connection(self._connect()))
        return self._connections[-1].start(kind, path, *request, **rest)
