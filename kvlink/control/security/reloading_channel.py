# SPDX-License-Identifier: Apache-2.0
"""A client's connections: those whose certificates may change, and those that show a token with each call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

Options = Sequence[tuple[str, Any]]


class ProvingChannel:
    """The part of grpc.aio.Channel that kvlink uses, with `proof()` in the metadata of every call."""

    def __init__(self, channel: grpc.aio.Channel, proof: Callable[[], Sequence[tuple[str, str]]]) -> None:
        self._channel = channel
        self._proof = proof

    def unary_unary(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, self._channel.unary_unary(path, *codecs, **rest))

    def unary_stream(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, self._channel.unary_stream(path, *codecs, **rest))

    def stream_stream(self, path: str, *codecs: Any, **rest: Any) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, self._channel.stream_stream(path, *codecs, **rest))

    async def close(self) -> None:
        """Ends running calls. Idempotent."""
        await self._channel.close()

    def _start(self, method: Any, *request: Any, metadata: Any = None, **rest: Any) -> Any:
        return method(*request, metadata=(*(metadata or ()), *self._proof()), **rest)


class _Line:
    """One connection and the calls that run on it. Retired, it closes with the last of them."""

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
        call.add_done_callback(self._ended)
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
            self._closing = asyncio.get_running_loop().create_task(self.channel.close())


class ReloadingChannel:
    """The part of grpc.aio.Channel that kvlink uses. Belongs to the event loop it is used on.

    Dials anew with `credentials()` when `version()` is another one than last time; that is asked for every call.
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
        self._lines = [self._dial()]

    def unary_unary(self, path: str) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, "unary_unary", path)

    def unary_stream(self, path: str) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, "unary_stream", path)

    def stream_stream(self, path: str) -> Callable[..., Any]:
        """As grpc.aio.Channel's."""
        return partial(self._start, "stream_stream", path)

    async def close(self) -> None:
        """Ends running calls, those on retired connections too. Idempotent."""
        for line in self._lines:
            await line.channel.close()

    def _start(self, kind: str, path: str, *request: Any, **rest: Any) -> Any:
        version = self._version()
        if version != self._made_of:
            self._made_of = version
            self._lines[-1].retire()
            self._lines = [line for line in self._lines if not line.is_closed()] + [self._dial()]
        return self._lines[-1].start(kind, path, *request, **rest)

    def _dial(self) -> _Line:
        return _Line(grpc.aio.secure_channel(self._address, self._credentials(), options=self._options))
