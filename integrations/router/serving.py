# SPDX-License-Identifier: Apache-2.0
"""Runs the router as a server, until its process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from aiohttp import ClientSession, DummyCookieJar, TCPConnector, web
from multidict import CIMultiDict

from kvlink import tracing
from kvlink.errors import KVLinkError
from kvlink.runtime.supervised import start_loop
from kvlink.tracing import HEADER, Kind, TraceParent

from . import bodies, replies
from .answering import Answering, NoHandoff, Options
from .bodies import ANSWER_OF, ENCODING, MOST_PARSED, REQUEST_ID, Body, TooDeep
from .choice import Ring
from .continuation import can_continue
from .control_socket import listen
from .counts import Counts
from .resuming import Resuming
from .retries import NotServedError, OwnLimit, Tries
from .upstream import Sent, Upstream, ended

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
        except (NotServedError, NoHandoff) as nobody:
            last = nobody.last if isinstance(nobody, NoHandoff) else nobody
            if not (isinstance(nobody, NoHandoff) and nobody.is_refusal):
                self.counts["own_limit" if isinstance(last, OwnLimit) else "refused"] += 1
                _log.warning("refused request=%s error=%s", headers[REQUEST_ID], last)
            if last.answer is not None:
                return replies.whole(last.answer)
            if last.request_not_sent:
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


_log = logging.getLogger("kvlink.integrations.router")

_USUAL = Options()


async def serve(
    prefill: Sequence[str],
    decode: Sequence[str],
    host: str,
    port: int,
    options: Options,
    on_ready: Callable[[str], None],
) -> None:
    """Routes until SIGTERM or SIGINT. `on_ready` gets the address. Raises KVLinkError if it cannot listen."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each request takes two
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with routing(prefill, decode, host, port, options, control=True) as address:
        _log.warning("this router is a demo, not for production; see `kvlink router --help` url=%s", address)
        on_ready(address)
        await stop.wait()


@asynccontextmanager
async def routing(
    prefill: Sequence[str],
    decode: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 0,
    options: Options = _USUAL,
    control: bool = False,
) -> AsyncIterator[str]:
    """Routes between servers, given by their base URLs, and yields its own URL. `control` is for `kvlink drain`."""
    # Each request has its own connection. A server may just be closing a kept connection, and a request lost that way
    # looks like a server that died with it. No client gets another one's cookies, and nothing is inflated.
    async with (
        ClientSession(
            connector=TCPConnector(limit=0, force_close=True),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("Content-Type",),
        ) as session,
        AsyncExitStack() as stack,
    ):
        session._retry_connection = False  # it sends even a DELETE again
        counts = Counts()
        urls = {"prefill": prefill, "decode": decode}
        sides = [Upstream(role, Ring(of_role), session, counts) for role, of_role in urls.items()]
        proxy = Proxy(sides[0], sides[1], counts, options)
        app = web.Application(client_max_size=MOST_PARSED)
        app.add_routes([web.get("/health", proxy.health), web.get("/metrics", proxy.metrics)])
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that disconnects ends its requests to the servers
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=5.0,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for side in sides:
            for url in side.ring.urls:
                stack.push_async_callback(ended, start_loop("router probe", partial(side.probe, url)))
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise KVLinkError(
                f"the router cannot listen on {host}:{port}: {error.strerror}; give another --port"
            ) from error
        port = runner.addresses[0][1]
        if control and (controlled := await listen(sides, port)) is not None:
            stack.push_async_callback(controlled.cleanup)
        yield f"http://{host}:{port}"
