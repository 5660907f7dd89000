# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of the demo and assigns the roles to them."""

from __future__ import annotations

from kvlink.demo.options import Options
from kvlink.demo.processes import Child, Family
from kvlink.demo.text import Expected

_START_S = 120.0  # the time to import torch and transformers from a cold disk


class Cluster:
    """A coordinator, a prefill, a decode and a reference process. They start at once; use it as a context manager."""

    def __init__(self, options: Options = Options()) -> None:  # noqa: B008 - frozen
        self.options = options
        names = ("coordinator", "prefill", "decode", "reference")
        self._family = Family(names, options.patience, [options.role(name) for name in names])
        self._children: list[Child] = []
        self._expected: Expected = {}

    def wait_ready(self) -> str:
        """Waits until all processes have started, and returns the coordinator's address. Raises ChildError."""
        self._children = self._family.wait_ready(_START_S)
        coordinator, *_, reference = self._children
        role = self.options.role("reference")
        reference.call(role, "open", **self.options.arguments("reference"))
        reference.ask(role, "tokens")
        coordinator.call("coordinator", "open")
        return str(coordinator.call("coordinator", "address")["address"])

    def hosts(self, transport: str) -> tuple[Child, Child]:
        """Returns the processes for prefill and decode. Loopback ends at the process, so one process has both roles."""
        _, prefill, decode, _ = self._children
        alone = transport.removeprefix("fault+") == "loopback"
        return prefill, prefill if alone else decode

    def expected(self) -> Expected:
        """Returns the tokens of the single-process run, which starts in `wait_ready`. Raises ChildError."""
        if not self._expected:
            self._expected = self._children[-1].answer("reference tokens")
        return self._expected

    def pids(self) -> list[int]:
        """Returns the process ids of the children."""
        return [child.pid for child in self._children]

    def __enter__(self) -> Cluster:
        """Returns the cluster. The children are starting since construction."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all children."""
        self._family.close()
