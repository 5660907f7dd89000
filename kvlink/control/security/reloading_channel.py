# SPDX-License-Identifier: Apache-2.0
"""Provides client channels whose certificates are reloaded, and channels that send a token with each call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvlink.runtime.supervised import guarded, start_job

Options = Sequence[tuple[str, Any]]


class ProvingChannel:
    """Implements the part of grpc.aio.Channel that kvlink uses, and adds `proof()` to the metadata of every call."""

    def __init__(self, channel: grpc.aio.Channel, proof: Callable[[], Sequence[tuple[str, str]]]) -> None:
        self._channel = channel
        self._proof = proof

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
        return method(*request, metadata=(*(metadata or ()), *self._proof()), **rest)


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

    It calls `version()` for every call, and reconnects with new `credentials()` when the version has changed.
    """

    def __init__(
        self,
        address: str,
        options: Options,
        version: Callable[[], object],
        credentials: Callable[[], grpc.ChannelCredentials],
    ) -> None:
        self._address = address
        self._options = options
        self._version = version
        self._credentials = credentials
        self._made_of = version()
        self._connections = [self._connect()]

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
            self._connections.append(self._connect())
        return self._connections[-1].start(kind, path, *request, **rest)

    def _connect(self) -> _Connection:
        return _Connection(grpc.aio.secure_channel(self._address, self._credentials(), options=self._options))
