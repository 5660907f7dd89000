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
from contextlib import AsyncExitStack
from enum import Enum, auto

from aiohttp import web

from kvlink.router import replies
from kvlink.router.answering import Answering, Asked, NoPrefill, Opened, Refused
from kvlink.router.bodies import Body
from kvlink.router.copying import can_continue_here
from kvlink.router.counts import Counts
from kvlink.router.moves import CHECK_S, Move
from kvlink.router.server_events import DONE, EventTooLong, ServerEvents, ended, event_of, value_of
from kvlink.router.streamed_answer import BrokenOff, StreamedAnswer
from kvlink.router.upstream import BROKEN, NotServed, Upstream, answers_later

_log = logging.getLogger("kvlink.router")

_NO_SERVER_S = 30.0
"""The longest wait for a server that can continue an answer which broke off."""
_RETRY_S = 0.5
_MOST_WITHOUT_PROGRESS = 3
"""Servers that break off an answer without a further token, before it is lost: the request itself may end them."""
_CHECK_AFTER_S = 5.0
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

        If nobody can continue an answer, the client gets the last server's error, or the connection is aborted, so that
        the answer does not look complete.
        """
        answer = StreamedAnswer(asked.path, asked.body)
        async with AsyncExitStack() as stack:
            first = await self._answering.open_any(stack, asked._replace(body=answer.first_request()))
            if not _is_stream(first):
                return await replies.passed_on(
                    request, asked.request_id, first.answer, first.rest, keep, named
                )
            response = await replies.begun(request, first.answer)
            try:
                if await self._stream(response, answer, asked, first, stack):
                    if keep is not None and named is not None and answer.is_finished:
                        keep(named)
                    await response.write_eof()
                    return response
                self._counts["lost"] += 1
                if answer.error is not None:
                    await response.write(event_of(answer.error) + ended(DONE))
                    await response.write_eof()
                    return response
                _log.warning("a broken answer is lost request=%s", asked.request_id)
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
        number, without_progress, failed = 0, 0, set[str]()
        while True:
            before = answer.num_tokens
            async with Move(self._decode, opened.url, answer, asked, self._counts) as move:
                end = await self._pass_on(response, answer, opened, move)
            await stack.aclose()  # the server aborts what was not complete
            if end is _End.COMPLETE:
                return True
            number += 1
            if answer.num_tokens > before:
                without_progress, failed = 0, set()
            following = None
            if end is _End.MOVES:
                following = await self._moved(stack, _rest_of(asked, answer, number), move.target)
            else:
                without_progress += 1
                failed.add(opened.url)
            if following is None:
                if without_progress > _MOST_WITHOUT_PROGRESS or not answer.can_be_continued:
                    return False
                following = await self._resumed(stack, asked, answer, number, failed)
            if following is None:
                return False
            opened = following

    async def _pass_on(
        self, response: web.StreamResponse, answer: StreamedAnswer, opened: Opened, move: Move
    ) -> _End:
        events = ServerEvents()
        try:
            async for piece in self._pieces(opened, answer):
                output = bytearray()
                end = await _handled(output, events.feed(piece), answer, move)
                if output:
                    await response.write(output)
                if end is not None:
                    return end
        except (BrokenOff, EventTooLong) as error:
            _log.warning(
                "an answer broke off request=%s server=%s tokens=%d error=%s",
                move.request_id,
                opened.url,
                answer.num_tokens,
                error,
            )
        if not answer.is_finished:
            return _End.BROKEN
        usage = answer.missing_usage()
        await response.write((event_of(usage) if usage else b"") + ended(DONE))
        return _End.COMPLETE

    async def _pieces(self, opened: Opened, answer: StreamedAnswer) -> AsyncIterator[bytes]:
        """Yields the body of an answer. Raises BrokenOff if the connection breaks, or if the server hangs."""
        piece: bytes | None = opened.answer.begin
        while piece is not None:
            yield piece
            piece = await self._next_piece(opened, answer)

    async def _next_piece(self, opened: Opened, answer: StreamedAnswer) -> bytes | None:
        """Returns None at the end, and nothing if nothing came in a while."""
        try:
            async with asyncio.timeout(_CHECK_AFTER_S) as waiting:
                return await anext(opened.rest, None)
        except BROKEN as error:
            if waiting.expired() and (self._decode.ring.answers(opened.url) or not answer.can_be_continued):
                return b""
            self._decode.broke_off(opened.url)
            raise BrokenOff(f"{type(error).__name__}: {error}") from error

    async def _moved(self, stack: AsyncExitStack, asked: Asked, target: str) -> Opened | None:
        """Returns the rest of the answer from the server that has copied it, or None."""
        try:
            opened = await self._answering.open_at(stack, target, asked)
        except NotServed:
            return None
        if not _is_stream(opened):
            await stack.aclose()
            return None
        self._counts["moved"] += 1
        _log.info("an answer moved request=%s server=%s", asked.request_id, target)
        return opened

    async def _resumed(
        self, stack: AsyncExitStack, asked: Asked, answer: StreamedAnswer, number: int, failed: set[str]
    ) -> Opened | None:
        """Returns the rest of the answer from any server, or None if none gives it in time, or one refuses.

        Servers that drain come last. Those in `failed` are asked again after a wait.
        """
        draining, waited_s, touched = False, 0.0, 0
        while touched <= _MOST_WITHOUT_PROGRESS:
            try:
                opened = await self._opened(stack, asked, answer, number, failed, draining)
            except (NoPrefill, NotServed, TimeoutError) as error:
                opened = None
                touched += isinstance(error, NotServed) and not error.untouched
            except BrokenOff:
                return None
            if opened is not None:
                self._counts["resumed"] += 1
                _log.info("an answer goes on request=%s server=%s", asked.request_id, opened.url)
                return opened
            await stack.aclose()
            if draining:
                if waited_s >= _NO_SERVER_S:
                    return None
                await asyncio.sleep(_RETRY_S)
                waited_s += _RETRY_S
                failed.clear()
            draining = True
        return None

    async def _opened(
        self,
        stack: AsyncExitStack,
        asked: Asked,
        answer: StreamedAnswer,
        number: int,
        failed: set[str],
        draining: bool,
    ) -> Opened | None:
        """Returns None if no server is up. Raises BrokenOff if none can go on, NotServed and NoPrefill."""
        url = self._decode.ring.choose(time.monotonic(), failed, draining)
        if url is None:
            return None
        async with asyncio.timeout(CHECK_S):
            can_continue = await can_continue_here(self._decode, url, answer, asked.headers)
        if not can_continue:
            raise BrokenOff("its text does not end with a token")
        rest = _rest_of(asked, answer, number)
        try:
            opened = await self._answering.open_any(stack, rest, failed, draining, url)
        except Refused as refused:
            raise _not_given(refused.answer.status) from refused
        if not _is_stream(opened):
            raise _not_given(opened.answer.status)
        return opened


def _not_given(status: int) -> Exception:
    """Returns the exception for a status in place of an answer: another server may answer otherwise, or none would."""
    if answers_later(status):
        return NotServed(f"answered {status}", untouched=False)
    return BrokenOff(f"a server answered {status}")


def _rest_of(asked: Asked, answer: StreamedAnswer, number: int) -> Asked:
    path, body = answer.begin_continuation()
    return asked._replace(path=path, body=body).named(str(number))


async def _handled(output: bytearray, events: list[bytes], answer: StreamedAnswer, move: Move) -> _End | None:
    """Appends to `output` what the client gets of these events. Returns None if the answer goes on."""
    for event in events:
        value = value_of(event)
        if value is None:
            if event == DONE and answer.can_be_continued:
                return _End.BROKEN
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
        if move.target and answer.can_move and await move.can_begin():
            return _End.MOVES
    return None


def _is_stream(opened: Opened) -> bool:
    answer = opened.answer
    return answer.status == 200 and answer.headers.get("Content-Type", "").startswith("text/event-stream")
