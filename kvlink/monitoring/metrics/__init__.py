# SPDX-License-Identifier: Apache-2.0
"""What workers and coordinators counted, for Prometheus. Only who asks for metrics needs prometheus_client.

A server that has a registry of its own takes a worker into it:
`registry.register(kvlink.monitoring.metrics.worker.WorkerCollector([worker]))`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.monitoring.worker_stats import Counted

__all__ = ["serve"]


def serve(worker: Counted, config: WorkerConfig) -> Callable[[], None]:
    """Serves /metrics until the function that it returns is called. Raises ConfigError."""
    try:
        from kvlink.monitoring.metrics.serving import MetricsPort
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("prometheus_client"):
            raise
        raise ConfigError(
            "KVLINK_METRICS_PORT needs prometheus_client: pip install 'kvlink[metrics]', or set it to 0"
        ) from error
    return MetricsPort(worker, config.metrics_host or config.host, config.metrics_port).close
