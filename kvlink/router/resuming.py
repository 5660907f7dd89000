# SPDX-License-Identifier: Apache-2.0
"""Streams an answer to a client from one decode server after another.

If a server drains, the answer moves to one that has copied its cache. If a server breaks off, another one computes the
tokens so far again. The client sees one answer, and no token twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum, auto

from aiohttp import web

from kvlink.router import replies
from kvlink.router.answering import Answering, Asked, NoPrefill, Opened, Refused
from kvlink.router.bodies import Body
from kvlink.router.copying import copy_ahead
from kvlink.router.counts import Counts
from kvlink.router.server_events import DONE, EventTooLong, ServerEvents, ended, event_of, value_of
from kvlink.router.streamed_answer import BrokenOff, StreamedAnswer
from kvlink.router.upstream import BROKEN, NotServed, Upstream

_log = logging.getLogger("kvlink.router")

_NO_PROGRESS_S = 30.0
"""A client whose answer broke off waits no longer for its next token."""
_RETRY_S = 0.5
_LOOK_S = 5.0
"""After this time without an event, the router looks whether the server still answers probes."""


class _End(Enum):
    """Why no more of a server's answer is passed on."""

    COMPLETE = auto()
    BROKEN = auto()
    MOVES = auto()


class Resuming:
    """Streams the answers to requests that `can_continue`."""

    def __init__(self, answering: Answering, decode: Upstream, counts: Counts) -> None:
        self._answering = answering
        self._decode = decode
        self._counts = counts

    async def stream(
        self, request: web.Request, asked: Asked, keep: replies.Keep | None, named: Body | None
    ) -> web.StreamResponse:
        """Streams the answer. `keep` and `named` are those of `passed_on`. Raises what `open_any` raises.

        If nobody can continue an answer, the connection is aborted, so that it does not look complete.
        """
        answer = StreamedAnswer(asked.path, asked.body)
        async with AsyncExitStack() as stack:
            first = await self._answering.open_any(stack, asked._replace(body=answer.asking()))
            if not _is_stream(first):
                return await replies.passed_on(
                    request, asked.request_id, first.answer, first.rest, keep, named
                )
            response = await replies.begun(request, first.answer)
            try:
                if await self._stream(response, answer, asked, first, stack):
                    if keep is not None and named is not None:
                        keep(named)
                    await response.write_eof()
                    return response
                self._counts["lost"] += 1
            except ConnectionError:
                pass  # the client is gone
        replies.abort(request)
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        answer: StreamedAnswer,
        asked: Asked,
        opened: Opened,
        stack: AsyncExitStack,
    ) -> bool:
        """Returns whether the answer was completed. `stack` has the connection to the server that gives it."""
        number, failed, until_s = 0, set[str](), 0.0
        while True:
            before = answer.num_tokens
            async with self._moving(opened.url, answer, asked) as moving:
                end = await self._pass_on(response, answer, opened, moving)
            await stack.aclose()  # the server aborts what was not complete
            if end is _End.COMPLETE:
                return True
            if not answer.can_be_continued:
                return False
            if answer.num_tokens > before or not number:
                failed, until_s = set(), time.monotonic() + _NO_PROGRESS_S
            number += 1
            rest = _rest_of(asked, answer, number)
            following = None
            if end is _End.MOVES:
                following = await self._moved(stack, rest, moving.result())
            else:
                failed.add(opened.url)
            following = following or await self._resumed(stack, rest, failed, until_s)
            if following is None:
                return False
            opened = following

    async def _pass_on(
        self,
        response: web.StreamResponse,
        answer: StreamedAnswer,
        opened: Opened,
        moving: asyncio.Task[str],
    ) -> _End:
        events = ServerEvents()
        try:
            async for piece in self._pieces(opened):
                output = bytearray()
                end = _taken(output, events.feed(piece), answer, moving)
                if output:
                    await response.write(output)
                if end is not None:
                    return end
        except (BrokenOff, EventTooLong) as error:
            _log.warning(
                "an answer broke off server=%s tokens=%d error=%s", opened.url, answer.num_tokens, error
            )
        if not answer.is_finished:
            return _End.BROKEN
        await response.write(ended(DONE))
        return _End.COMPLETE

    async def _pieces(self, opened: Opened) -> AsyncIterator[bytes]:
        """Yields the body of an answer. Raises BrokenOff if the connection breaks, or if the server hangs."""
        piece: bytes | None = opened.answer.begin
        while piece is not None:
            yield piece
            piece = await self._next_piece(opened)

    async def _next_piece(self, opened: Opened) -> bytes | None:
        """Returns None at the end, and nothing if nothing came in a while."""
        try:
            async with asyncio.timeout(_LOOK_S) as looking:
                return await anext(opened.rest, None)
        except BROKEN as error:
            if looking.expired() and self._decode.is_up(opened.url):
                return b""
            self._decode.broke_off(opened.url)
            raise BrokenOff(f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _moving(
        self, source: str, answer: StreamedAnswer, asked: Asked
    ) -> AsyncIterator[asyncio.Task[str]]:
        """Yields what returns, once `source` drains, the server that has copied the answer's cache, or ""."""
        moving = asyncio.create_task(self._copied(source, answer, asked))
        try:
            yield moving
        finally:
            if not moving.done():
                moving.cancel()
                await asyncio.gather(moving, return_exceptions=True)

    async def _copied(self, source: str, answer: StreamedAnswer, asked: Asked) -> str:
        await self._decode.leaves(source)
        target = self._decode.ring.choose(time.monotonic(), [source])
        headers = asked.named("copy").headers
        if target is not None and await copy_ahead(self._decode, source, target, answer, headers):
            return target
        self._counts["not_moved"] += 1
        return ""

    async def _moved(self, stack: AsyncExitStack, asked: Asked, target: str) -> Opened | None:
        """Returns the rest of the answer from the server that has copied it, or None."""
        try:
            opened = await self._answering.open_at(stack, target, asked)
        except NotServed:
            return None
        self._counts["moved"] += 1
        return opened

    async def _resumed(
        self, stack: AsyncExitStack, asked: Asked, failed: set[str], until_s: float
    ) -> Opened | None:
        """Returns the rest of the answer from any server, or None if none gives it in time.

        Servers that drain come last. Those in `failed` are asked again after a wait.
        """
        draining = False
        while time.monotonic() < until_s:
            opened = await self._opened(stack, asked, failed, draining)
            if opened is not None and _is_stream(opened):
                self._counts["resumed"] += 1
                return opened
            if opened is not None:
                failed.add(opened.url)
                await stack.aclose()
            elif draining:
                await asyncio.sleep(_RETRY_S)
                failed.clear()
            draining = True
        return None

    async def _opened(
        self, stack: AsyncExitStack, asked: Asked, failed: set[str], draining: bool
    ) -> Opened | None:
        try:
            return await self._answering.open_any(stack, asked, failed, draining)
        except (NotServed, NoPrefill, Refused):
            return None


def _rest_of(asked: Asked, answer: StreamedAnswer, number: int) -> Asked:
    path, body = answer.continued()
    return asked._replace(path=path, body=body).named(str(number))


def _taken(
    output: bytearray, events: list[bytes], answer: StreamedAnswer, moving: asyncio.Task[str]
) -> _End | None:
    """Appends to `output` what the client gets of these events. Returns None if the answer goes on."""
    for event in events:
        value = value_of(event)
        if value is None:
            output += ended(event)
            if event == DONE:
                return _End.COMPLETE
            continue
        try:
            value = answer.take(value)
        except BrokenOff:
            if answer.can_be_continued:
                return _End.BROKEN
            output += b"" if answer.is_finished else ended(event)
            continue
        if value is not None:
            output += event_of(value)
        if answer.can_move and moving.done() and moving.result():
            return _End.MOVES
    return None


def _is_stream(opened: Opened) -> bool:
    answer = opened.answer
    return answer.status == 200 and answer.headers.get("Content-Type", "").startswith("text/event-stream")
