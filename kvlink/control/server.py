# SPDX-License-Identifier: Apache-2.0
"""Hosts services over grpc.aio. Handlers take and return values; errors become status and sentence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvlink.control.codec import Codec, Method
from kvlink.control.limits import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvlink.control.open_ends import opened
from kvlink.control.refusal import REASON_TRAILER, Reason, Refused, refusal_of
from kvlink.errors import ConfigError

Q = TypeVar("Q")
R = TypeVar("R")

_log = logging.getLogger("kvlink.control")

_MAX_SENTENCE = 1_000
"""Characters; HTTP/2 headers are bounded at 8 KiB."""
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
    ("grpc.keepalive_time_ms", 20_000),  # notices peers that vanished without closing
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]

Send = Callable[[R], Awaitable[None]]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Host:
    """One listening gRPC server with its health service. Add calls, then start; belongs to the loop that starts it."""

    def __init__(self, reflect: bool = False) -> None:
        self._reflect = reflect
        self._services: dict[str, dict[str, _Handler]] = {}
        self._streams: set[asyncio.Future[None]] = set()
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def unary(self, method: Method[Q, R], handle: Callable[[Q], Awaitable[R]]) -> None:
        """One request, one reply."""

        async def call(blob: bytes, context: _Context) -> bytes:
            try:
                return method.reply.encode(await handle(method.request.decode(blob)))
            except Exception as error:
                await _refuse(context, method, error)

        self._add(method, grpc.unary_unary_rpc_method_handler(call))

    def streaming(self, method: Method[Q, R], handle: Callable[[Q, Send[R]], Awaitable[None]]) -> None:
        """One request, then replies until the handler returns."""

        async def call(blob: bytes, context: _Context) -> None:
            async def run() -> None:
                await handle(method.request.decode(blob), _sender(method.reply, context))

            await self._run_stream(run(), method, context)

        self._add(method, grpc.unary_stream_rpc_method_handler(call))

    def bidirectional(
        self, method: Method[Q, R], handle: Callable[[AsyncIterator[Q], Send[R]], Awaitable[None]]
    ) -> None:
        """Requests and replies until the handler returns."""

        async def call(blobs: AsyncIterator[bytes], context: _Context) -> None:
            run = handle(_decoded(method.request, blobs), _sender(method.reply, context))
            await self._run_stream(run, method, context)

        self._add(method, grpc.stream_stream_rpc_method_handler(call))

    async def start(self, host: str, port: int) -> str:
        """Listens and returns "host:port" as bound. Raises ConfigError when the port cannot be had."""
        self._server = grpc.aio.server(options=_OPTIONS)
        opened(self)
        for service, handlers in self._services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._reflect:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        address = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as error:
            why = "is another server there, or the address not this host's?"
            raise ConfigError(f"cannot listen on {address}:{port} ({error}); {why}") from None
        await self._server.start()
        await self._say(health_pb2.HealthCheckResponse.SERVING)
        return f"{address}:{bound}"

    async def unready(self) -> None:
        """Tells health checks to send nobody here any more."""
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and ends streams at once; cancels what still runs after `grace_s`. Idempotent."""
        for stream in list(self._streams):
            stream.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def close_now(self) -> None:
        """As `stop`, within moments."""
        await self.stop(0.1)

    def _add(self, method: Method[Any, Any], handler: _Handler) -> None:
        self._services.setdefault(method.service, {})[method.name] = handler

    async def _say(self, status: int) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def _run_stream(self, run: Awaitable[None], method: Method[Any, Any], context: _Context) -> None:
        """As a task that `stop` cancels: a peer whose stream is cut by gRPC itself sees noise in its log."""
        stream = asyncio.ensure_future(run)
        self._streams.add(stream)
        try:
            await asyncio.wait([stream])
            if stream.cancelled():
                raise Refused(Reason.NOT_READY, "the server is shutting down; ask again")
            stream.result()
        except Exception as error:
            await _refuse(context, method, error)
        finally:
            self._streams.discard(stream)
            stream.cancel()


async def _decoded(codec: Codec[Q], blobs: AsyncIterator[bytes]) -> AsyncIterator[Q]:
    async for blob in blobs:
        yield codec.decode(blob)


def _sender(codec: Codec[R], context: _Context) -> Send[R]:
    one_at_a_time = asyncio.Lock()

    async def send(value: R) -> None:
        async with one_at_a_time:
            await context.write(codec.encode(value))

    return send


async def _refuse(context: _Context, method: Method[Any, Any], error: Exception) -> NoReturn:
    refused = refusal_of(error)
    if refused.reason is Reason.FAILED:
        _log.error("%s failed", method.path, exc_info=error)
    await context.abort(
        grpc.StatusCode[refused.reason.status],
        refused.sentence[:_MAX_SENTENCE],
        ((REASON_TRAILER, refused.reason.name),),
    )
