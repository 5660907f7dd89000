# SPDX-License-Identifier: Apache-2.0
"""Exports the counts of workers and coordinators to Prometheus. Only the use of metrics needs prometheus_client.

A server with its own registry adds a worker to it:
`registry.register(kvlink.monitoring.metrics.worker.WorkerCollector([worker]))`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.monitoring.worker_stats import StatsSource

__all__ = ["serve"]


def serve(worker: StatsSource, config: WorkerConfig) -> Callable[[], None]:
    """Serves /metrics of a worker. Returns the function that stops it. Raises ConfigError."""
    try:
        from kvlink.monitoring.metrics.serving import MetricsPort
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        raise ConfigError(
            "KVLINK_METRICS_PORT needs prometheus_client: run pip install 'kvlink[metrics]', or set it to 0"
        ) from error
    return MetricsPort(worker, config.metrics_host or config.host, config.metrics_port).close
