# SPDX-License-Identifier: Apache-2.0
"""Handles the requests of clients: each gets the answer of a decode server, piece by piece."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack

from aiohttp import web

from kvlink import tracing
from kvlink.router import replies
from kvlink.router.answering import DECODE_ALONE, Answering, Asked, NoPrefill, Refused
from kvlink.router.bodies import Body, named_ticket
from kvlink.router.chats import Chats
from kvlink.router.continuation import can_continue
from kvlink.router.counts import Counts
from kvlink.router.resuming import Resuming
from kvlink.router.upstream import NotServed, Upstream
from kvlink.tracing import HEADER, Kind, TraceParent

_log = logging.getLogger("kvlink.router")

_OURS = (
    "Accept-Encoding",
    "Connection",
    "Content-Length",
    "Content-Type",
    "Expect",
    "Host",
    "Transfer-Encoding",
)


class Proxy:
    """The request handlers for aiohttp.

    With `recompute`, decode computes prompts if no prefill server is up; otherwise the answer is 503. Prompts of at
    least `streaming_from` tokens are sent to decode while prefill still computes; None never does that. Prefill servers
    may raise that number by their answers. `chats` keep the tickets of decode's answers for prefill; None keeps none.
    With `migrate`, streamed answers go on at another decode server if theirs drains or breaks off.
    """

    def __init__(
        self,
        prefill: Upstream,
        decode: Upstream,
        recompute: bool = True,
        streaming_from: int | None = None,
        chats: Chats | None = None,
        migrate: bool = False,
    ) -> None:
        self.counts = Counts()
        self._prefill = prefill
        self._decode = decode
        self._recompute = recompute
        self._chats = chats
        self._answering = Answering(prefill, decode, self.counts, recompute, streaming_from, chats)
        self._resuming = Resuming(self._answering, decode, self.counts) if migrate else None

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
        answer_as = uuid.uuid4().hex if self._chats is not None and request.path not in DECODE_ALONE else ""
        asked = Asked(request.path, body, headers, answer_as)
        keep, named = self._keeping(asked)
        if self._resuming is not None and can_continue(request.path, body):
            return await self._resuming.stream(request, asked, keep, named)
        async with AsyncExitStack() as stack:
            _, answer, rest = await self._answering.open_any(stack, asked)
            return await replies.passed_on(request, asked.request_id, answer, rest, keep, named)

    def _keeping(self, asked: Asked) -> tuple[replies.Keep | None, Body | None]:
        """Returns what keeps a ticket for the chat's next turn, and the ticket of an answer that carries none."""
        chats = self._chats
        if chats is None or not asked.answer_as:
            return None, None

        def keep(ticket: Body) -> None:
            self.counts["tickets_kept"] += chats.keep(asked.body, asked.headers, ticket)

        return keep, named_ticket(asked.answer_as)

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
