# SPDX-License-Identifier: Apache-2.0
"""Serves calls over grpc.aio. Handlers take and return values; their errors become a gRPC status and a sentence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvlink import tracing
from kvlink.config.addresses import plain_host
from kvlink.control.codec import Codec, Method
from kvlink.control.denials import DenialLog, LogQuota
from kvlink.control.limits import HANDSHAKE_MS, MAX_CONNECTIONS, MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvlink.control.refusal import Reason, RefusedError, forget_frames, refusal_of
from kvlink.control.rpc.admission import Admission, refuse
from kvlink.control.rpc.call_counts import CallCounts
from kvlink.control.rpc.call_spans import traced
from kvlink.control.rpc.peer_address import serving
from kvlink.control.security import MEMBER, Caller, Gate, Security, caller, incarnation_of, set_caller
from kvlink.control.security.tokens import bearer
from kvlink.errors import ConfigError
from kvlink.runtime.background import close_with_loop
from kvlink.runtime.forks import use_grpc
from kvlink.runtime.supervised import start_awaited

T = TypeVar("T")

_SHORT_BYTES = 4_096
"""Whatever a message of this size holds is decoded in less than a millisecond."""


class Turns:
    """Decodes the messages of a server. Belongs to one event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        """By tenant."""

    async def decode(self, codec: Codec[T], blob: bytes) -> T:
        """Decodes a message of the running call. Before a long one, all others have a turn of the loop."""
        if len(blob) <= _SHORT_BYTES:
            return codec.decode(blob)
        async with self._locks.setdefault(caller().tenant, asyncio.Lock()):
            await asyncio.sleep(0)
            return codec.decode(blob)


Q = TypeVar("Q")
R = TypeVar("R")

_log = logging.getLogger("kvlink.control")

_MAX_SENTENCE = 1_000
"""Bounds a sentence in characters, because HTTP/2 headers are bounded at 8 KiB."""
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.so_reuseport", 0),  # two servers on one port would silently share its calls
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.keepalive_time_ms", 20_000),  # notices peers that vanished without closing
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it gRPC waits for a minute
    ("grpc.keepalive_permit_without_calls", 1),  # also peers without an open call
    ("grpc.http2.bdp_probe", 0),  # requests are small: see channel.py
    # Clients ping every 10 s. Pings that arrive together after this process was paused are not a flood.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 8),
]

