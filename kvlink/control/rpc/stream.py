# SPDX-License-Identifier: Apache-2.0
"""The client's end of one gRPC stream both ways. It says why the far end ended it, also to who was sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from kvlink.control.codec import Method
from kvlink.errors import KVLinkError

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_FAILED_WRITE = "Internal error from Core"
"""What gRPC puts before or over the far end's word when that meets a write: https://github.com/grpc/grpc/issues/36066"""
_LATE_TURNS = 1000


class Stream(Generic[Q, R]):
    """One open stream. One sender and one receiver at a time."""

    def __init__(
        self,
        method: Method[Q, R],
        call: Any,
        explain: Callable[[grpc.aio.AioRpcError | None], KVLinkError],
        leave: Callable[[], None],
    ) -> None:
        self._method = method
        self._call = call
        self._explain = explain
        self._ending: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note_ending)
        self.leave = leave
        """Says that this end serves no more although the stream stands: the next calls go elsewhere."""

    async def send(self, value: Q) -> None:
        """Returns once gRPC took the message. Raises as `Channel.call` does when the stream is broken."""
        await self.send_bytes(self._method.request.encode(value))

    async def send_bytes(self, blob: bytes) -> None:
        """As `send`, for an encoded message."""
        try:
            await self._call.write(blob)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._why() from None

    async def receive(self) -> R | None:
        """The next reply; None when the far end has ended the stream."""
        try:
            blob = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._why() from None
        return None if blob is grpc.aio.EOF else self._method.reply.decode(blob)

    async def finish(self) -> None:
        """Says that nothing more will be sent."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """Ends the stream at once. No send or receive may be running. Idempotent."""
        self._call.cancel()

    def _note_ending(self, call: Any) -> None:
        self._ending = _at_once(_ending(call))

    async def _why(self) -> KVLinkError:
        """If gRPC heard of the end from a write that failed, the far end's word is a few turns of the loop away."""
        for _ in range(_LATE_TURNS):
            ending = self._ending
            if ending is None or ending.code() is grpc.StatusCode.OK:
                break
            if ending.details() != _FAILED_WRITE:
                return self._explain(ending)
            await asyncio.sleep(0.001)
            self._note_ending(self._call)
        return self._explain(None)


async def _ending(call: Any) -> grpc.aio.AioRpcError:
    code, details = await call.code(), await call.details()
    return grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as returned:
        value: T = returned.value
        return value
    raise RuntimeError(f"{answer!r} waits")
