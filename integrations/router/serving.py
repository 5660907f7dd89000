# SPDX-License-Identifier: Apache-2.0
"""Runs the router as a server, until its process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from aiohttp import ClientSession, DummyCookieJar, TCPConnector, web

from kvlink.errors import KVLinkError
from kvlink.runtime.supervised import start_loop

from .answering import Options
from .bodies import MOST_PARSED
from .choice import Ring
from .control_socket import listen
from .counts import Counts
from .proxy import Proxy
from .upstream import Upstream, ended

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
