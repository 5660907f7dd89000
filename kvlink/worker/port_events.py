# SPDX-License-Identifier: Apache-2.0
"""Logs when the device of a NIC is removed and when it returns."""

from __future__ import annotations

import logging

from kvlink.transfer.completion import QueueReader
from kvlink.transfer.engine import Engine

_log = logging.getLogger("kvlink.nics")


class PortLog:
    """Logs the port events of one engine on the event loop that is running at construction."""

    def __init__(self, engine: Engine, worker_id: str) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._reader = QueueReader(self._log_changes)
        try:
            engine.core.watch_ports(self._reader.queue)
            self._known = {port.name: port for port in engine.ports()}
        except BaseException:
            self._reader.close()
            raise

    def close(self) -> None:
        """Stops logging. Idempotent."""
        self._reader.close()

    def _log_changes(self, _: object) -> None:
        for port in self._engine.ports():
            before, self._known[port.name] = self._known[port.name], port
            if port.times_away > before.times_away:
                why = port.away or "it is back already"
                _log.warning("NIC is gone worker=%s port=%s why=%s", self._worker_id, port.name, why)
            if before.away and not port.away:
                _log.warning("NIC is back worker=%s port=%s", self._worker_id, port.name)
