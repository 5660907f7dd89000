# SPDX-License-Identifier: Apache-2.0
"""Implements the proxy: prefill computes one token, its handoff goes to decode, and its answer is streamed back."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from kvlink import tracing
from kvlink.router import replies
from kvlink.router.bodies import (
    Body,
    asking_for_a_ticket,
    decode_body,
    handoff_of,
    named_ticket,
    num_tokens,
    one_handoff_suffices,
    prefill_body,
    streams_from,
)
from kvlink.router.chats import Chats
from kvlink.router.counts import Counts
from kvlink.router.following import Followed, following
from kvlink.router.upstream import Answer, NotServed, Upstream
from kvlink.tracing import HEADER, Kind, TraceParent

_log = logging.getLogger("kvlink.router")

DECODE_ALONE = ("/v1/responses", "/v1/embeddings")
"""The paths that decode serves alone.

A response may call tools and refer to others on the same server. An embedding generates no answer.
"""
_OURS = (
    "Accept-Encoding",
    "Connection",
    "Content-Length",
    "Content-Type",
    "Expect",
    "Host",
    "Transfer-Encoding",
)


class Refused(Exception):
    """Prefill answered with an error about the request. Decode would refuse it too, so the client gets that answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"prefill answered {answer.status}")
        self.answer = answer


class NoPrefill(Exception):
    """No prefill server answered, and decode must not compute prompts."""


