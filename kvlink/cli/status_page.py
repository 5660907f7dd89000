# SPDX-License-Identifier: Apache-2.0
"""Adds the status page to `kvlink coordinator`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from kvlink.coordinator.coordinator import BackgroundService, Coordinator
from kvlink.errors import ConfigError


class Page:
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
