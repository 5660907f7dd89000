# SPDX-License-Identifier: Apache-2.0
"""Implements the coordinator's HTTP server, on its event loop. Needs aiohttp and prometheus_client."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from kvlink.control.denials import LogQuota
from kvlink.coordinator.coordinator import Coordinator
from kvlink.errors import ConfigError
from kvlink.monitoring.fleet_view import plain
from kvlink.monitoring.metrics.coordinator import exposition
from kvlink.runtime.supervised import for_each, start_loop

_HERE = Path(__file__).parent
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FRESH_S = 1.0
_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@asynccontextmanager
async def serve_status_page(coordinator: Coordinator, host: str, port: int) -> AsyncIterator[str]:
    """Serves until the context is left, and yields the URL. Raises ConfigError if it cannot listen on the port."""
    application = _application(coordinator)
    runner = web.AppRunner(application, access_log=None, logger=request_log(), shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    try:
        with (
            closing(BoundedConnections(runner.server)) as connections,
            closing(await _listen(connections, host, port)) as listening,
        ):
            yield _url(host, listening)
    finally:
        await runner.cleanup()


async def _listen(connections: BoundedConnections, host: str, port: int) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(connections, host, port)
    except OSError as error:
        raise ConfigError(
            f"the status page cannot listen on {host}:{port}: {error.strerror}; set another --http-port"
        ) from error


def _url(host: str, listening: asyncio.Server) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.sockets[0].getsockname()[1]}"


def _application(coordinator: Coordinator) -> web.Application:
    page = read_page()
    headers = {**_NO_STORE, "Content-Security-Policy": policy(page), "Referrer-Policy": "no-referrer"}

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers=headers)

    cached = CachedStats(coordinator)

    async def stats(_: web.Request) -> web.Response:
        return web.Response(text=await cached.text(), content_type="application/json", headers=_NO_STORE)

    async def metrics(_: web.Request) -> web.Response:
        text = exposition(await coordinator.status(), coordinator.counts, coordinator.readiness.health())
        return web.Response(body=text, headers={"Content-Type": _METRICS_TYPE})

    async def ready(_: web.Request) -> web.Response:
        why = coordinator.readiness.why_not()
        return web.Response(text=f"{why or 'ready'}\n", status=503 if why else 200, headers=_NO_STORE)

    app = web.Application(client_max_size=1024)
    shown = {"/": show, "/stats.json": stats, "/metrics": metrics, "/ready": ready}
    app.add_routes(web.get(path, answer) for path, answer in shown.items())
    return app


def read_page() -> str:
    """Returns the page with its style and script inside, so that it is one answer and loads nothing else."""
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    for place, name in (("/* page.css */", "page.css"), ("// page.js", "page.js")):
        page = page.replace(place, (_HERE / name).read_text(encoding="utf-8"))
    return page


class CachedStats:
    """Makes the JSON of the status page at most once per second, whatever the number of clients.

    A thread encodes it, so that a large fleet does not block the event loop.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = asyncio.Lock()
        self._text = ""
        self._made = -math.inf

    async def text(self) -> str:
        """Returns the JSON, which is at most one second old."""
        async with self._lock:
            if time.monotonic() - self._made >= _FRESH_S:
                about = self._coordinator.about()._asdict()
                shown = await self._coordinator.status(), await self._coordinator.overview()
                self._text = await asyncio.to_thread(lambda: json.dumps({"about": about, **plain(*shown)}))
                self._made = time.monotonic()
            return self._text


def policy(page: str) -> str:
    """Returns a content security policy that allows only the page's own script and style, even if escaping fails."""
    script, style = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    inline = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


MAX_CONNECTIONS = 256
CONNECTION_S = 30.0
"""Connections that last longer are closed. Answers take milliseconds, and browsers reconnect."""
_LOOK_EVERY_S = 1.0


class BoundedConnections:
    """Makes the protocols of a listening socket for `loop.create_server`. Belongs to one event loop until `close`.

    With too many connections, the oldest one is closed. Answers take milliseconds, so slow clients keep no others out.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._since: dict[RequestHandler, float] = {}
        self._closing = start_loop("page connections", self._close_old)

    def __call__(self) -> asyncio.Protocol:
        """Returns the protocol for one new connection."""
        open_now = self._server.connections
        for oldest in open_now[: max(0, len(open_now) + 1 - MAX_CONNECTIONS)]:
            _abort(oldest)
        return self._server()

    def close(self) -> None:
        """Stops closing old connections. Closing again has no effect."""
        self._closing.cancel()

    async def _close_old(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, CONNECTION_S))
            now = time.monotonic()
            self._since = {one: self._since.get(one, now) for one in self._server.connections}
            old = [connection for connection, since in self._since.items() if now - since >= CONNECTION_S]
            for_each("page connections", _abort, old)


def _abort(connection: RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


_MAX_SHOWN = 200
"""Bounds the characters of a text that a client chooses."""


class _Bounded(logging.Filter):
    def __init__(self, quota: LogQuota) -> None:
        super().__init__()
        self._quota = quota

    def filter(self, record: logging.LogRecord) -> bool:
        """Drops records beyond the quota, and the traceback of a malformed request."""
        suppressed = self._quota.take()
        if suppressed is None:
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            record.exc_info = record.exc_text = None
            why = " ".join(error.message.split())[:_MAX_SHOWN]
            record.msg = "bad request status=%d why=%s suppressed=%d"
            record.args = (error.code, why, suppressed)
        return True


def request_log(quota: LogQuota | None = None) -> logging.Logger:
    """Returns the logger for an aiohttp server. Its lines have the form and destination of kvlink's log."""
    logger = logging.getLogger("kvlink.http")
    logger.filters[:] = [_Bounded(quota or LogQuota())]
    return logger
