# SPDX-License-Identifier: Apache-2.0
"""Implements one worker's part in a broadcast: a pull that goes on from another source when the first one fails."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlink.errors import KVLinkError, TransferError, TransportUnavailable, UnknownRequest
from kvlink.ticket import Ticket
from kvlink.transfer.engine import Transfer
from kvlink.transfer.pull import Pull
from kvlink.transfer.relay_start import check_relay, scale_of, start_relay

if TYPE_CHECKING:
    from kvlink.worker.worker import Worker

_log = logging.getLogger("kvlink.worker")
_UNREACHABLE = (TransferError, TransportUnavailable, UnknownRequest)


@dataclass(frozen=True, slots=True)
class Relaying:
    """Starts the pulls of one relay, and holds what they have in common."""

    worker: Worker
    into: Any
    batch_bytes: int | None
    timeout_s: float

    def begin(self, source: Ticket, first_token: int, lease: int, last: bool) -> tuple[Pull, Transfer, int]:
        """Connects and starts reading from a token on. Returns the tokens in a unit, too. Raises KVLinkError."""
        worker = self.worker
        peer = check_relay(worker.connect(source, self.timeout_s), source)
        transfer = start_relay(
            worker._engine,
            peer,
            source,
            self.into,
            first_token,
            lease,
            last,
            self.batch_bytes,
            self.timeout_s,
        )
        # It is never restarted from its first block: others may have read what it would write again.
        pull = worker._pull(
            source.request_id,
            [(source, peer, transfer)],
            None,
            worker._on_unsettled,
            worker._engine.on_landed,
        )
        return pull, transfer, scale_of(peer, source)


class Relay:
    """A pull whose blocks are offered on while it runs. One thread waits for it.

    ticket: for the readers of this worker, or None if it has none. They get only what has validated here. If all
        sources fail, the offer ends, and they fail with StaleBlocks, or read from another source of their own.
    failed: the errors of the sources that were given up for another one.
    """

    def __init__(self, relaying: Relaying, sources: list[Ticket], ticket: Ticket | None) -> None:
        """Starts reading from the first source that can be reached. Raises KVLinkError."""
        self.ticket = ticket
        self.failed: list[KVLinkError] = []
        self._relaying = relaying
        self._sources = sources
        self._num_valid = 0
        self._lease = 0 if ticket is None else relaying.worker.offers.lease_of(ticket.request_id)
        self._begin()

    def __repr__(self) -> str:
        """Describes the state."""
        return f"Relay({self._pull!r}, {self._num_valid} tokens valid before, {self.ticket!r})"

    @property
    def num_valid_tokens(self) -> int:
        """The number of tokens from the first on that have arrived and are valid."""
        now = max(self._num_valid, self._transfer.proven_units * self._scale)
        return min(now, self._source.num_tokens)

    @property
    def pull(self) -> Pull:
        """The pull that reads now."""
        return self._pull

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits as `Pull.wait` does. If the source fails and there is another one, the rest is read from that.

        Raises the error of the last source, which names it.
        """
        while True:
            try:
                ended = self._pull.wait(timeout_s)
            except TransferError as error:
                self._num_valid = self.num_valid_tokens
                self._note(error)
                self._begin()
                continue
            if ended:
                while self._sources:
                    self._relaying.worker.release(self._sources.pop())
            return ended

    def cancel(self) -> None:
        """Ends the pull and the offer. On return no more bytes of it can arrive."""
        self._sources.clear()
        self._end_offer()
        self._pull.cancel()

    def _begin(self) -> None:
        while True:
            self._source = self._sources.pop(0)
            try:
                self._pull, self._transfer, self._scale = self._relaying.begin(
                    self._source, self._num_valid, self._lease, last=not self._sources
                )
                return
            except _UNREACHABLE as error:
                self._note(error)
            except BaseException:
                self._end_offer()
                raise

    def _note(self, error: KVLinkError) -> None:
        """Raises the error if there is no other source."""
        if not self._sources:
            self._end_offer()
            raise error
        self.failed.append(error.with_traceback(None))  # its frames would keep this object and its worker
        _log.warning(
            "a source of a broadcast failed, reading from another one worker=%s from_token=%d error=%s",
            self._sources[0].worker_id,
            self._num_valid,
            error,
        )

    def _end_offer(self) -> None:
        if self.ticket is not None:
            with suppress(UnknownRequest):
                self._relaying.worker.abort(self.ticket.request_id)
