# SPDX-License-Identifier: Apache-2.0
"""The three processes of the demo, and which of them plays which role."""

from __future__ import annotations

from contextlib import ExitStack, closing
from types import TracebackType

from kvlink.demo.processes import Child

_START_S = 120.0  # importing torch and transformers from a cold disk


class Cluster:
    """A coordinator, a prefill and a decode process. They start at once; use as a context manager."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self._coordinator, self._prefill, self._decode = (
                stack.enter_context(closing(Child(name))) for name in ("coordinator", "prefill", "decode")
            )
            self._children = stack.pop_all()

    def wait_ready(self) -> str:
        """Returns the coordinator's address once all have started. Raises ChildError."""
        for child in (self._coordinator, self._prefill, self._decode):
            child.wait_ready(_START_S)
        self._coordinator.call("coordinator", "open")
        return str(self._coordinator.call("coordinator", "address")["address"])

    def hosts(self, transport: str) -> tuple[Child, Child]:
        """Who plays prefill and who decode. Loopback ends at the process, so there one plays both."""
        alone = transport.removeprefix("fault+") == "loopback"
        return self._prefill, self._prefill if alone else self._decode

    def pids(self) -> list[int]:
        """Of the children."""
        return [child.pid for child in (self._coordinator, self._prefill, self._decode)]

    def __enter__(self) -> Cluster:
        """Nothing to do: the children run since construction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all children."""
        self._children.close()
