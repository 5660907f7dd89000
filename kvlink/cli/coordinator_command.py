# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink coordinator`. It imports what it needs when it runs, as every command does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from kvlink.cli.checks import ReadyJson, print_ready
from kvlink.errors import ConfigError

if TYPE_CHECKING:
    from kvlink.coordinator.coordinator import BackgroundService, Coordinator


def coordinator(
    host: Annotated[
        str,
        typer.Option(
            help="Listen on this address. Addresses other than loopback need certificates or --insecure."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Listen on this port. 0 takes any free port.")
    ] = 7400,
    store: Annotated[
        str,
        typer.Option(
            metavar="STORE",
            help="Keep state in memory, or in etcd://host:2379,host2:2379, "
            "which several coordinators can share. Append /NAME to keep several fleets in one etcd.",
        ),
    ] = "memory",
    lease_s: Annotated[
        float,
        typer.Option(
            min=1, max=3600, help="Remove a worker that has sent no heartbeat for this many seconds."
        ),
    ] = 10.0,
    reflection: Annotated[
        bool, typer.Option(help="Let tools such as grpcurl list the gRPC services.")
    ] = False,
    log_json: Annotated[
        bool, typer.Option(help="Log one JSON object per line, like KVLINK_LOG_JSON=1.")
    ] = False,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve /metrics and the status page on this port. 0 takes "
            "any free port. By default neither is served.",
        ),
    ] = None,
    http_host: Annotated[
        str,
        typer.Option(
            help="Serve /metrics and the status page on this address. Everybody who reaches it can read them."
        ),
    ] = "127.0.0.1",
    tenants: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Read from this JSON file which certificate or token belongs to which tenant.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow plaintext connections from other hosts, like "
            "KVLINK_INSECURE=1. Everybody on the network can then read and write every request's blocks.",
        ),
    ] = False,
    as_json: ReadyJson = False,
) -> None:
    """Run a coordinator, in which workers find each other and requests, until SIGTERM or SIGINT.

    When it ends, it sends its callers to the next coordinator.
    """
    import asyncio
    import os
    from dataclasses import replace

    from kvlink import tracing
    from kvlink.cli import checks
    from kvlink.config import WorkerConfig, sources
    from kvlink.control import Security
    from kvlink.coordinator.coordinator import serve, tune_gc
    from kvlink.runtime import log

    host = checks.can_listen(host, port, "--host", "--port")
    if http_port is not None:
        http_host = checks.can_listen(http_host, http_port, "--http-host", "--http-port")
    elif http_host != "127.0.0.1":
        raise ConfigError("--http-host has no effect without --http-port; give both")
    config = WorkerConfig.from_env()
    level = "info" if sources(os.environ)["log"] == "default" else config.log
    log.setup(level, log_json or config.log_json)
    tracing.start()

    page = _Page(http_host, http_port)

    def ready(address: str, waits_for_store: bool) -> None:
        if page.url and not as_json:
            typer.echo(f"kvlink status page on {page.url}")
        problem = "its store does not answer; calls are refused until it does" if waits_for_store else ""
        text = ": ".join(filter(None, (f"kvlink coordinator on {address}", problem)))
        print_ready(as_json, text, coordinator=address, status_page=page.url, problem=problem)

    security = Security.of(replace(config, insecure=insecure or config.insecure))
    gate = security.coordinator_gate(tenants)
    tune_gc()
    asyncio.run(
        serve(
            host,
            port,
            store=store,
            lease_s=lease_s,
            reflect=reflection,
            security=security,
            gate=gate,
            on_ready=ready,
            background_service=page.service(),
        )
    )


class _Page:
    """The page of one coordinator. `url` is None until it is served, and stays None without a port."""

    def __init__(self, host: str, port: int | None) -> None:
        self._host, self._port = host, port
        self.url: str | None = None

    def service(self) -> BackgroundService:
        """Returns the service that serves the page, or one that does nothing without a port.

        Raises ConfigError if a package it needs is not installed.
        """
        port = self._port
        if port is None:
            return lambda coordinator: nullcontext()
        try:
            from kvlink.monitoring.status_page.serving import serve_status_page
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("aiohttp", "prometheus_client"):
                raise
            raise ConfigError(
                f"the status page needs {error.name}: run pip install 'kvlink[metrics]', or omit --http-port"
            ) from error

        @asynccontextmanager
        async def page(coordinator: Coordinator) -> AsyncIterator[None]:
            async with serve_status_page(coordinator, self._host, port) as self.url:
                yield

        return page
