# SPDX-License-Identifier: Apache-2.0
"""Implements the client side of one bidirectional gRPC stream. Senders, too, learn why the server ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from kvlink.control.codec import Method
from kvlink.errors import KVLinkError
from kvlink.runtime.supervised import guarded

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_FAILED_WRITE = "Internal error from Core"
"""gRPC reports this instead of the server's status when a write races with it (github.com/grpc/grpc/issues/36066)."""
_LATE_TURNS = 1000


class Stream(Generic[Q, R]):
    """Wraps one open stream. There may be one sender and one receiver at a time."""

    def __init__(
        self,
        method: Method[Q, R],
        call: Any,
        to_error: Callable[[grpc.aio.AioRpcError | None], KVLinkError],
        avoid_server: Callable[[], None],
    ) -> None:
        self._method = method
        self._call = call
        self._to_error = to_error
        self._ending: grpc.aio.AioRpcError | None = None
        call.add_done_callback(guarded("stream ended", self._note_ending))
        self.avoid_server = avoid_server
        """Sends the next calls to another address. Call it when the server hangs although the stream is open."""

    async def send(self, value: Q) -> None:
        """Returns when gRPC has accepted the message. Raises like `Channel.call` when the stream is broken."""
        await self.send_bytes(self._method.request.encode(value))

    async def send_bytes(self, blob: bytes) -> None:
        """Sends an encoded message like `send`."""
        try:
            await self._call.write(blob)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._why() from None

    async def receive(self) -> R | None:
        """Returns the next reply, or None when the server has ended the stream."""
        try:
            blob = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._why() from None
        return None if blob is grpc.aio.EOF else self._method.reply.decode(blob)

    async def finish(self) -> None:
        """Tells the server that nothing more will be sent."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """Ends the stream at once. No send or receive may be running. Cancelling again has no effect."""
        self._call.cancel()

    def _note_ending(self, call: Any) -> None:
        self._ending = _at_once(_ending(call))

    async def _why(self) -> KVLinkError:
        """Returns why the stream ended. After a failed write, the server's status arrives a few loop turns later."""
        for _ in range(_LATE_TURNS):
            ending = self._ending
            if ending is None or ending.code() is grpc.StatusCode.OK:
                break
            if ending.details() != _FAILED_WRITE:
                return self._to_error(ending)
            await asyncio.sleep(0.001)
            self._note_ending(self._call)
        return self._to_error(None)


async def _ending(call: Any) -> grpc.aio.AioRpcError:
    code, details = await call.code(), await call.details()
    return grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that does not wait."""
    try:
        answer.send(None)
    except StopIteration as returned:
        value: T = returned.value
        return value
    raise RuntimeError(f"{answer!r} waits")
