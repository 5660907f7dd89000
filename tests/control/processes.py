# SPDX-License-Identifier: Apache-2.0
"""A coordinator as a process that may be killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_SERVE = """
import asyncio, sys
from kvlink.coordinator import serve
def ready(address, waits_for_store):
    print(address, flush=True)
asyncio.run(serve(port=int(sys.argv[1]), lease_s=float(sys.argv[2]), store=sys.argv[3], on_ready=ready))
"""


class CoordinatorProcess:
    """Keeps its port over restarts."""

    def __init__(self, lease_s: float, store: str = "memory") -> None:
        self._lease_s = lease_s
        self._store = store
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        command = [sys.executable, "-c", _SERVE, port, str(self._lease_s), self._store]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.process.communicate()[1]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.kill()
        self.start()