class Proxy:
    """The request handlers for aiohttp.

    With `recompute`, decode computes prompts if no prefill server is up; otherwise the answer is 503. Prompts of at
    least `streaming_from` tokens are sent to decode while prefill still computes; None never does that. Prefill servers
    may raise that number by their answers. `chats` keep the tickets of decode's answers for prefill; None keeps none.
    """

    def __init__(
        self,
        prefill: Upstream,
        decode: Upstream,
        recompute: bool = True,
        streaming_from: int | None = None,
        chats: Chats | None = None,
    ) -> None:
        self.counts = Counts()
        self._prefill = prefill
        self._decode = decode
        self._recompute = recompute
        self._streaming_from = streaming_from
        self._advised_from = 0
        self._chats = chats

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Handles /v1/completions, /v1/chat/completions, /inference/v1/generate, and the paths of DECODE_ALONE.

        It is cancelled when the client disconnects.
        """
        try:
            body = await request.json()
        except web.HTTPRequestEntityTooLarge:
            most_mib = request.client_max_size >> 20
            return replies.error(
                413, f"the body exceeds {most_mib} MiB, the limit of this router; send a shorter prompt"
            )
        except ValueError as error:
            return replies.error(400, f"the request body is not JSON: {error}")
        if not isinstance(body, dict):
            return replies.error(400, "the request body is not a JSON object")
        headers = request.headers.copy()
        for name in _OURS:
            headers.popall(name, None)
        headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        parent = TraceParent.parse(headers.get(HEADER, ""))
        about = {"kvlink.request_id": headers["X-Request-Id"]}
        with tracing.span(f"POST {request.path}", Kind.SERVER, parent, about) as span:
            if span is None:
                return await self._answered(request, body, headers)
            headers[HEADER] = str(span.context)
            if parent is None:  # a trace that begins here does not use another trace's state
                headers.popall("tracestate", None)
            answer = await self._answered(request, body, headers)
            span.set({"http.response.status_code": answer.status})
            if answer.status >= 500:
                span.fail(f"answered {answer.status}")
            return answer

    async def _answered(
        self, request: web.Request, body: Body, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        try:
            return await self._complete(request, body, headers)
        except Refused as refused:
            return replies.whole(refused.answer)
        except (NotServed, NoPrefill) as nobody:
            self.counts["refused"] += 1
            _log.warning("refused request=%s error=%s", headers["X-Request-Id"], nobody)
            return replies.error(503, str(nobody))

    async def _complete(
        self, request: web.Request, body: Body, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Tries decode servers in turn. No two of them get the same handoff: one that died may have used it up."""
        tried: list[str] = []
        reason, handoff, alone = "no decode server is up", None, request.path in DECODE_ALONE
        known = alone
        answer_as = uuid.uuid4().hex if self._chats is not None and not alone else ""
        self.counts["not_suited"] += alone
        while (url := self._decode.ring.choose(time.monotonic(), tried)) is not None:
            follows = not known and self._streams(body)
            try:
                if follows:
                    async with self._following(url, request.path, body, headers, answer_as) as came:
                        if isinstance(came, Followed):
                            self.counts["followed"] += 1
                            return await self._passed_on(request, body, headers, answer_as, *came)
                        handoff = came
                elif not known:
                    handoff = await self._hand_off(request.path, body, headers)
                known = True
                asked = decode_body(body, handoff)
                if answer_as:
                    asked = asking_for_a_ticket(asked, answer_as)
                answering = self._decode.stream(url, request.path, asked, headers)
                async with answering as (answer, rest):
                    return await self._passed_on(request, body, headers, answer_as, answer, rest)
            except NotServed as error:
                tried.append(url)
                reason, known = str(error), alone or (known and error.untouched)
                self.counts["decode_retried"] += 1
        raise NotServed(reason, untouched=True)

    async def _passed_on(
        self,
        request: web.Request,
        body: Body,
        headers: Mapping[str, str],
        answer_as: str,
        answer: Answer,
        rest: AsyncIterator[bytes],
    ) -> web.StreamResponse:
        chats, request_id = self._chats, headers["X-Request-Id"]
        if chats is None or not answer_as:
            return await replies.passed_on(request, request_id, answer, rest)

        def keep(ticket: Body) -> None:
            self.counts["tickets_kept"] += chats.keep(body, headers, ticket)

        return await replies.passed_on(request, request_id, answer, rest, keep, named_ticket(answer_as))

    def _streams(self, body: Body) -> bool:
        return (
            self._streaming_from is not None
            and one_handoff_suffices(body)
            and num_tokens(body) >= max(self._streaming_from, self._advised_from)
        )

    def _following(
        self, url: str, path: str, body: Body, headers: Mapping[str, str], answer_as: str
    ) -> AbstractAsyncContextManager[Followed | Body | None]:
        stream = uuid.uuid4().hex
        prefill = self._hand_off(path, body, headers, stream)
        return following(prefill, self._decode, url, path, body, headers, stream, answer_as)

    async def _hand_off(
        self, path: str, body: Body, headers: Mapping[str, str], stream: str = ""
    ) -> Body | None:
        """Returns prefill's handoff, or None if decode is to compute the prompt. Raises NoPrefill and Refused."""
        if not one_handoff_suffices(body):
            self.counts["not_suited"] += 1
            return None
        ticket = self._chats.ticket_for(body, headers) if self._chats is not None else None
        self.counts["tickets_sent"] += ticket is not None
        try:
            asked = prefill_body(body, stream, headers.get(HEADER, ""), ticket)
            answer = await self._prefill.ask_any("POST", path, asked, headers)
        except NotServed as error:
            if not self._recompute:
                raise NoPrefill(str(error)) from error
            self.counts["without_prefill"] += 1
            return None
        return self._handoff_in(answer, headers)

    def _handoff_in(self, answer: Answer, headers: Mapping[str, str]) -> Body | None:
        if answer.status != 200:
            raise Refused(answer)
        try:
            handoff = handoff_of(json.loads(answer.begin))
        except ValueError:
            handoff = None
        self._advised_from = streams_from(handoff) or self._advised_from
        self.counts["handed_off" if handoff else "without_handoff"] += 1
        if not handoff:
            _log.warning("prefill gave no handoff, decode computes it request=%s", headers["X-Request-Id"])
        return handoff

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Returns /v1/models of a decode server."""
        try:
            return replies.whole(await self._decode.ask_any("GET", request.path))
        except NotServed as error:
            return replies.error(503, str(error))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Returns 200 if a request could be served now, else 503, and the servers that are up."""
        now_s = time.monotonic()
        up = {
            side.role: [url for url in side.ring.urls if side.ring.available(url, now_s)]
            for side in (self._prefill, self._decode)
        }
        serves = up["decode"] and (up["prefill"] or self._recompute)
        return web.json_response(up, status=200 if serves else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Returns the counts for Prometheus."""
        return web.Response(text=self.counts.prometheus())
