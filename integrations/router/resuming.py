# SPDX-License-Identifier: Apache-2.0
"""Streams an answer to a client from one decode server after another.

If a server drains, the answer moves to one that has copied its cache. If it breaks off, another one computes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from enum import Enum

from aiohttp import web

from . import replies
from .answering import Answering, NoHandoff
from .bodies import ENCODING, Body
from .counts import Counts
from .moves import CHECK_S, Move, can_continue_here
from .retries import NotServedError, Tries
from .server_events import DONE, ServerEvents, event_of, is_comment, is_done, value_of
from .streamed_answer import BrokenOffError, StreamedAnswer
from .upstream import BROKEN, Opened, Sent, Upstream

_log = logging.getLogger("kvlink.integrations.router")

_NO_SERVER_S = 30.0
"""The longest wait for a server that can continue an answer which broke off."""
_RETRY_S = 0.5
_MOST_WITHOUT_PROGRESS = 1
"""How often an answer that breaks off without a further token goes on: the request itself may end its servers."""
_CHECK_AFTER_S = 5.0
"""After this time without an event, the router looks whether the server still answers probes."""


_End = Enum("_End", ["COMPLETE", "BROKEN", "MOVES"])
"""Why no more of a server's answer is passed on."""


class Resuming:
    """Streams the answer to one request that `can_continue`."""

    def __init__(self, answering: Answering, decode: Upstream, counts: Counts, asked: Sent) -> None:
        self._answering = answering
        self._decode = decode
        self._counts = counts
        self._asked = asked
        self._answer = StreamedAnswer(asked.path, asked.body)
        self._stack = AsyncExitStack()
        """The connection to the server that gives the answer."""
        self._number = 0
        self._failed: set[str] = set()
        """The servers that failed since the last token came."""

    async def stream(
        self, request: web.Request, keep: replies.Keep | None, named: Body | None
    ) -> web.StreamResponse:
        """Streams the answer. `keep` and `named` are those of `passed_on`. Raises what `open_any` raises.

        If nobody can continue, the client gets the last server's error, or the connection is aborted.
        """
        answer, asked = self._answer, self._asked
        async with self._stack as stack:
            with_tokens = asked._replace(body=answer.first_request())
            first = await self._answering.open_any(stack, with_tokens, Tries(asked.request_id))
            if not _is_stream(first):
                return await replies.passed_on(
                    request, asked.request_id, first.answer, first.rest, keep, named
                )
            response = await replies.begun(request, first.answer)
            try:
                if await self._stream(response, first):
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

    async def _stream(self, response: web.StreamResponse, opened: Opened | None) -> bool:
        """Returns whether the answer was completed."""
        answer, without_progress = self._answer, 0
        while opened is not None:
            before = answer.num_tokens
            async with Move(self._decode, opened.url, answer, self._asked, self._counts) as move:
                end = await self._pass_on(response, opened, move)
            await self._stack.aclose()  # the server aborts what was not complete
            if end is _End.COMPLETE:
                return True
            self._number += 1
            if answer.num_tokens > before:
                without_progress = 0
                self._failed.clear()
            if end is _End.BROKEN:
                without_progress += 1
                self._failed.add(opened.url)
            opened = await self._moved(move.target) if end is _End.MOVES else None
            if opened is None and without_progress <= _MOST_WITHOUT_PROGRESS and answer.can_be_continued:
                opened = await self._resumed()
        return False

    async def _pass_on(self, response: web.StreamResponse, opened: Opened, move: Move) -> _End:
        events, answer = ServerEvents(), self._answer
        try:
            async for piece in self._pieces(opened):
                output = bytearray()
                end = await _handled(output, events.feed(piece), answer, move)
                if output:
                    await response.write(output)
                if end is not None:
                    return end
            if answer.is_foreign:  # its end may have any form, too
                await response.write(events.rest)
                return _End.COMPLETE
        except BrokenOffError as error:
            about = "an answer broke off request=%s server=%s tokens=%d error=%s"
            _log.warning(about, move.request_id, opened.url, answer.num_tokens, error)
        if not answer.is_finished:
            return _End.BROKEN
        usage = answer.missing_usage()
        await response.write((event_of(usage) if usage else b"") + DONE)
        return _End.COMPLETE

    async def _pieces(self, opened: Opened) -> AsyncIterator[bytes]:
        """Yields the body of an answer. Raises BrokenOffError if the connection breaks, or if the server hangs."""
        piece: bytes | None = opened.answer.begin
        while piece is not None:
            yield piece
            try:
                piece = await asyncio.wait_for(anext(opened.rest, None), _CHECK_AFTER_S)
            except BROKEN as error:
                is_late = isinstance(error, asyncio.TimeoutError)
                answers = self._decode.ring.answers(opened.url)
                if not is_late or (self._answer.can_be_continued and not answers):
                    self._decode.broke_off(opened.url)
                    raise BrokenOffError(f"{type(error).__name__}: {error}") from error
                piece = b""

    async def _moved(self, target: str) -> Opened | None:
        """Returns the rest of the answer from the server that has copied it, or None."""
        try:
            opened = await self._answering.open_at(self._stack, target, self._rest())
        except NotServedError:
            return None
        if _is_stream(opened):
            return self._goes_on("moved", opened)
        await self._stack.aclose()
        return None

    def _goes_on(self, how: str, opened: Opened) -> Opened:
        self._counts[how] += 1
        _log.info("an answer is %s request=%s server=%s", how, self._asked.request_id, opened.url)
        return opened

    async def _resumed(self) -> Opened | None:
        """Returns the rest of the answer from any server, those that drain last, or None in vain."""
        draining, waited_s, tries = False, 0.0, Tries(self._asked.request_id)
        while tries.may_ask(self._decode.role):
            try:
                opened = await self._opened(draining, tries)
            except (NoHandoff, NotServedError, asyncio.TimeoutError):
                opened = None
            except BrokenOffError:
                return None
            if opened is not None:
                return self._goes_on("resumed", opened)
            await self._stack.aclose()
            if draining:
                if waited_s >= _NO_SERVER_S:
                    return None
                await asyncio.sleep(_RETRY_S)
                waited_s += _RETRY_S
                self._failed.clear()
            draining = True
        return None

    async def _opened(self, draining: bool, tries: Tries) -> Opened | None:
        """Returns None if no server is up. Raises BrokenOffError if none can go on, NotServedError and NoHandoff."""
        url = self._decode.ring.choose(time.monotonic(), self._failed, draining)
        if url is None:
            return None
        self._failed.add(url)
        try:
            checking = can_continue_here(self._decode, url, self._answer, self._asked.headers)
            can_continue = await asyncio.wait_for(checking, CHECK_S)
        except NotServedError as error:
            tries.failed(self._decode.role, error)
            raise
        if not can_continue:
            raise BrokenOffError("its text does not end with a token")
        try:
            opened = await self._answering.open_any(
                self._stack, self._rest(), tries, self._failed, draining, url
            )
        except NoHandoff as error:
            raise BrokenOffError(str(error)) if error.is_refusal else error from None
        if not _is_stream(opened):
            raise BrokenOffError(f"a server answered {opened.answer.status}")
        return opened

    def _rest(self) -> Sent:
        path, body = self._answer.begin_continuation()
        return self._asked._replace(path=path, body=body).named(str(self._number))


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
        except BrokenOffError:
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
