# SPDX-License-Identifier: Apache-2.0
"""Handles the requests of clients: each gets the answer of a decode server, piece by piece."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import AsyncExitStack

from aiohttp import web
from multidict import CIMultiDict

from kvlink import tracing
from kvlink.tracing import HEADER, Kind, TraceParent

from . import bodies, replies
from .answering import Answering, NoHandoff, Options
from .bodies import ANSWER_OF, ENCODING, REQUEST_ID, Body, TooDeep
from .continuation import can_continue
from .counts import Counts
from .resuming import Resuming
from .retries import NotServed, OwnLimit, Tries
from .upstream import Sent, Upstream

_log = logging.getLogger("kvlink.integrations.router")

_HANDED_OFF = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))
_COMPUTE_ONLY = frozenset(("/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"))
"""Paths that only compute an answer, so that a request may be repeated."""


class Proxy:
    """The request handlers for aiohttp."""

    def __init__(self, prefill: Upstream, decode: Upstream, counts: Counts, options: Options) -> None:
        self.counts = counts
        self._sides = prefill, decode
        self._options = options
        self._answering = Answering(prefill, decode, counts, options)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handles a request of a client. It is cancelled when the client disconnects."""
        try:
            content = await request.read()
        except web.HTTPRequestEntityTooLarge:
            most_mib = request.client_max_size >> 20
            return replies.error(
                413, f"the body exceeds {most_mib} MiB, the limit of this router; send a shorter prompt"
            )
        headers = bodies.end_to_end(request.headers)
        headers.setdefault(REQUEST_ID, uuid.uuid4().hex)
        parent = TraceParent.parse(headers.get(HEADER, ""))
        about = {"kvlink.request_id": headers[REQUEST_ID]}
        with tracing.span(f"{request.method} {request.path}", Kind.SERVER, parent, about) as span:
            if span is None:
                return await self._answered(request, content, headers)
            headers[HEADER] = str(span.context)
            if parent is None:  # a trace that begins here does not use another trace's state
                headers.popall("tracestate", None)
            answer = await self._answered(request, content, headers)
            span.set({"http.response.status_code": answer.status})
            if answer.status >= 500:
                span.fail(f"answered {answer.status}")
            return answer

    async def _answered(
        self, request: web.Request, content: bytes, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        is_handed_off = request.method == "POST" and request.path in _HANDED_OFF
        try:
            return await (self._complete if is_handed_off else self._pass_through)(request, content, headers)
        except (NotServed, NoHandoff) as nobody:
            last = nobody.last if isinstance(nobody, NoHandoff) else nobody
            if not (isinstance(nobody, NoHandoff) and nobody.is_refusal):
                self.counts["own_limit" if isinstance(last, OwnLimit) else "refused"] += 1
                _log.warning("refused request=%s error=%s", headers[REQUEST_ID], last)
            if last.answer is not None:
                return replies.whole(last.answer)
            if last.untouched:
                return replies.error(503, str(last))
            return replies.error(502, f"{last}; no further server is asked: the request may be the cause")

    async def _pass_through(
        self, request: web.Request, content: bytes, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        try:
            content = bodies.without_handoff(content)
        except TooDeep as error:
            return replies.error(400, f"the request body cannot be passed on: {error}")
        tries = Tries(headers[REQUEST_ID], request.method in _HARMLESS or request.path in _COMPUTE_ONLY)
        sent = Sent(request.rel_url.raw_path_qs, content or None, headers, request.method)
        async with AsyncExitStack() as stack:
            _, answer, rest = await self._answering.pass_through(stack, sent, tries)
            return await replies.passed_on(request, headers[REQUEST_ID], answer, rest)

    async def _complete(
        self, request: web.Request, content: bytes, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        if headers.pop(ENCODING, "identity") != "identity":
            return replies.error(415, "the router takes no compressed body; send it without Content-Encoding")
        headers.popall("Content-Type", None)
        try:
            body = bodies.parsed(content)
        except ValueError as error:
            return replies.error(400, f"the request body is not JSON for this router: {error}")
        if not isinstance(body, dict):
            return replies.error(400, "the request body is not a JSON object")
        answer_as = uuid.uuid4().hex if self._answering.chats is not None else ""
        asked = Sent(request.path, body, headers, answer_as=answer_as)
        keep, named = self._keeping(asked)
        if self._options.migrate and can_continue(request.path, body):
            resuming = Resuming(self._answering, self._sides[1], self.counts, asked)
            return await resuming.stream(request, keep, named)
        async with AsyncExitStack() as stack:
            _, answer, rest = await self._answering.open_any(stack, asked, Tries(asked.request_id))
            return await replies.passed_on(request, asked.request_id, answer, rest, keep, named)

    def _keeping(self, asked: Sent) -> tuple[replies.Keep | None, Body | None]:
        """Returns what keeps a ticket for the chat's next turn, and the ticket of an answer that carries none."""
        chats = self._answering.chats
        if chats is None or not asked.answer_as:
            return None, None

        def keep(ticket: Body) -> None:
            self.counts["tickets_kept"] += chats.keep(asked.body, asked.headers, ticket)

        return keep, {ANSWER_OF: asked.answer_as}

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Returns 200 if a request could be served now, else 503, and the servers that are up."""
        now_s = time.monotonic()
        up = {
            side.role: [url for url in side.ring.urls if side.ring.available(url, now_s)]
            for side in self._sides
        }
        serves = up["decode"] and (up["prefill"] or self._options.recompute)
        return web.json_response(up, status=200 if serves else 503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Returns the counts for Prometheus."""
        return web.Response(text=self.counts.prometheus())
