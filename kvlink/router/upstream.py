# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the servers behind the router. Failures that another server might not have become NotServed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientConnectorError, ClientError, ClientResponse, ClientSession, ClientTimeout

from kvlink.router.bodies import Body
from kvlink.router.choice import Ring

BROKEN = (ClientError, OSError, TimeoutError)
"""The exceptions of aiohttp for a server that is absent or gone."""

# These statuses say that the server is not ready, and nothing about the request.
_NOT_SERVING = (502, 503, 504)
_PROBE_S = 10.0
# Computing a long prompt may take minutes and a stream may pause, so only a broken connection ends a request.
_PATIENT = ClientTimeout(total=None, sock_connect=3.0)


def answers_later(status: int) -> bool:
    """Returns whether a status says nothing about the request, so that the same one may be answered another time."""
    return status >= 500 or status == 429


class NotServed(Exception):
    """A server did not begin to answer. `untouched` says that it never saw the request."""

    def __init__(self, reason: str, untouched: bool) -> None:
        super().__init__(reason)
        self.untouched = untouched


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, with the part of its body that has been read."""

    status: int
    headers: Mapping[str, str]
    begin: bytes


class Upstream:
    """The servers of one role."""

    def __init__(self, role: str, ring: Ring, session: ClientSession) -> None:
        self.role = role
        self.ring = ring
        self.running: Counter[str] = Counter()
        """The number of requests that each server is answering, probes not counted."""
        self._leaving = {url: asyncio.Event() for url in ring.urls}
        self._session = session

    def drain(self, url: str) -> None:
        """Sends a server no new requests from now on, and lets those that can move leave it."""
        self.ring.drain(url)
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
        self.ring.failed(url, time.monotonic(), gone=False)

    def answered(self, url: str) -> None:
        """Records that a server answered, which ends a drain if it was gone meanwhile."""
        self.ring.succeeded(url)
        if not self.ring.draining(url):
            self._leaving[url].clear()

    async def ask_any(
        self, method: str, path: str, body: Body | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Returns the whole answer of the first server that gives one. Raises the NotServed of the last one else."""
        tried: list[str] = []
        last = NotServed(f"no {self.role} server is up", untouched=True)
        while (url := self.ring.choose(time.monotonic(), tried)) is not None:
            tried.append(url)
            try:
                return await self.ask(method, url, path, body, headers)
            except NotServed as error:
                last = error
        raise last

    async def ask(
        self, method: str, url: str, path: str, body: Body | None, headers: Mapping[str, str] | None
    ) -> Answer:
        """Returns the whole answer of this server. Raises NotServed."""
        async with self._open(method, url, path, body, headers) as response:
            whole = await self._read(url, response, whole=True)
        return Answer(response.status, response.headers, whole)

    @asynccontextmanager
    async def stream(
        self, url: str, path: str, body: Body, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Yields an answer that has begun, and the rest of its body, which may raise one of BROKEN. Raises NotServed.

        Leaving the context early closes the connection, upon which the server aborts the request.
        """
        async with self._open("POST", url, path, body, headers) as response:
            begin = await self._read(url, response, whole=False)
            yield Answer(response.status, response.headers, begin), response.content.iter_any()

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, path: str, body: Body | None, headers: Mapping[str, str] | None
    ) -> AsyncIterator[ClientResponse]:
        self.running[url] += 1
        try:
            try:
                response = await self._session.request(
                    method, url + path, json=body, headers=headers, timeout=_PATIENT
                )
            except BROKEN as error:
                raise self._gone(url, error, untouched=isinstance(error, ClientConnectorError)) from error
            try:
                yield response
            finally:
                response.close()
        finally:
            self.running[url] -= 1

    async def _read(self, url: str, response: ClientResponse, whole: bool) -> bytes:
        """Returns the body, or its first part if not `whole`. Only then has the server begun to answer."""
        try:
            body = await (response.read() if whole else response.content.readany())
        except BROKEN as error:
            raise self._gone(url, error, untouched=False) from error
        if response.status in _NOT_SERVING:
            raise self._gone(url, f"answered {response.status}", untouched=False)
        self.answered(url)
        return body

    def _gone(self, url: str, error: object, untouched: bool) -> NotServed:
        self.ring.failed(url, time.monotonic(), gone=untouched)
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        return NotServed(f"{self.role} {url}: {reason}", untouched)

    async def probe(self) -> None:
        """Asks all servers whether they are alive."""
        await asyncio.gather(*map(self._probe, self.ring.urls))

    async def _probe(self, url: str) -> None:
        try:
            async with self._session.get(f"{url}/health", timeout=ClientTimeout(_PROBE_S)) as response:
                alive = response.status == 200
        except BROKEN:
            alive = False
        if alive:
            self.answered(url)
        else:
            self.ring.failed(url, time.monotonic())
