# SPDX-License-Identifier: Apache-2.0
"""A worker's own /metrics, on a few threads of its own: an inference server runs around them."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvlink.control.denials import LogQuota
from kvlink.errors import ConfigError
from kvlink.monitoring.metrics.worker import WorkerCollector
from kvlink.monitoring.worker_stats import Counted

_log = logging.getLogger("kvlink.http")
_MAX_SHOWN = 200
MAX_VISITORS = 16
"""At a time; for further ones the oldest makes room."""
_SILENCE_S = 5.0
_LEAVING_S = 1.0
_VISIT_S = 15.0
"""Of a visitor who never falls silent: question and answer together."""


class MetricsPort:
    """Serves `worker` at http://host:port/metrics until `close`. Raises ConfigError when the port cannot be had."""

    def __init__(self, worker: Counted, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerCollector([worker]))
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give each worker of a host its own "
                "KVLINK_METRICS_PORT, or 0 for none"
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvlink-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 4 * MAX_VISITORS

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, self._room = found[0][0], threading.BoundedSemaphore(MAX_VISITORS)
        self._visits: dict[socket.socket, float] = {}  # open, and when they must be over
        self._visits_lock = threading.Lock()
        self._quota = LogQuota()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._hang_up_on_the_oldest()
            if not self._room.acquire(timeout=_LEAVING_S):
                self.shutdown_request(request)
                return
        with self._visits_lock:
            self._visits[request] = time.monotonic() + _VISIT_S
        super().process_request(request, client_address)

    def _hang_up_on_the_oldest(self) -> None:
        """Its thread ends at once. Slow clients keep nobody out who asks and goes."""
        with self._visits_lock:
            if (oldest := next(iter(self._visits), None)) is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        """Twice a second, on the thread that accepts: hangs up on those who take too long."""
        with self._visits_lock:
            now = time.monotonic()
            for request in [each for each, until in self._visits.items() if until < now]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._visits_lock:
            self._visits.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Strangers who fall silent, or hang up, are no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and (unsaid := self._quota.take()) is not None:
            _log.warning("bad request for metrics error=%s unsaid=%d", repr(error)[:_MAX_SHOWN], unsaid)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()
