# SPDX-License-Identifier: Apache-2.0
"""Implements one worker's part in a broadcast: a pull that goes on from another source when the first one fails."""

from __future__ import annotations

from kvlink.errors import KVLinkError
from kvlink.ticket import Ticket
from kvlink.transfer.pull import Pull
from kvlink.transfer.pulls import RelayRun


class Relay:
    """A pull whose blocks are offered on while it runs. Thread-safe.

    ticket: for the readers of this worker, or None if it has none. They get only what has validated here. If all
        sources fail, the offer ends, and they fail with StaleBlocks, or read from another source of their own.
    failed: the errors of the sources that were given up for another one.
    pull: the pull, which may be awaited.
    """

    def __init__(self, run: RelayRun, ticket: Ticket | None) -> None:
        self.ticket = ticket
        self.failed: list[KVLinkError] = run.failed
        self.pull: Pull = run.pull
        self._core, self._num_tokens = run.pull._core, run.sources[0].num_tokens

    def __repr__(self) -> str:
        """Describes the state."""
        return f"Relay({self.pull!r}, {self.num_valid_tokens} tokens are valid, {self.ticket!r})"

    @property
    def num_valid_tokens(self) -> int:
        """The number of tokens from the first on that have arrived and are valid."""
        return min(self._core.proven_tokens, self._num_tokens)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits as `Pull.wait` does. Raises the error of the last source, which names it."""
        return self.pull.wait(timeout_s)

    def cancel(self) -> None:
        """Ends the pull and the offer. On return no more bytes of it can arrive, whatever other threads do."""
        self.pull.cancel()
