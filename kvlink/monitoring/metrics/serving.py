# SPDX-License-Identifier: Apache-2.0
"""Serves a worker's /metrics on a few own threads, because the process belongs to an inference server."""

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
from kvlink.monitoring.worker_stats import StatsSource
from kvlink.runtime.supervised import start_thread

_log = logging.getLogger("kvlink.http")
_MAX_SHOWN = 200
MAX_CONNECTIONS = 16
"""Bounds open connections. A further one closes the oldest."""
_SILENCE_S = 5.0
_CLOSING_S = 1.0
_CONNECTION_S = 15.0
"""Bounds the time of request and answer of a client that is never silent."""


class MetricsPort:
    """Serves `worker` at http://host:port/metrics until `close`. Raises ConfigError if it cannot listen on the port."""

    def __init__(self, worker: StatsSource, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerCollector([worker]))
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give each worker of a host its own "
                "KVLINK_METRICS_PORT, or set it to 0 to serve none"
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._stopping = threading.Event()
        self._thread = start_thread("metrics", self._server.serve_forever, self._stopping)

    def close(self) -> None:
        """Stops serving. Closing again has no effect."""
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Logs nothing, because scrapes are frequent."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 4 * MAX_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, self._room = found[0][0], threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}  # of open connections, guarded by the lock below
        self._deadlines_lock = threading.Lock()
        self._quota = LogQuota()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self._close_oldest()
            if not self._room.acquire(timeout=_CLOSING_S):
                self.shutdown_request(request)
                return
        with self._deadlines_lock:
            self._deadlines[request] = time.monotonic() + _CONNECTION_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was left, so nobody else makes room
            self._room.release()
            raise

    def _close_oldest(self) -> None:
        """Closes the oldest connection, so that slow clients do not keep others out. Its thread ends at once."""
        with self._deadlines_lock:
            if (oldest := next(iter(self._deadlines), None)) is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        """Closes connections that take too long. Runs twice a second, on the accepting thread."""
        with self._deadlines_lock:
            now = time.monotonic()
            for request in [each for each, deadline in self._deadlines.items() if deadline < now]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._deadlines_lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs errors of requests, except for clients that time out or disconnect."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and (more := self._quota.take()) is not None:
            _log.warning(
                "cannot answer a request for metrics error=%s suppressed=%d", repr(error)[:_MAX_SHOWN], more
            )

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()
