# SPDX-License-Identifier: Apache-2.0
"""Implements the client side of gRPC: one address or several replicas, deadlines, retries, errors with advice."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvlink import tracing
from kvlink.control.codec import Method
from kvlink.control.limits import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvlink.control.now import now
from kvlink.control.refusal import REASON_TRAILER, error_of
from kvlink.control.rpc.stream import Stream
from kvlink.control.security import Security, Trust
from kvlink.errors import AccessDenied, ConfigError, CoordinatorError, CoordinatorUnavailable, KVLinkError
from kvlink.runtime.background import close_with_loop
from kvlink.runtime.backoff import Backoff
from kvlink.runtime.forks import use_grpc

Q = TypeVar("Q")
R = TypeVar("R")
Metadata = Sequence[tuple[str, str]]

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt to connect may take
    ("grpc.keepalive_time_ms", 10_000),  # notices a peer that vanished without closing
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # without it gRPC waits for a minute
    # A ping for every message that comes, to learn how large windows should be, takes the other end a third of the CPU
    # that sending a change to many watchers does. Lists, the largest replies, are a megabyte or two.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.enable_http_proxy", 0),  # peers are inside the cluster
]


_GAVE_UP = "context "
"""Go servers such as etcd report UNKNOWN with this prefix when a deadline expires there before it does here."""
_OUT_OF_TIME = re.compile(r"time[d -]*out|deadline|handshaker shutdown", re.IGNORECASE)
"""Matches the details of an UNAVAILABLE error about a connection that timed out rather than being refused."""
_ATTEMPT_S = 3.0
"""One of several addresses has this long to answer before the next one is tried."""


_ADDRESS = re.compile(r"(\[[^\]]+\]|[^\s:;\[\]]+):\d{1,5}", re.ASCII)


class _Server:
    """Holds the gRPC channel to one of the addresses. It connects at the first call."""

    def __init__(self, address: str, trust: Trust) -> None:
        self.address = address
        self.channel = trust.dial(address, _OPTIONS)
        self._unary: dict[str, Any] = {}

    def unary(self, path: str) -> Any:
        call = self._unary.get(path)
        if call is None:
            call = self._unary[path] = self.channel.unary_unary(path)
        return call


class Channel:
    """Calls one address, or any of several replicas. Belongs to the event loop it is used on.

    `what` names the server in errors, and `advice` says what to do about them. A call to an unavailable server is
    retried for `patience_s`, within the timeout of the call. With several addresses, a channel keeps using one until it
    fails or has taken `attempt_s` for a call, and then tries the next. Each Channel orders them at random, so that
    callers spread out.
    """

    def __init__(
        self,
        addresses: str,
        what: str,
        advice: str,
        patience_s: float = math.inf,
        trust: Trust | None = None,
        attempt_s: float = _ATTEMPT_S,
    ) -> None:
        use_grpc()
        names = _listed(addresses, what)
        self.address = ",".join(names)
        self._what = what
        self._advice = advice
        self._trust = trust = Security.from_env().services() if trust is None else trust
        self._patience_s = patience_s
        self.metadata: Metadata = ()
        """This goes with every call."""
        self._attempt_s = attempt_s if len(names) > 1 else math.inf
        self._servers = [_Server(name, trust) for name in random.sample(names, len(names))]
        self._closed = False
        close_with_loop(self)

    def __repr__(self) -> str:
        return f"{self._what} at {self.address}{' (closed)' if self._closed else ''}"

    @property
    def next_address(self) -> str:
        """Returns the address that the next call goes to."""
        return self._servers[0].address

    @property
    def has_replicas(self) -> bool:
        """Returns whether there are several addresses."""
        return len(self._servers) > 1

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        self._closed = True
        for server in self._servers:
            await server.channel.close()

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Sends one request and returns its reply. Retries while the server is unavailable.

        Raises CoordinatorUnavailable, ConfigError for a malformed request, or the error that the server refused with.
        """
        start = now()
        deadline = start + timeout_s
        backoff = Backoff()
        known: CoordinatorUnavailable | None = None
        try:
            while True:
                left_s = deadline - now()
                try:
                    return await self.attempt(method, request, max(0.001, min(left_s, self._attempt_s)))
                except CoordinatorUnavailable as error:
                    if known is None or error.telling >= known.telling:
                        known = error
                    delay_s = backoff.delay_s()
                    if now() + delay_s >= min(deadline, start + self._patience_s):
                        raise known from None
                await asyncio.sleep(delay_s)
        finally:
            known = None  # the error holds this frame through its traceback: breaks the reference cycle

    async def attempt(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """Sends one request like `call`, but does not retry."""
        blob = method.request.encode(request)
        self._check_open()
        server = self._servers[0]
        try:
            metadata = (*self.metadata, *(tracing.metadata() or ()))
            call = server.unary(method.path)(blob, timeout=timeout_s, metadata=metadata)
            return method.reply.decode(await call)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error, server, method, f"within {timeout_s:.3g} s") from None

    def open(self, method: Method[Q, R], metadata: Metadata = ()) -> Stream[Q, R]:
        """Opens a bidirectional stream."""
        self._check_open()
        server = self._servers[0]
        call = server.channel.stream_stream(method.path)(metadata=(*self.metadata, *metadata))

        def to_error(error: grpc.aio.AioRpcError | None) -> KVLinkError:
            if error is not None:
                return self._to_error(error, server, method, "any more")
            self._avoid(server)
            return CoordinatorUnavailable(f"{self._what} at {server.address} ended the stream {method.name}")

        return Stream(method, call, to_error, lambda: self._avoid(server))

    async def receive(self, method: Method[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """Sends one request and yields replies until the server stops. Raises like `call`, but does not retry."""
        self._check_open()
        server = self._servers[0]
        start: Any = server.channel.unary_stream(method.path)
        call = start(method.request.encode(request), metadata=self.metadata)
        try:
            async for blob in call:
                yield method.reply.decode(blob)
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error, server, method, "any more") from None
        finally:
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise CoordinatorError(f"this client of the {self._what} at {self.address} is closed")

    def avoid(self, address: str) -> None:
        """Sends the next calls to another address, if they would go to `address` and there is another."""
        if self.next_address == address:
            self._avoid(self._servers[0])

    def _avoid(self, server: _Server) -> None:
        if self._servers[0] is server:
            self._servers.append(self._servers.pop(0))

    def _to_error(
        self, error: grpc.aio.AioRpcError, server: _Server, method: Method[Any, Any], when: str
    ) -> KVLinkError:
        """Converts the gRPC error of a failed call to an exception of kvlink."""
        advice = self._trust.advice(error.details() or "") or self._advice
        known = _converted(error, f"{self._what} at {server.address}", method, when, advice)
        if isinstance(known, CoordinatorUnavailable):
            self._avoid(server)
        return known


def _listed(addresses: str, what: str) -> list[str]:
    names = [name.strip() for name in addresses.split(",")]
    for name in names:
        if not _ADDRESS.fullmatch(name) or not 0 < int(name.rpartition(":")[2]) < 65536:
            raise ConfigError(
                f"the address of a {what} must be host:port, not {name!r}; separate several with commas"
            )
    return list(dict.fromkeys(names))


def _converted(
    error: grpc.aio.AioRpcError, where: str, method: Method[Any, Any], when: str, advice: str
) -> KVLinkError:
    sentence = error.details() or error.code().name
    for key, value in error.trailing_metadata() or ():
        if key == REASON_TRAILER:
            known = error_of(str(value), f"{where}: {sentence}")
            if isinstance(known, CoordinatorUnavailable):
                known.telling = 1
            return known
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE or code is grpc.StatusCode.CANCELLED:
        telling = -1 if _OUT_OF_TIME.search(sentence) else 0
        return CoordinatorUnavailable(
            f"{where} does not answer {method.name} ({sentence}). {advice}", telling
        )
    gave_up = code is grpc.StatusCode.UNKNOWN and sentence.startswith(_GAVE_UP)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED or gave_up:
        what = f"did not answer {method.name} {when}: it is not running, stopped or overloaded"
        return CoordinatorUnavailable(f"{where} {what}. {advice}", telling=-1)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AccessDenied(f"{where} could not be authenticated ({sentence}). {advice}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CoordinatorError(
            f"{where} has no method {method.name}: it is not a server of kvlink, or it runs another version"
        )
    return CoordinatorError(f"{where} refused {method.name}: {code.name}: {sentence}")
