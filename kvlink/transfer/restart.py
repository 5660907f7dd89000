# SPDX-License-Identifier: Apache-2.0
"""Restarts a pull whose connection was cut, once, on a new connection and within its deadline.

A connection can end for reasons that do not concern a pull: an owner cuts a reader because of another lease, or a lane
is rebuilt because the reads of a cancelled pull did not end. Only the lease determines whether the bytes are valid, and
not the connection. No thread runs for this. The next call of `wait`, `await` or `done` restarts the pull.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks, TransferTimeout
from kvlink.transfer.engine import FAILED, failure
from kvlink.transfer.group_ids import copied
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull_start import Part, PullStart, PullStarts, Want, connect_all


class Restart:
    """The arguments that restart one pull. `lock` guards the change from the first attempt to the second."""

    __slots__ = ("_deadline", "_over", "_peers", "_starts", "_want", "cut", "lock")

    def __init__(self, starts: PullStarts, peers: Peers, want: Want, began: float) -> None:
        """Copies the block ids, which the caller may change. `began` is the start by `time.monotonic()`."""
        self._starts, self._peers = starts, peers
        self._want = (copied(want[0]), *want[1:])
        self._deadline = began + want[-1]
        self._over = False
        self.lock = threading.RLock()  # a signal handler may cancel the pull at any time
        self.cut: dict[str, str] = {}
        """The errors of the first attempt, by the owner that is read again."""

    def give_up(self) -> None:
        """Prevents any later restart."""
        with self.lock:
            self._over = True

    def begin(self, request_id: str, parts: Sequence[Part]) -> PullStart | None:
        """Reads again the parts that were cut. All `parts` must have ended.

        Returns None if no part was cut, if a part failed otherwise, or after the deadline. Parts of other owners that
        are complete, and may be settled already, stay as they are.
        """
        left_s = self._deadline - time.monotonic()
        if self._over or left_s <= 0 or self._starts.closing:
            return None
        failed = [part for part in parts if part[2].state == FAILED]
        for ticket, peer, transfer in failed:
            error = failure(transfer, f"request {request_id} from {ticket.worker_id} over {peer.transport}")
            if not isinstance(error, PeerUnreachable):
                self.cut.clear()
                return None
            self.cut[ticket.worker_id] = str(error)
        self._over = True
        kept = [part for part in parts if part[2].state != FAILED]
        connect = partial(connect_all, self._peers, [ticket for ticket, _, _ in failed])
        self._starts.num_restarts += 1
        return self._starts.start(connect, (*self._want[:-1], left_s), kept)

    def failed(self, error: KVLinkError) -> KVLinkError:
        """Returns the error of a pull that could not start.

        If the pull was cut before, that is the reason, unless the owner has restarted or the deadline passed.
        """
        if not self.cut or isinstance(error, StaleBlocks):
            return error
        kind = TransferTimeout if isinstance(error, TransferTimeout) else PeerUnreachable
        return kind(f"{'; '.join(self.cut.values())}; the pull could not restart: {error}")
