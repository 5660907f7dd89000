# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink coordinator`. It imports what it needs when it runs, as every command does."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlink.cli.json_option import ReadyJson, print_ready


def coordinator(
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0: any free one.")] = 7400,
    store: Annotated[
        str,
        typer.Option(
            metavar="STORE",
            help="Keep state in memory, or in etcd://host:2379,host2:2379 for several coordinators. Append /NAME to "
            "keep several fleets in one etcd.",
        ),
    ] = "memory",
    lease_s: Annotated[
        float, typer.Option(min=1, max=3600, help="Remove a worker that has sent no heartbeat for this long.")
    ] = 10.0,
    reflection: Annotated[bool, typer.Option(help="Let tools such as grpcurl list the services.")] = False,
    log_json: Annotated[bool, typer.Option(help="Log one JSON object per line.")] = False,
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve /metrics and the status page on this port; 0: any."),
    ] = None,
    http_host: Annotated[
        str, typer.Option(help="Serve both on this address. Everybody who reaches it can read them.")
    ] = "127.0.0.1",
    tenants: Annotated[
        str,
        typer.Option(metavar="FILE", help="Read the certificates and tokens of tenants from this file."),
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plaintext to other hosts, like KVLINK_INSECURE=1.")
    ] = False,
    as_json: ReadyJson = False,
) -> None:
    """Serve workers until SIGTERM or SIGINT, then send callers to the next coordinator."""
    import asyncio
    import os
    from dataclasses import replace

    from kvlink import log, tracing
    from kvlink.cli import status_page
    from kvlink.config import WorkerConfig, sources
    from kvlink.control import Security
    from kvlink.coordinator.coordinator import serve
    from kvlink.coordinator.gc_tuning import tune_gc

    config = WorkerConfig.from_env()
    level = "info" if sources(os.environ)["log"] == "default" else config.log
    log.setup(level, log_json or config.log_json)
    tracing.start()

    page = status_page.Page(http_host, http_port)

    def ready(address: str) -> None:
        if page.url and not as_json:
            typer.echo(f"kvlink status page on {page.url}")
        print_ready(as_json, f"kvlink coordinator on {address}", coordinator=address, status_page=page.url)

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
