# SPDX-License-Identifier: Apache-2.0
"""A worker's own /metrics, on a thread of prometheus_client's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from kvlink.errors import ConfigError
from kvlink.figures import Counted
from kvlink.metrics.worker import WorkerCollector


class MetricsPort:
    """Serves `worker` at http://host:port/metrics until `close`. Raises ConfigError when the port cannot be had."""

    def __init__(self, worker: Counted, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerCollector([worker]))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give each worker of a host its own "
                "KVLINK_METRICS_PORT, or 0 for none"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
