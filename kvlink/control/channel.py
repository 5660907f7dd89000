# SPDX-License-Identifier: Apache-2.0
"""The client's end of one gRPC connection: deadlines, retries with back-off, and errors with advice."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from kvlink.control.codec import Method
from kvlink.control.limits import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvlink.control.open_ends import opened
from kvlink.control.refusal import REASON_TRAILER, error_of
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, KVLinkError

Q = TypeVar("Q")
R = TypeVar("R")

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt to connect may take
    ("grpc.keepalive_time_ms", 10_000),  # notices a peer that vanished without closing
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),  # peers are inside the cluster
]


class Backoff:
    """Delays in seconds that double up to a bound, each shortened at random so that callers spread out."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    def reset(self) -> None:
        """The next delay is the first one again."""
        self._next_s = self._first_s

    def delay_s(self) -> float:
        """Between half of the current bound and all of it."""
        bound_s = self._next_s
        self._next_s = min(2 * bound_s, self._most_s)
        return bound_s * random.uniform(0.5, 1.0)


class Channel:
    """Calls one address. Belongs to the event loop it is used on.

    `what` names the far end in errors, `advice` says what to do about them. A far end that is away is asked again
    for `patience_s`, within the timeout of the call.
    """

    def __init__(self, address: str, what: str, advice: str, patience_s: float = math.inf) -> None:
        if ":" not in address or not address.rpartition(":")[2].isdigit():
            raise ConfigError(f"the address of a {what} is host:port, not {address!r}")
        self.address = address
        self._what = what
        self._advice = advice
        self._patience_s = patience_s
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._unary: dict[str, Any] = {}
        self._closed = False
        opened(self)

    def __repr__(self) -> str:
        return f"{self._what} at {self.address}{' (closed)' if self._closed else ''}"

    async def close(self) -> None:
        """Ends running calls. Idempotent."""
        self._closed = True
        await self._channel.close()

    async def close_now(self) -> None:
        """As `close`."""
        await self.close()

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """One request, one reply. Asks again while the far end is away.

        Raises CoordinatorUnavailable, ConfigError for a malformed request, or what the far end refused with.
        """
        start = time.monotonic()
        deadline = start + timeout_s
        backoff = Backoff()
        while True:
            try:
                return await self.attempt(method, request, max(0.001, deadline - time.monotonic()))
            except CoordinatorUnavailable:
                delay_s = backoff.delay_s()
                if time.monotonic() + delay_s >= min(deadline, start + self._patience_s):
                    raise
            await asyncio.sleep(delay_s)

    async def attempt(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """As `call`, without asking again."""
        blob = method.request.encode(request)
        self._check_open()
        call = self._unary.get(method.path)
        if call is None:
            call = self._unary[method.path] = self._channel.unary_unary(method.path)
        try:
            return method.reply.decode(await call(blob, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self.explain(error, method, f"within {timeout_s:.3g} s") from None

    def open(self, method: Method[Q, R]) -> Stream[Q, R]:
        """A stream both ways."""
        self._check_open()
        return Stream(self, method, self._channel.stream_stream(method.path)())

    async def receive(self, method: Method[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """One request, then replies until the far end stops. Raises as `call` does, without asking again."""
        self._check_open()
        start: Any = self._channel.unary_stream(method.path)
        call = start(method.request.encode(request))
        try:
            async for blob in call:
                yield method.reply.decode(blob)
        except grpc.aio.AioRpcError as error:
            raise self.explain(error, method, "any more") from None
        finally:
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise CoordinatorError(f"this client of the {self._what} at {self.address} is closed")

    def explain(self, error: grpc.aio.AioRpcError, method: Method[Any, Any], when: str) -> KVLinkError:
        """The exception of kvlink for a failed call."""
        sentence = error.details() or error.code().name
        where = f"{self._what} at {self.address}"
        for key, value in error.trailing_metadata() or ():
            if key == REASON_TRAILER:
                return error_of(str(value), f"{where}: {sentence}")
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE or code is grpc.StatusCode.CANCELLED:
            what = f"does not answer {method.name} ({sentence})"
            return CoordinatorUnavailable(f"{where} {what}. {self._advice}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            what = f"did not answer {method.name} {when}: not there, stopped or overloaded"
            return CoordinatorUnavailable(f"{where} {what}. {self._advice}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CoordinatorError(f"{where} has no {method.name}; not kvlink's, or of another version")
        return CoordinatorError(f"{where} refused {method.name}: {code.name}: {sentence}")


class Stream(Generic[Q, R]):
    """One open stream. One sender and one receiver at a time."""

    def __init__(self, channel: Channel, method: Method[Q, R], call: Any) -> None:
        self._channel = channel
        self._method = method
        self._call = call

    async def send(self, value: Q) -> None:
        """Returns once gRPC took the message. Raises as `Channel.call` does when the stream is broken."""
        await self.send_bytes(self._method.request.encode(value))

    async def send_bytes(self, blob: bytes) -> None:
        """As `send`, for an encoded message."""
        try:
            await self._call.write(blob)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._explain(error) from None

    async def receive(self) -> R | None:
        """The next reply; None when the far end has ended the stream."""
        try:
            blob = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._explain(error) from None
        return None if blob is grpc.aio.EOF else self._method.reply.decode(blob)

    async def finish(self) -> None:
        """Says that nothing more will be sent."""
        await self._call.done_writing()

    def cancel(self) -> None:
        """Ends the stream at once. No send or receive may be running. Idempotent."""
        self._call.cancel()

    def _explain(self, error: Exception) -> KVLinkError:
        if isinstance(error, grpc.aio.AioRpcError):
            return self._channel.explain(error, self._method, "any more")
        return CoordinatorUnavailable(f"{self._channel!r} ended the stream {self._method.name}")
