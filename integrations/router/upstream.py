# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the servers behind the router. Failures that other servers may not have become NotServedError."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
)
from multidict import CIMultiDict
from yarl import URL

from .bodies import MOST_PARSED, REQUEST_ID, encoded
from .choice import Ring
from .counts import Counts
from .retries import Answer, NotServedError, OwnLimit, Tries, is_final, own_limit

BROKEN = (ClientError, OSError, asyncio.TimeoutError)
"""The exceptions of aiohttp for a server that is absent or gone."""

_PROBE_S = 10.0
_PROBE_EVERY_S = 2.0
_DRAINING_EVERY_S = 0.25
"""No server starts faster than this, so its restart is seen."""
_START_TIME = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)
# Computing a long prompt may take minutes and a stream may pause, so only a broken connection ends a request.
_PATIENT = ClientTimeout(total=None, sock_connect=3.0)

T = TypeVar("T")


class Opened(NamedTuple):
    """An answer that has begun, and the rest of its body, which may raise one of BROKEN."""

    url: str
    answer: Answer
    rest: AsyncIterator[bytes]


class Sent(NamedTuple):
    """A request to a server. A body that is a dict is written as JSON."""

    path: str
    body: Any
    headers: Mapping[str, str]
    method: str = "POST"
    answer_as: str = ""
    """The name of the answer's ticket, or "" for none."""

    @property
    def request_id(self) -> str:
        """Returns the id that all servers get."""
        return self.headers[REQUEST_ID]

    def named(self, suffix: str) -> Sent:
        """Returns the same with another id, because a server may get both."""
        headers = CIMultiDict(self.headers)
        headers[REQUEST_ID] = f"{self.request_id}-{suffix}"
        return self._replace(headers=headers)


