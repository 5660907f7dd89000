# SPDX-License-Identifier: Apache-2.0
"""Gets the answer to a request: prefill computes the prompt and one token, and its handoff goes to a decode server."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from kvlink.runtime.supervised import start_awaited
from kvlink.tracing import HEADER

from . import bodies
from .bodies import REQUEST_ID, Body, asking_for_a_ticket, decode_body, one_handoff_suffices
from .chats import Chats
from .counts import Counts
from .retries import Answer, NotServedError, OwnLimit, Tries, is_final
from .upstream import Opened, Sent, Upstream, ended

_log = logging.getLogger("kvlink.integrations.router")


class NoHandoff(Exception):
    """The request ends without decode: prefill refused it, or gave no answer and decode must not compute prompts."""

    def __init__(self, last: NotServedError) -> None:
        super().__init__(str(last))
        self.last = last
        self.is_refusal = last.answer is not None and is_final(last.answer.status)
        """Whether decode would refuse it too."""


class Options(NamedTuple):
    """The behaviour that an operator chooses."""

    recompute: bool = True
    """Decode computes prompts if no prefill server is up. Otherwise the answer is HTTP 503."""
    streaming_from: int | None = None
    """Prompts of so many tokens go to decode while prefill still computes. Prefill may raise that. None: none do."""
    bidirectional: bool = False
    """Prefill gets the ticket of the chat's last answer."""
    migrate: bool = False
    """Streamed answers go on at another decode server if theirs drains or breaks off."""


class Answering:
    """Asks both sides."""

    def __init__(self, prefill: Upstream, decode: Upstream, counts: Counts, options: Options) -> None:
        self._prefill = prefill
        self._decode = decode
        self._counts = counts
        self._options = options
        self._advised_from = 0
        self.chats = Chats() if options.bidirectional else None

    async def open_any(
        self,
        stack: AsyncExitStack,
        asked: Sent,
        tries: Tries,
        without: Collection[str] = (),
        draining: bool = False,
        first: str = "",
    ) -> Opened:
        """Returns the answer of the first decode server that begins one, as `Upstream.first`. Raises NoHandoff, too.

        Leaving `stack` closes the connection. No two servers get the same handoff: one that died may have used it up.
        """
        handoff, is_known = None, False

        async def ask(url: str) -> Opened:
            nonlocal handoff, is_known
            if not is_known and not len(tries) and self._streams(asked.body):
                here = await stack.enter_async_context(AsyncExitStack())
                came = await here.enter_async_context(self._following(url, asked, tries))
                if isinstance(came, Opened):
                    self._counts["followed"] += 1
                    return came
                handoff = came
                await here.aclose()
            elif not is_known:
                handoff = await self._hand_off(asked, tries)
                if not tries.may_ask(self._decode.role):
                    raise tries.last(self._prefill.role)
            is_known = True
            try:
                return await self.open_at(stack, url, asked._replace(body=decode_body(asked.body, handoff)))
            except NotServedError as error:
                is_known = error.request_not_sent
                raise

        return await self._decode.first(ask, tries, without, draining, first)

    async def pass_through(self, stack: AsyncExitStack, sent: Sent, tries: Tries) -> Opened:
        """Returns the answer of a decode server to a request that nothing is known of. Raises NotServedError."""
        self._counts["passed_through"] += 1
        streaming = self._decode.stream
        return await self._decode.first(lambda url: stack.enter_async_context(streaming(url, sent)), tries)

    async def open_at(self, stack: AsyncExitStack, url: str, asked: Sent) -> Opened:
        """Returns the answer of this decode server, whose request is `asked` as it is. Raises NotServedError."""
        if asked.answer_as:
            asked = asked._replace(body=asking_for_a_ticket(asked.body, asked.answer_as))
        return await stack.enter_async_context(self._decode.stream(url, asked))

    def _streams(self, body: Body) -> bool:
        least = self._options.streaming_from
        is_suited = least is not None and one_handoff_suffices(body)
        return is_suited and bodies.num_tokens(body) >= max(least or 0, self._advised_from)

    @asynccontextmanager
    async def _following(self, url: str, asked: Sent, tries: Tries) -> AsyncIterator[Opened | Body | None]:
        """Asks both sides at once, so that decode pulls blocks while prefill computes. Yields decode's answer.

        It yields the handoff if decode cannot follow. Leaving the context ends both requests.
        """
        stream = uuid.uuid4().hex
        body = bodies.following_body(asked.body, stream, asked.headers.get(HEADER, ""))
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(AsyncExitStack())
            prefilling = start_awaited(self._hand_off(asked, tries, stream))
            stack.push_async_callback(ended, prefilling)
            answering = start_awaited(self.open_at(opened, url, asked._replace(body=body)))
            stack.push_async_callback(ended, answering)
            await asyncio.wait({prefilling, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not bodies.announced(await prefilling, stream):
                yield prefilling.result()
                return
            try:
                came: Opened | Body | None = await answering
            except NotServedError as error:
                if error.answer is None or error.answer.status < 500:
                    raise
                tries.failed(self._decode.role, error)
                came = await prefilling
            yield came

    async def _hand_off(self, asked: Sent, tries: Tries, stream: str = "") -> Body | None:
        """Returns prefill's handoff, or None if decode is to compute the prompt. Raises NoHandoff."""
        body, headers = asked.body, asked.headers
        if not one_handoff_suffices(body):
            self._counts["not_suited"] += 1
            return None
        ticket = self.chats.ticket_for(body, headers) if self.chats is not None else None
        self._counts["tickets_sent"] += ticket is not None
        prefilling = bodies.prefill_body(body, stream, headers.get(HEADER, ""), ticket)
        try:
            sent = asked._replace(body=prefilling)
            answer = await self._prefill.first(lambda url: self._prefill.ask(url, sent), tries)
        except OwnLimit:
            raise
        except NotServedError as error:
            if not self._options.recompute:
                raise NoHandoff(error) from error
            self._counts["without_prefill"] += 1
            return None
        return self._handoff_in(answer, headers)

    def _handoff_in(self, answer: Answer, headers: Mapping[str, str]) -> Body | None:
        if answer.status >= 400:
            raise NoHandoff(
                NotServedError(f"prefill answered {answer.status}", request_not_sent=False, answer=answer)
            )
        handoff = bodies.handoff_of(bodies.object_in(answer.begin)) if answer.status == 200 else None
        self._advised_from = bodies.streams_from(handoff) or self._advised_from
        self._counts["handed_off" if handoff else "without_handoff"] += 1
        if not handoff:
            _log.warning("prefill gave no handoff, decode computes it request=%s", headers[REQUEST_ID])
        return handoff