Send = Callable[[R], Awaitable[None]]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class GrpcServer:
    """Runs one listening gRPC server with its health service.

    Add calls before `start`. Belongs to the event loop that starts it.
    """

    def __init__(
        self,
        what: str,
        reflect: bool = False,
        security: Security | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`gate` identifies the caller or refuses the call. Without it or TLS, all admitted callers are alike."""
        self._security = Security.from_env() if security is None else security
        self.counts = CallCounts()
        if ring := self._security.keyring:
            self.counts.certificate_expires_at = lambda: ring.current().expires_at
        self._turns = Turns()
        self._denials = DenialLog()
        self.failures = LogQuota()
        """Limits the log lines about failed calls."""
        self._what = what
        self._reflect = reflect
        self._gate = gate if self._security.keyring else None
        self._services: dict[str, dict[str, _Handler]] = {}
        self._streams: dict[asyncio.Future[None], None] = {}
        self._health = health.aio.HealthServicer()
        self._server: Any = None

    def unary(self, method: Method[Q, R], handle: Callable[[Q], Awaitable[R]]) -> None:
        """Adds a method with one request and one reply."""

        async def call(blob: bytes, context: _Context) -> bytes:
            began = time.perf_counter_ns()
            request: Q | None = None
            try:
                serving(context)
                self._admit(method, context)
                request = await self._turns.decode(method.request, blob)
                answering = handle(request)
                if tracing.spans is not None:
                    answering = traced(method, request, answering, context.invocation_metadata())
                return method.reply.encode(await answering)
            except Exception as error:
                self._refuse(context, method, error, getattr(request, "request_id", ""))
                return b""
            finally:
                self.counts.answered(method.name, time.perf_counter_ns() - began)

        self._add(method, grpc.unary_unary_rpc_method_handler(call))

    def streaming(self, method: Method[Q, R], handle: Callable[[Q, Send[R]], Awaitable[None]]) -> None:
        """Adds a method with one request and replies until the handler returns."""

        async def call(blob: bytes, context: _Context) -> None:
            async def run(send: Send[R]) -> None:
                await handle(await self._turns.decode(method.request, blob), send)

            await self._run_stream(run, method, context)

        self._add(method, grpc.unary_stream_rpc_method_handler(call))

    def bidirectional(
        self, method: Method[Q, R], handle: Callable[[AsyncIterator[Q], Send[R]], Awaitable[None]]
    ) -> None:
        """Adds a method with requests and replies until the handler returns."""

        async def call(_: object, context: _Context) -> None:
            async def run(send: Send[R]) -> None:
                await handle(self._decoded(method.request, context), send)

            await self._run_stream(run, method, context)

        self._add(method, grpc.stream_stream_rpc_method_handler(call))

    async def start(self, host: str, port: int) -> str:
        """Starts listening and returns "host:port" as bound.

        Raises ConfigError when it cannot listen on the port, plaintext is not allowed there, or there is no token.
        """
        host = plain_host(host)
        credentials = self._security.server_credentials(host)
        verifier = self._security.verifier(host)
        admission = Admission(verifier, self._what, self._denied) if verifier else None
        use_grpc()
        self._server = self._security.server(_OPTIONS, [admission] if admission else [])
        close_with_loop(self)
        for service, handlers in self._services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._reflect:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        address = f"[{host}]" if ":" in host else host
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(f"{address}:{port}")
            else:
                bound = self._server.add_secure_port(f"{address}:{port}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}:{port} ({error}). Check that no other server uses the port and that the "
                "address belongs to this host"
            ) from None
        if verifier is not None:
            verifier.listens(bound)
        await self._server.start()
        await self.set_ready(True)
        return f"{address}:{bound}"

    async def set_ready(self, ready: bool) -> None:
        """Sets the status that health checks report for this server and its services."""
        status = health_pb2.HealthCheckResponse
        for service in ("", *self._services):
            await self._health.set(service, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, ends streams at once, and cancels calls that still run after `grace_s` seconds.

        Stopping again has no effect.
        """
        for stream in list(self._streams):
            stream.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def close(self) -> None:
        """Stops the server within 0.1 s."""
        await self.stop(0.1)

    def _add(self, method: Method[Any, Any], handler: _Handler) -> None:
        self._services.setdefault(method.service, {})[method.name] = handler

    def _denied(self, path: str, peer: str) -> None:
        service, _, name = path.removeprefix("/").partition("/")
        self.counts.refused(name if name in self._services.get(service, ()) else "", Reason.DENIED.name)
        self._denials.note(path, peer, "no token of this host")

    def _admit(self, method: Method[Any, Any], context: _Context) -> None:
        """Checks the caller and stores it for the running task. Raises RefusedError (DENIED)."""
        metadata = dict(context.invocation_metadata() or ())
        found = Caller()
        if self._gate is not None:
            names = [name.decode("utf-8", "replace") for name in context.peer_identities() or ()]
            found = self._gate(method.name, names, bearer(metadata.get("authorization", "")))
        set_caller(found._replace(incarnation=incarnation_of(metadata.get(MEMBER))))

    async def _run_stream(
        self,
        run: Callable[[Send[R]], Awaitable[None]],
        method: Method[Any, R],
        context: _Context,
    ) -> None:
        """Runs a stream as a task that `stop` cancels. If gRPC cut the stream, the peer would log spurious errors."""

        async def admitted() -> None:
            self._admit(method, context)
            await run(_sender(method.reply, context))

        stream = start_awaited(admitted())
        self._streams[stream] = None
        try:
            await asyncio.wait([stream])
            if stream.cancelled():
                raise RefusedError(Reason.NOT_READY, "the server is shutting down; retry")
            stream.result()
        except Exception as error:
            self._refuse(context, method, error)
        finally:
            del self._streams[stream]
            stream.cancel()

    async def _decoded(self, codec: Codec[Q], context: _Context) -> AsyncIterator[Q]:
        """Yields the messages of a stream. gRPC's own iterator would keep the last one in a reference cycle."""
        while (blob := await context.read()) is not grpc.aio.EOF:
            yield await self._turns.decode(codec, blob)

    def _refuse(
        self, context: _Context, method: Method[Any, Any], error: Exception, request_id: str = ""
    ) -> None:
        """Sets the status that the call ends with once its handler returns.

        `context.abort` would keep the frames of the call, and so its message, in a reference cycle.
        """
        refused = refusal_of(error)
        self.counts.refused(method.name, refused.reason.name)
        if refused.reason is Reason.DENIED:
            self._denials.note(method.path, context.peer(), refused.sentence)
        if refused.reason is Reason.FAILED and (more := self.failures.take()) is not None:
            _log.error("%s failed request=%s suppressed=%d", method.path, request_id, more, exc_info=error)
        forget_frames(error)
        refuse(context, refused.reason, refused.sentence[:_MAX_SENTENCE])


def _sender(codec: Codec[R], context: _Context) -> Send[R]:
    one_at_a_time = asyncio.Lock()

    async def send(value: R) -> None:
        async with one_at_a_time:
            await context.write(codec.encode(value))

    return send