class Upstream:
    """The servers of one role."""

    def __init__(self, role: str, ring: Ring, session: ClientSession, counts: Counts) -> None:
        self.role = role
        self.ring = ring
        self.running: Counter[str] = Counter()
        """The number of requests that each server is answering, probes not counted."""
        self._leaving = {url: asyncio.Event() for url in ring.urls}
        self._session = session
        self._counts = counts

    async def drain(self, url: str) -> None:
        """Sends a server no new requests from now on, and lets those that can move leave it."""
        self.ring.drain(url)
        self.ring.drain(url, await self._start_time(url))
        self._leaving[url].set()

    def resume(self, url: str) -> None:
        """Undoes `drain`."""
        self.ring.resume(url)
        self._leaving[url].clear()

    async def leaves(self, url: str) -> None:
        """Waits until the server drains."""
        await self._leaving[url].wait()

    def broke_off(self, url: str) -> None:
        """Records that the connection to a server broke while it answered."""
        self.ring.failed(url, time.monotonic(), lost=False)

    def answered(self, url: str) -> None:
        """Records that a server answered, which ends a drain if it was gone meanwhile."""
        self.ring.succeeded(url)
        if not self.ring.draining(url):
            self._leaving[url].clear()

    async def first(
        self,
        ask: Callable[[str], Awaitable[T]],
        tries: Tries,
        without: Collection[str] = (),
        draining: bool = False,
        first: str = "",
    ) -> T:
        """Returns what `ask` returns for the first server that serves, beginning with `first`. Raises NotServedError.

        Servers in `without` are not asked, and those that drain only with `draining`.
        """
        tried = list(without)
        while tries.may_ask(self.role):
            url = first or self.ring.choose(time.monotonic(), tried, draining)
            if not url:
                break
            first = ""
            try:
                return await ask(url)
            except OwnLimit:
                raise
            except NotServedError as error:
                tried.append(url)
                tries.failed(self.role, error)
                self._counts["prefill_retried" if self.role == "prefill" else "decode_retried"] += 1
        raise tries.last(self.role)

    async def ask(self, url: str, sent: Sent) -> Answer:
        """Returns the whole answer of this server, whose status is final. Raises NotServedError."""
        async with self._open(url, sent) as response:
            return Answer(response.status, response.headers, await self._read(url, response, whole=True))

    @asynccontextmanager
    async def stream(self, url: str, sent: Sent) -> AsyncIterator[Opened]:
        """Yields an answer that has begun. Raises NotServedError. Leaving the context early aborts the request."""
        async with self._open(url, sent) as response:
            begin = await self._read(url, response, whole=False)
            yield Opened(url, Answer(response.status, response.headers, begin), response.content.iter_any())

    @asynccontextmanager
    async def _open(self, url: str, sent: Sent) -> AsyncIterator[ClientResponse]:
        headers, body = CIMultiDict(sent.headers), sent.body
        if isinstance(body, dict):
            headers["Content-Type"], body = "application/json", encoded(body)
        self.running[url] += 1
        try:
            try:
                response = await self._session.request(
                    sent.method, URL(url + sent.path, encoded=True), data=body, headers=headers, timeout=_PATIENT,
                    allow_redirects=False,
                )  # fmt: skip
            except BROKEN as error:
                unseen = isinstance(error, (ClientConnectorError, ConnectionTimeoutError))
                raise own_limit(error) or self._lost(url, error, request_not_sent=unseen) from error
            try:
                yield response
            finally:
                response.close()
        finally:
            self.running[url] -= 1

    async def _read(self, url: str, response: ClientResponse, whole: bool) -> bytes:
        """Returns the body, or its first part if not `whole`. Only then has the server begun to answer."""
        status = response.status
        try:
            whole, content = whole or not is_final(status), response.content
            body = await (gathered(content.iter_any()) if whole else content.readany())
            if whole and len(body) > MOST_PARSED:
                raise ClientPayloadError(f"an answer of more than {MOST_PARSED >> 20} MiB")
        except BROKEN as error:
            raise self._lost(url, error, request_not_sent=False) from error
        if status >= 500:
            self.broke_off(url)
        else:
            self.answered(url)
        if not is_final(status):
            answer = Answer(status, response.headers, body)
            raise NotServedError(
                f"{self.role} {url}: answered {status}", request_not_sent=False, answer=answer
            )
        return body

    def _lost(self, url: str, error: Exception, request_not_sent: bool) -> NotServedError:
        is_slow = isinstance(error, ConnectionTimeoutError)  # it may have many connections to accept
        self.ring.failed(url, time.monotonic(), lost=request_not_sent and not is_slow)
        return NotServedError(f"{self.role} {url}: {type(error).__name__}: {error}", request_not_sent)

    async def probe(self, url: str) -> None:
        """Asks a server again and again whether it is alive."""
        timeout = ClientTimeout(_PROBE_S)
        while True:
            try:
                request = self._session.get(f"{url}/health", timeout=timeout, allow_redirects=False)
                async with request as response:
                    alive: bool | None = response.status == 200
            except BROKEN as error:
                alive = None if own_limit(error) else False
            if alive and self.ring.draining(url):
                self.ring.began(url, await self._start_time(url))
            if alive:
                self.answered(url)
            elif alive is False:
                self.ring.failed(url, time.monotonic())
            await asyncio.sleep(_DRAINING_EVERY_S if self.ring.draining(url) else _PROBE_EVERY_S)

    async def _start_time(self, url: str) -> str:
        """Returns when the server's process began, as it says itself, or ""."""
        with suppress(*BROKEN):
            get = self._session.get(f"{url}/metrics", timeout=ClientTimeout(_PROBE_S), allow_redirects=False)
            async with get as response:
                found = _START_TIME.search(await gathered(response.content.iter_any()))
                return found[1].decode() if found else ""
        return ""


async def gathered(pieces: AsyncIterator[bytes], begin: bytes = b"") -> bytes:
    """Returns the whole of a body, or a part of a larger one that exceeds MOST_PARSED."""
    body = bytearray(begin)
    async for piece in pieces:
        body += piece
        if len(body) > MOST_PARSED:
            break
    return bytes(body)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
