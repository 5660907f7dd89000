# SPDX-License-Identifier: Apache-2.0
"""The status page as an option of `kvlink coordinator`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import typer

from kvlink.coordinator.coordinator import BackgroundService, Coordinator
from kvlink.errors import ConfigError


def beside(host: str, port: int | None) -> BackgroundService:
    """None: no page. Raises ConfigError when what it needs is not installed."""
    if port is None:
        return lambda coordinator: nullcontext()
    try:
        from kvlink.monitoring.status_page.serving import showing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("aiohttp", "prometheus_client"):
            raise
        raise ConfigError(
            f"the status page needs {error.name}: pip install 'kvlink[metrics]', or leave out --http-port"
        ) from error

    @asynccontextmanager
    async def page(coordinator: Coordinator) -> AsyncIterator[None]:
        async with showing(coordinator, host, port) as url:
            typer.echo(f"kvlink status page on {url}")
            yield

    return page
