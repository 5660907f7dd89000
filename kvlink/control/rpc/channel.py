# SPDX-License-Identifier: Apache-2.0
"""The client's end of gRPC: one address or several that serve alike, deadlines, retries, errors with advice."""

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
from kvlink.background import close_with_loop
from kvlink.backoff import Backoff
from kvlink.control.codec import Method
from kvlink.control.limits import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from kvlink.control.now import now
from kvlink.control.refusal import REASON_TRAILER, error_of
from kvlink.control.rpc.stream import Stream
from kvlink.control.security import Security, Trust
from kvlink.errors import AccessDenied, ConfigError, CoordinatorError, CoordinatorUnavailable, KVLinkError
from kvlink.forks import use_grpc

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
    ("grpc.http2.ping_timeout_ms", 5_000),  # without it gRPC waits for a minute
    # A ping for every message that comes, to learn how large windows should be, takes the other end a third of the CPU
    # that sending a change to many watchers does. Lists, the largest replies, are a megabyte or two.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.enable_http_proxy", 0),  # peers are inside the cluster
]


_GAVE_UP = "context "
"""What servers in Go, as etcd's, say under UNKNOWN when our deadline reached them before it reached us."""
_OUT_OF_TIME = re.compile(r"time[d -]*out|deadline|handshaker shutdown", re.IGNORECASE)
"""In what gRPC says under UNAVAILABLE of a connection that nobody refused."""
_ATTEMPT_S = 3.0
"""What one of several addresses gets to answer before the next is asked."""


_ADDRESS = re.compile(r"(\[[^\]]+\]|[^\s:;\[\]]+):\d{1,5}", re.ASCII)


class _End:
    """One of the addresses. Connects when first called."""

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
    """Calls one address, or any of several that serve alike. Belongs to the event loop it is used on.

    `what` names the far end in errors, `advice` says what to do about them. A far end that is away is asked again
    for `patience_s`, within the timeout of the call. One of several is kept to until it fails, then the next is
    asked, or when it has taken `attempt_s` for a call; each Channel has them in an order of its own, so that callers
    spread out.
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
        self._attempt_s = attempt_s if len(names) > 1 else math.inf
        self._ends = [_End(name, trust) for name in random.sample(names, len(names))]
        self._closed = False
        close_with_loop(self)

    def __repr__(self) -> str:
        return f"{self._what} at {self.address}{' (closed)' if self._closed else ''}"

    @property
    def asks(self) -> str:
        """The address that the next call goes to."""
        return self._ends[0].address

    @property
    def has_choice(self) -> bool:
        """Whether there are several addresses."""
        return len(self._ends) > 1

    async def close(self) -> None:
        """Ends running calls. Idempotent."""
        self._closed = True
        for end in self._ends:
            await end.channel.close()

    async def close_now(self) -> None:
        """As `close`."""
        await self.close()

    async def call(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """One request, one reply. Asks again while the far end is away.

        Raises CoordinatorUnavailable, ConfigError for a malformed request, or what the far end refused with.
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
            known = None  # or it would hold this frame, which holds it

    async def attempt(self, method: Method[Q, R], request: Q, timeout_s: float) -> R:
        """As `call`, without asking again."""
        blob = method.request.encode(request)
        self._check_open()
        end = self._ends[0]
        try:
            call = end.unary(method.path)(blob, timeout=timeout_s, metadata=tracing.metadata())
            return method.reply.decode(await call)
        except grpc.aio.AioRpcError as error:
            raise self._explain(error, end, method, f"within {timeout_s:.3g} s") from None

    def open(self, method: Method[Q, R], metadata: Sequence[tuple[str, str]] = ()) -> Stream[Q, R]:
        """A stream both ways."""
        self._check_open()
        end = self._ends[0]
        call = end.channel.stream_stream(method.path)(metadata=metadata)

        def explain(error: grpc.aio.AioRpcError | None) -> KVLinkError:
            if error is not None:
                return self._explain(error, end, method, "any more")
            self._leave(end)
            return CoordinatorUnavailable(f"{self._what} at {end.address} ended the stream {method.name}")

        return Stream(method, call, explain, lambda: self._leave(end))

    async def receive(self, method: Method[Q, R], request: Q) -> AsyncGenerator[R, None]:
        """One request, then replies until the far end stops. Raises as `call` does, without asking again."""
        self._check_open()
        end = self._ends[0]
        start: Any = end.channel.unary_stream(method.path)
        call = start(method.request.encode(request))
        try:
            async for blob in call:
                yield method.reply.decode(blob)
        except grpc.aio.AioRpcError as error:
            raise self._explain(error, end, method, "any more") from None
        finally:
            call.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise CoordinatorError(f"this client of the {self._what} at {self.address} is closed")

    def leave(self, address: str) -> None:
        """The next calls do not go to `address`, if they would and there is another."""
        if self.asks == address:
            self._leave(self._ends[0])

    def _leave(self, end: _End) -> None:
        """The next calls go elsewhere, where there is an elsewhere."""
        if self._ends[0] is end:
            self._ends.append(self._ends.pop(0))

    def _explain(
        self, error: grpc.aio.AioRpcError, end: _End, method: Method[Any, Any], when: str
    ) -> KVLinkError:
        """The exception of kvlink for a failed call."""
        advice = self._trust.advice(error.details() or "") or self._advice
        known = _explained(error, f"{self._what} at {end.address}", method, when, advice)
        if isinstance(known, CoordinatorUnavailable):
            self._leave(end)
        return known


def _listed(addresses: str, what: str) -> list[str]:
    names = [name.strip() for name in addresses.split(",")]
    for name in names:
        if not _ADDRESS.fullmatch(name):
            raise ConfigError(
                f"the address of a {what} is host:port, not {name!r}; several go with commas between"
            )
    return list(dict.fromkeys(names))


def _explained(
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
        what = f"did not answer {method.name} {when}: not there, stopped or overloaded"
        return CoordinatorUnavailable(f"{where} {what}. {advice}", telling=-1)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AccessDenied(f"{where} is not believed ({sentence}). {advice}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CoordinatorError(f"{where} has no {method.name}; not kvlink's, or of another version")
    return CoordinatorError(f"{where} refused {method.name}: {code.name}: {sentence}")
