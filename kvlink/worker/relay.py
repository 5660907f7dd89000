# SPDX-License-Identifier: Apache-2.0
"""Implements one worker's part in a broadcast: a pull that changes its source, and whose blocks are offered on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError, KVLinkError
from kvlink.runtime.background import ControlThread
from kvlink.ticket import Ticket
from kvlink.transfer.group_ids import GroupIds, copied
from kvlink.transfer.offers import Offers
from kvlink.transfer.pool import BlockPool
from kvlink.transfer.pull import Pull
from kvlink.transfer.pulls import Pulls, RelayRun
from kvlink.types import ReadyUnit
from kvlink.worker.sources import Sources, parsed


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


@dataclass(frozen=True, slots=True)
class Relays:
    """Starts the relays of one worker."""

    pool: BlockPool
    control: ControlThread
    offers: Offers
    sources: Sources
    pulls: Pulls
    read_ids: Callable[[Any], Any]
    """Reads block ids in any form that `Worker.pull` accepts."""

    def checked(
        self, given: Sequence[Ticket | str | None], into: GroupIds, timeout_s: float
    ) -> tuple[list[Ticket], Any]:
        """Returns the tickets, claimed where an id is given, and the block ids. Raises as `Worker.relay` does."""
        if self.pool.gpu is not None or len(self.pool.groups) > 1:  # before a claim uses up a ticket
            raise ConfigError(
                "a relay needs a pool of one cache group in host memory; this worker has another"
            )
        block_ids = copied(self.read_ids(into))
        tickets = [self._source(each, timeout_s) for each in given if each is not None]
        request_id, num_tokens = tickets[0].request_id, tickets[0].num_tokens
        if any(each.ready_unit is ReadyUnit.LAYERS for each in tickets):
            raise ConfigError(
                f"request {request_id}: a relay follows blocks or tokens, and this offer counts layers"
            )
        if any(each.num_tokens != num_tokens for each in tickets):
            raise ConfigError(
                f"request {request_id}: `fallback` has {tickets[1].num_tokens} tokens, and `ticket` {num_tokens}"
            )
        return tickets, block_ids

    def begin(
        self,
        tickets: Sequence[Ticket],
        block_ids: Any,
        offered: Ticket | None,
        batch_bytes: int | None,
        timeout_s: float,
    ) -> Relay:
        """Starts the pull. `offered` is this worker's own offer of the same blocks, None if it has no readers."""
        lease = 0 if offered is None else self.offers.lease_of(offered)
        return Relay(self.pulls.begin_relay(tickets, block_ids, lease, batch_bytes, timeout_s), offered)

    def _source(self, given: Ticket | str, timeout_s: float) -> Ticket:
        if isinstance(ticket := parsed(given), Ticket):
            return self.sources.checked(ticket)
        if not isinstance(ticket, str):
            raise ConfigError("a relay reads from one owner: pass one ticket, not a list")
        self.sources.require_coordinator(ticket)
        found = self.control.run(self.sources.claim(ticket, timeout_s))
        if len(found) != 1:
            raise ConfigError(
                f"request {ticket}: a relay reads from one owner, and {len(found)} ranks offer it"
            )
        return found[0]
