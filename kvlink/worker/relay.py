# SPDX-License-Identifier: Apache-2.0
"""Implements one worker's part in a broadcast: a pull that goes on from another source when the first one fails."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlink.errors import Cancelled, KVLinkError, TransferError, TransportUnavailable, UnknownRequest
from kvlink.ticket import Ticket
from kvlink.timeouts import checked
from kvlink.transfer.engine import Transfer
from kvlink.transfer.peer import Peer
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

    def connect(self, source: Ticket) -> Future[Peer | None]:
        """Connects to the owner of a ticket in the background. Raises AccessDenied, ConfigError."""
        worker = self.worker
        owner = worker._checked(source)
        deadline = time.monotonic() + self.timeout_s
        return worker._control.submit(
            worker._peers.connect(owner.worker_id, owner.epoch, owner.agent, deadline)
        )

    def begin(
        self, peer: Peer, source: Ticket, first_token: int, lease: int, last: bool
    ) -> tuple[Pull, Transfer]:
        """Starts reading from a token on. Does not wait. Raises PeerUnreachable, ConfigError."""
        worker = self.worker
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
        return pull, transfer

    def end_offer(self, lease: int) -> None:
        """Ends the offer by its number, since another one may have its name by now. Idempotent."""
        if lease:
            self.worker._engine.core.abort(lease)


class Relay:
    """A pull whose blocks are offered on while it runs. One thread waits for it; any thread may cancel it.

    ticket: for the readers of this worker, or None if it has none. They get only what has validated here. If all
        sources fail, the offer ends, and they fail with StaleBlocks, or read from another source of their own.
    failed: the errors of the sources that were given up for another one.
    """

    def __init__(self, relaying: Relaying, sources: list[Ticket], ticket: Ticket | None) -> None:
        """Starts reading from the first source that can be reached. Raises KVLinkError."""
        self.ticket = ticket
        self.failed: list[KVLinkError] = []
        self._relaying = relaying
        self._lock = threading.Lock()
        """Held while a pull starts, so that `cancel` finds every pull or prevents it. Guards what follows."""
        self._cancelled = False
        self._sources = sources
        self._connecting: Future[Peer | None] | None = None
        self._reads = False
        self._error: KVLinkError | None = None
        """Why no source is left to read from."""
        self._num_valid = 0
        self._lease = 0 if ticket is None else relaying.worker.offers.lease_of(ticket.request_id)
        self._begin(None)

    def __repr__(self) -> str:
        """Describes the state."""
        return f"Relay({self._pull!r}, {self._num_valid} tokens valid before, {self.ticket!r})"

    @property
    def num_valid_tokens(self) -> int:
        """The number of tokens from the first on that have arrived and are valid."""
        with self._lock:
            now = max(self._num_valid, self._transfer.proven_units * self._scale)
            return min(now, self._source.num_tokens)

    @property
    def pull(self) -> Pull:
        """The pull that reads now."""
        return self._pull

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits as `Pull.wait` does. If the source fails and there is another one, the rest is read from that.

        Raises the error of the last source, which names it, and Cancelled after `cancel`.
        """
        if self._error is not None:
            raise self._error
        deadline = None if timeout_s is None else time.monotonic() + checked(timeout_s)
        while self._reads or self._begin(deadline):
            try:
                ended = self._pull.wait(_left_s(deadline))
            except TransferError as error:
                self._num_valid = self.num_valid_tokens
                self._turn_from(error)
                continue
            if ended:
                with self._lock:
                    unused, self._sources = self._sources, []
                for source in unused:
                    self._relaying.worker.release(source)
            return ended
        return False

    def cancel(self) -> None:
        """Ends the pull and the offer. On return no more bytes of it can arrive, whatever other threads do."""
        with self._lock:
            self._cancelled = True
            self._sources = []
            pull, connecting = self._pull, self._connecting
        if connecting is not None:
            connecting.cancel()  # wakes `wait`; the attempt is shared and goes on
        self._relaying.end_offer(self._lease)
        pull.cancel()

    def _begin(self, deadline: float | None) -> bool:
        """Starts reading from the next source. Returns False if it is not connected by the deadline.

        Raises the error of the last source, and Cancelled.
        """
        while self._connected(deadline):
            if self._start():
                return True
        return False

    def _connected(self, deadline: float | None) -> bool:
        """Waits until the next source is connected, or has failed to. Returns False at the deadline."""
        if self._connecting is None:
            self._take_source()
        assert self._connecting is not None
        return bool(wait_for([self._connecting], _left_s(deadline)).done)

    def _take_source(self) -> None:
        with self._lock:
            self._check_not_cancelled()
            self._source = self._sources.pop(0)
            self._connecting = self._relaying.connect(self._source)

    def _start(self) -> bool:
        """Starts the pull from the source that is connected, or gives up a source that is not. Raises as `_begin`."""
        assert self._connecting is not None
        connecting, self._connecting = self._connecting, None
        try:
            self._read_from(check_relay(connecting.result(), self._source))
        except CancelledError:
            self._turn_from(
                Cancelled(f"request {self._source.request_id}: the relay or its worker was closed")
            )
        except _UNREACHABLE as error:
            self._turn_from(error)
        except BaseException:
            self._relaying.end_offer(self._lease)
            raise
        return self._reads

    def _read_from(self, peer: Peer) -> None:
        with self._lock:
            self._check_not_cancelled()
            self._scale = scale_of(peer, self._source)
            self._pull, self._transfer = self._relaying.begin(
                peer, self._source, self._num_valid, self._lease, last=not self._sources
            )
            self._reads = True

    def _check_not_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled(f"request {self._source.request_id}: the relay was cancelled")

    def _turn_from(self, error: KVLinkError) -> None:
        """Gives up the source. Raises the error if there is no other one, and ends the offer."""
        with self._lock:
            self._reads = False
            following = self._sources[0] if self._sources else None
        if following is None or isinstance(error, Cancelled):
            self._relaying.end_offer(self._lease)
            self._error = error
            raise error
        self.failed.append(error.with_traceback(None))  # its frames would keep this object and its worker
        _log.warning(
            "a source of a broadcast failed, reading from another one worker=%s from_token=%d error=%s",
            following.worker_id,
            self._num_valid,
            error,
        )


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
