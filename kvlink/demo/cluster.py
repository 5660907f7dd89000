# SPDX-License-Identifier: Apache-2.0
"""The processes of the demo, and which of them plays which role."""

from __future__ import annotations

from types import TracebackType

from kvlink.demo.processes import Child, Family
from kvlink.demo.text import Expected

_START_S = 120.0  # importing torch and transformers from a cold disk


class Cluster:
    """A coordinator, a prefill, a decode and a reference process. They start at once; use as a context manager.

    `patience` multiplies every deadline. `device` is torch's name of where the models are.
    """

    def __init__(self, patience: float = 1.0, device: str = "cpu") -> None:
        self.patience, self.device = patience, device
        self._family = Family(("coordinator", "prefill", "decode", "reference"), patience)
        self._children: list[Child] = []
        self._expected: Expected = {}

    def wait_ready(self) -> str:
        """Returns the coordinator's address once all have started. Raises ChildError."""
        self._children = self._family.wait_ready(_START_S)
        coordinator, *_, reference = self._children
        reference.call("reference", "open", patience=self.patience, device=self.device)
        reference.ask("reference", "tokens")
        coordinator.call("coordinator", "open")
        return str(coordinator.call("coordinator", "address")["address"])

    def hosts(self, transport: str) -> tuple[Child, Child]:
        """Who plays prefill and who decode. Loopback ends at the process, so there one plays both."""
        _, prefill, decode, _ = self._children
        alone = transport.removeprefix("fault+") == "loopback"
        return prefill, prefill if alone else decode

    def expected(self) -> Expected:
        """The tokens of the single-process run, which runs from `wait_ready` on. Raises ChildError."""
        if not self._expected:
            self._expected = self._children[-1].answer("reference tokens")
        return self._expected

    def pids(self) -> list[int]:
        """Of the children."""
        return [child.pid for child in self._children]

    def __enter__(self) -> Cluster:
        """Nothing to do: the children are on their way since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all children."""
        self._family.close()
