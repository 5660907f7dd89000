# SPDX-License-Identifier: Apache-2.0
"""How many connections the page takes, and for how long: their descriptors are the coordinator's."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MAX_CONNECTIONS = 256
CONNECTION_S = 30.0
"""Answers take milliseconds, and browsers come back; what dribbles or does not read is gone then."""
_LOOK_EVERY_S = 1.0


class Visitors:
    """Makes the protocols of a listening socket, for `loop.create_server`. Lives on one event loop until `close`.

    When there are too many, the oldest connection makes room. An answer takes milliseconds, so slow clients keep nobody
    out.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._came: dict[RequestHandler, float] = {}
        self._parting = asyncio.get_running_loop().create_task(self._part())

    def __call__(self) -> asyncio.Protocol:
        """For one connection."""
        open_now = self._server.connections
        for each in open_now[: max(0, len(open_now) + 1 - MAX_CONNECTIONS)]:
            _hang_up(each)
        return self._server()

    def close(self) -> None:
        """Idempotent."""
        self._parting.cancel()

    async def _part(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, CONNECTION_S))
            now = time.monotonic()
            self._came = {each: self._came.get(each, now) for each in self._server.connections}
            for each, came in self._came.items():
                if now - came >= CONNECTION_S:
                    _hang_up(each)


def _hang_up(visitor: RequestHandler) -> None:
    if visitor.transport is not None:
        visitor.transport.abort()
