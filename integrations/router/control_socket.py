# SPDX-License-Identifier: Apache-2.0
"""Lets a user of this host drain servers, by an abstract Unix socket that is named by the port of the router.

The kernel names the user at the other end: both sides believe only the user of the router and root.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from aiohttp import web

from kvlink.errors import ConfigError, KVLinkError

from .bodies import object_in
from .upstream import Upstream

_log = logging.getLogger("kvlink.integrations.router")

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 10.0


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
    change = web.post("/{command:drain|force|resume}", control.change)
    app.add_routes([web.get("/servers", control.servers), change])
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
        self._each = [(side, url) for side in sides for url in side.ring.urls]

    async def servers(self, _: web.Request) -> web.Response:
        now_s = time.monotonic()
        return web.json_response(
            [
                {"role": s.role, "server": url, "state": s.ring.state(url, now_s), "running": s.running[url]}
                for s, url in self._each
            ]
        )

    async def change(self, request: web.Request) -> web.Response:
        command = request.match_info["command"]
        server = (object_in(await request.read()) or {}).get("server", "")
        sides = [side for side, url in self._each if url == server]
        if not sides:
            known = ", ".join(url for _, url in self._each)
            return _refused(404, f"the router has no server {server}; it has {known}")
        for side in sides if command == "drain" else ():
            if side.ring.is_last(server, time.monotonic()):
                return _refused(409, f"no other {side.role} server is up; --force drains the last one, too")
        for side in sides:
            if command == "resume":
                side.resume(server)
            else:
                await side.drain(server)
            _log.info("%s server %s: %s", side.role, server, command)
        return await self.servers(request)


def _refused(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)


class _Connection(http.client.HTTPConnection):
    """A connection of the command line to the router that listens on `port`."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.connect(socket_name(self.port))
        if not is_own(self.sock):
            raise KVLinkError("another user's process has the name of the router's control socket")


@contextmanager
def asking(port: int) -> Iterator[Callable[[str, str], list[dict[str, Any]]]]:
    """Yields a function that sends "drain", "force", "resume" or "servers", and a server, and returns all servers.

    Raises ConfigError if no router listens on `port`, and for what the router refuses.
    """
    with closing(_Connection("router", port)) as connection:

        def ask(command: str, server: str) -> list[dict[str, Any]]:
            body = json.dumps({"server": server}) if server else None
            try:
                connection.request("POST" if server else "GET", f"/{command}", body)
                answer = connection.getresponse()
                found = json.loads(answer.read())
            except OSError as error:
                raise ConfigError(
                    f"no router of this host answers for port {port} ({error.strerror or error}); give its port by "
                    "--router"
                ) from error
            if answer.status != 200:
                raise ConfigError(found["error"])
            rows: list[dict[str, Any]] = found
            return rows

        yield ask
