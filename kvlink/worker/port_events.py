# SPDX-License-Identifier: Apache-2.0
"""Says once when the device of a NIC goes away, and once when it is back."""

from __future__ import annotations

import logging

from kvlink.transfer.completion import Bell
from kvlink.transfer.engine import Engine

_log = logging.getLogger("kvlink.nics")


class PortLog:
    """Belongs to the event loop that runs when it is made."""

    def __init__(self, engine: Engine, worker_id: str) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._bell = Bell(self._tell)
        engine.core.watch_ports(self._bell.queue)
        self._known = {port.name: port for port in engine.ports()}

    def close(self) -> None:
        """Idempotent."""
        self._bell.close()

    def _tell(self) -> None:
        for port in self._engine.ports():
            before, self._known[port.name] = self._known[port.name], port
            if port.times_away > before.times_away:
                why = port.away or "it is back already"
                _log.warning("NIC is gone worker=%s port=%s why=%s", self._worker_id, port.name, why)
            if before.away and not port.away:
                _log.warning("NIC is back worker=%s port=%s", self._worker_id, port.name)
