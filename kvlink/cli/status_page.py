# SPDX-License-Identifier: Apache-2.0
"""Adds the status page to `kvlink coordinator`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import typer

from kvlink.coordinator.coordinator import BackgroundService, Coordinator
from kvlink.errors import ConfigError


def status_page_service(host: str, port: int | None) -> BackgroundService:
    """Returns the service that serves the page, or one that does nothing if `port` is None.

    Raises ConfigError if a package it needs is not installed.
    """
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
        async with serve_status_page(coordinator, host, port) as url:
            typer.echo(f"kvlink status page on {url}")
            yield

    return page
