# SPDX-License-Identifier: Apache-2.0
"""Lets a user of this host drain servers, by an abstract Unix socket that is named by the port of the router.

The kernel says who is at the other end, so neither side trusts a name or a token: only the user of the router and root
are answered.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from kvlink.router.bodies import object_in
from kvlink.router.upstream import Upstream

_log = logging.getLogger("kvlink.router")

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def socket_name(port: int) -> str:
    """Returns the name of the socket of the router that listens on this TCP port."""
    return f"\0kvlink-router-{port}"


def is_own(connection: socket.socket) -> bool:
    """Returns whether the process at the other end is of this user, or of root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] in (os.geteuid(), 0)


async def listen(sides: Sequence[Upstream], port: int) -> web.AppRunner | None:
    """Serves until the runner is cleaned up. Returns None, with a warning, if the name is taken."""
    control = _Control(sides)
    app = web.Application(middlewares=[_only_own])
    app.add_routes(
        [web.get("/servers", control.servers), web.post("/{command:drain|force|resume}", control.change)]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.UnixSite(runner, socket_name(port)).start()
    except OSError as error:
        await runner.cleanup()
        _log.warning("servers cannot be drained: the control socket of port=%d error=%s", port, error)
        return None
    return runner


@web.middleware
async def _only_own(request: web.Request, handler: Any) -> web.StreamResponse:
    connection = request.get_extra_info("socket")
    if connection is None or not is_own(connection):
        return _refused(403, "only the user of the router and root may drain servers")
    answer: web.StreamResponse = await handler(request)
    return answer


class _Control:
    """The request handlers."""

    def __init__(self, sides: Sequence[Upstream]) -> None:
        self._sides = sides

    async def servers(self, _: web.Request) -> web.Response:
        now_s = time.monotonic()
        each = ((side, url) for side in self._sides for url in side.ring.urls)
        return web.json_response(
            [
                {"role": s.role, "server": url, "state": _state(s, url, now_s), "running": s.running[url]}
                for s, url in each
            ]
        )

    async def change(self, request: web.Request) -> web.Response:
        command = request.match_info["command"]
        server = (object_in(await request.read()) or {}).get("server", "")
        sides = [side for side in self._sides if server in side.ring.urls]
        if not sides:
            known = ", ".join(url for side in self._sides for url in side.ring.urls)
            return _refused(404, f"the router has no server {server}; it has {known}")
        for side in sides:
            if command == "drain" and side.ring.is_last(server, time.monotonic()):
                return _refused(409, f"no other {side.role} server is up; --force drains the last one, too")
        for side in sides:
            if command == "resume":
                side.resume(server)
            else:
                await side.drain(server)
            _log.info("%s server %s: %s", side.role, server, command)
        return await self.servers(request)


def _state(side: Upstream, url: str, now_s: float) -> str:
    if side.ring.draining(url):
        return "draining"
    return "up" if side.ring.available(url, now_s) else "away"


def _refused(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)
