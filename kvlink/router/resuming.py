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
from kvlink.router.headers import ENCODING
from kvlink.router.moves import CHECK_S, Move
from kvlink.router.retries import NotServed, Tries
from kvlink.router.server_events import DONE, ServerEvents, event_of, is_comment, is_done, value_of
from kvlink.router.streamed_answer import BrokenOff, StreamedAnswer
from kvlink.router.upstream import BROKEN, Upstream

_log = logging.getLogger("kvlink.router")

_NO_SERVER_S = 30.0
"""The longest wait for a server that can continue an answer which broke off."""
_RETRY_S = 0.5
_MOST_WITHOUT_PROGRESS = 1
"""How often an answer that breaks off without a further token goes on: the request itself may end its servers."""
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
            with_tokens = asked._replace(body=answer.first_request())
            first = await self._answering.open_any(stack, with_tokens, Tries(asked.request_id))
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
                    await response.write(event_of(answer.error) + DONE)
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
            if answer.is_foreign:  # its end may have any form, too
                await response.write(events.rest)
                return _End.COMPLETE
        except BrokenOff as error:
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
        await response.write((event_of(usage) if usage else b"") + DONE)
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
            return await asyncio.wait_for(anext(opened.rest, None), _CHECK_AFTER_S)
        except BROKEN as error:
            is_late = isinstance(error, asyncio.TimeoutError)
            if is_late and (self._decode.ring.answers(opened.url) or not answer.can_be_continued):
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
        draining, waited_s, tries = False, 0.0, Tries(asked.request_id)
        while tries.may_ask(self._decode.role):
            try:
                opened = await self._opened(stack, asked, answer, number, failed, draining, tries)
            except (NoPrefill, NotServed, asyncio.TimeoutError):
                opened = None
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
        tries: Tries,
    ) -> Opened | None:
        """Returns None if no server is up. Raises BrokenOff if none can go on, NotServed and NoPrefill."""
        url = self._decode.ring.choose(time.monotonic(), failed, draining)
        if url is None:
            return None
        failed.add(url)
        try:
            checking = can_continue_here(self._decode, url, answer, asked.headers)
            can_continue = await asyncio.wait_for(checking, CHECK_S)
        except NotServed as error:
            tries.failed(self._decode.role, error)
            raise
        if not can_continue:
            raise BrokenOff("its text does not end with a token")
        rest = _rest_of(asked, answer, number)
        try:
            opened = await self._answering.open_any(stack, rest, tries, failed, draining, url)
        except Refused as refused:
            raise BrokenOff(str(refused)) from refused
        if not _is_stream(opened):
            raise BrokenOff(f"a server answered {opened.answer.status}")
        return opened


def _rest_of(asked: Asked, answer: StreamedAnswer, number: int) -> Asked:
    path, body = answer.begin_continuation()
    return asked._replace(path=path, body=body).named(str(number))


async def _handled(output: bytearray, events: list[bytes], answer: StreamedAnswer, move: Move) -> _End | None:
    """Appends to `output` what the client gets of these events. Returns None if the answer goes on."""
    for event in events:
        value = value_of(event)
        if value is None:
            if is_done(event) and answer.can_be_continued:
                return _End.BROKEN
            output += event
            if is_done(event):
                return _End.COMPLETE
            answer.is_foreign = answer.is_foreign or not is_comment(event)
            continue
        try:
            shown = answer.take(value)
        except BrokenOff:
            if answer.can_be_continued:
                return _End.BROKEN
            output += b"" if answer.is_finished else event
            continue
        if shown is not None:
            output += event if shown is value else event_of(shown)
        if move.target and answer.can_move and await move.can_begin():
            return _End.MOVES
    return None


def _is_stream(opened: Opened) -> bool:
    headers = opened.answer.headers
    is_plain = headers.get("Content-Type", "").startswith("text/event-stream") and ENCODING not in headers
    return opened.answer.status == 200 and is_plain
