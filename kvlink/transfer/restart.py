# SPDX-License-Identifier: Apache-2.0
"""A pull under a live lease whose connection was cut begins again, once, on a new connection, within its deadline.

Connections end for reasons that have nothing to do with a pull: an owner cuts a reader because of another lease, or a
lane is rebuilt because the reads of a cancelled pull did not end. The lease says whether the bytes are still there, and
not the connection. Nothing runs for this by itself: whoever looks at the pull (`wait`, `await`, `done`) begins again.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from functools import partial

from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks, TransferTimeout
from kvlink.transfer.engine import FAILED, failure
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull_start import Part, Starting, Starts, Want, connect_all


class Restart:
    """What one pull needs to begin again. Its lock guards the change from the first attempt to the second."""

    __slots__ = ("_deadline", "_over", "_peers", "_starts", "_want", "cut", "lock")

    def __init__(self, starts: Starts, peers: Peers, want: Want, began: float) -> None:
        """`began`: when the pull did, by `time.monotonic()`."""
        self._starts, self._peers = starts, peers
        self._want = (
            array("I", bytes(memoryview(want[0]))),
            *want[1:],
        )  # the caller may change its own meanwhile
        self._deadline = began + want[-1]
        self._over = False
        self.lock = threading.RLock()  # a signal handler may cancel the pull at any time
        self.cut: dict[str, str] = {}
        """What the first attempt failed with, by the owner that is read again."""

    def give_up(self) -> None:
        """From now on nothing begins again."""
        with self.lock:
            self._over = True

    def begin(self, request_id: str, parts: Sequence[Part]) -> Starting | None:
        """Reads again what was cut of `parts`, which have all ended. None: nothing was cut, or more than that happened,
        or it is too late. Of several owners some may be settled already: what came from those stays."""
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
        """What a pull fails with that could not start. One that was cut before failed because of that, unless the owner
        has restarted or the deadline passed."""
        if not self.cut or isinstance(error, StaleBlocks):
            return error
        kind = TransferTimeout if isinstance(error, TransferTimeout) else PeerUnreachable
        return kind(f"{'; '.join(self.cut.values())}; it could not begin again: {error}")
