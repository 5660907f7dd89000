# SPDX-License-Identifier: Apache-2.0
"""Coordinators and load as processes whose logs are kept, wherever a command prefix puts them."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outages.load import Totals

_TESTS = Path(__file__).parent.parent
_FIRST_LINE_S = 60.0


class Program:
    """A process that keeps its log over restarts. `prefix` runs it elsewhere, as `ip netns exec …`."""

    def __init__(
        self, folder: Path, name: str, command: Sequence[str], prefix: Sequence[str] = (), **env: str
    ) -> None:
        self.log = folder / f"{name}.log"
        self._command = [*prefix, *command]
        self._env = {**os.environ, "PYTHONPATH": str(_TESTS), "KVLINK_LOG": "debug", **env}
        self.start()

    def start(self) -> None:
        """Returns when it has said its first line, `first_line`."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
            )
        self._unread = b""
        try:
            self.first_line = self.line(_FIRST_LINE_S)
        except BaseException:
            self.kill()
            raise

    def line(self, within_s: float) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([out], [], [], within_s)
            more = os.read(out, 1 << 16) if readable else b""
            assert more, (
                f"{self._command[:4]} said nothing, status {self.process.poll()}: {self.logged[-2_000:]}"
            )
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().strip()

    @property
    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def num_lines(self, least: str = "info") -> int:
        """How many lines of this level or above are in the log."""
        levels = ("debug", "info", "warning", "error", "critical")
        wanted = "|".join(levels[levels.index(least) :])
        return len(re.findall(rf"^\S+Z (?:{wanted})\b", self.logged, re.MULTILINE))

    def memory_mib(self) -> float:
        """Resident now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self.process.kill()
        self.process.communicate()


class Coordinator(Program):
    """The command that operators run. It keeps its port over restarts."""

    def __init__(
        self,
        folder: Path,
        name: str,
        store: str = "memory",
        prefix: Sequence[str] = (),
        *options: str,
        **env: str,
    ) -> None:
        program = "from kvlink.cli import main; main()"
        command = [sys.executable, "-c", program, "coordinator", "--store", store, *options]
        self._ports = ["--port", "0"]
        super().__init__(folder, name, command, prefix, **env)

    def start(self) -> None:
        bare, self._command = self._command, [*self._command, *self._ports]
        super().start()
        self._command = bare
        self.page = ""
        if "status page" in self.first_line:
            self.page = self.first_line.rpartition(" ")[2]
            self.first_line = self.line(_FIRST_LINE_S)
        self.address = self.first_line.rpartition(" ")[2]
        self._ports = ["--port", self.address.rpartition(":")[2]]


class LoadProcess(Program):
    """See outages.load."""

    def __init__(
        self, folder: Path, addresses: str, secret: str, prefix: Sequence[str] = (), num_workers: int = 4,
        rate: float = 8.0, **env: str,
    ) -> None:  # fmt: skip
        command = [sys.executable, "-m", "outages.load", addresses, str(num_workers), str(rate), secret]
        super().__init__(folder, "load", command, prefix, **env)

    def totals(self) -> Totals:
        """Since the last time."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return Totals(**json.loads(self.line(30.0)))

    def finish(self) -> Totals:
        """Ends it when every handoff has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        totals = Totals(**json.loads(self.line(150.0)))
        self.process.stdin = None
        self.process.communicate(timeout=30)
        return totals
