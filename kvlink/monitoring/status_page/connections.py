# SPDX-License-Identifier: Apache-2.0
"""Bounds the page's connections in number and time, because they use file descriptors of the coordinator."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvlink.runtime.supervised import for_each, start_loop

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
