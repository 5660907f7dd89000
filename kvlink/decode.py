# SPDX-License-Identifier: Apache-2.0
"""The decode worker's side: the handle of one pull of a request's blocks, from one or several owners."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlink.engine import SETTLED, failure
from kvlink.errors import Cancelled, KVLinkError
from kvlink.peer import Refusal
from kvlink.starting import Part, Starting, settling, stop
from kvlink.waiting import LoopWaiter


class PullStats(NamedTuple):
    """Of one pull, summed over its owners; times in microseconds, of the slowest owner."""

    num_bytes: int = 0
    num_ops: int = 0
    num_segments: int = 0
    plan_us: float = 0.0
    post_us: float = 0.0
    """Part of read_us: until the transport had taken all reads, as the sum of the times of its lanes."""
    read_us: float = 0.0
    validate_us: float = 0.0
    settle_us: float = 0.0
    total_us: float = 0.0
    ran_inline: bool = False
    """The caller's thread posted the reads, and not one of kvlink's."""
    settled: bool = False


_NETWORKED = ("tcp", "verbs")


@dataclass(frozen=True, slots=True)
class PathTaken:
    """How one owner was read. `refused` are the better transports that were not taken, and why."""

    worker_id: str
    transport: str
    lanes: int
    nics: tuple[str, ...]
    """Pairs of ports that carry lanes, this worker's and the owner's: "mlx5_0:1->mlx5_1:1", and when there are
    several the part of the bytes under way that each may have, as in "mlx5_0:1->mlx5_1:1 75%". Only of verbs."""
    nics_left_out: tuple[str, ...]
    """This worker's ports that carry none, each with its reason."""
    bounces_at: tuple[str, ...]
    """Ends ("reader", "owner") that stage GPU memory in pinned host memory, because the path does not reach it."""
    refused: tuple[Refusal, ...]
    num_ops: int
    num_bytes: int
    predicted_us: float
    measured_us: float
    ran_inline: bool
    staged: bool = False
    """Whether bytes landed in the staging buffer on the reader's GPU, for a kernel to take them to their places."""
    predicted_direct_us: float | None = None
    """This and the next where the reader has such a buffer: what either way should take."""
    predicted_staged_us: float | None = None

    @property
    def in_clear(self) -> bool:
        """Whether the bytes crossed a network, where none of kvlink's transports encrypts them."""
        return self.transport.removeprefix("fault+") in _NETWORKED

    def __str__(self) -> str:
        """One sentence for a log."""
        lanes = f"{self.lanes} lane(s)" + "".join(f" {pair}" for pair in self.nics)
        lanes += f", bounce at {' and '.join(self.bounces_at)}" if self.bounces_at else ""
        lanes += self._staging
        lanes += ", not encrypted" if self.in_clear else ""
        lanes += ", inline" if self.ran_inline else ""
        refusals = "".join(f"; not {refusal.transport}: {refusal.reason}" for refusal in self.refused)
        refusals += "".join(f"; not {nic}" for nic in self.nics_left_out)
        return (
            f"{self.worker_id} over {self.transport} ({lanes}): {self.num_ops} operations, {self.num_bytes} "
            f"bytes, predicted {self.predicted_us:.0f} us, took {self.measured_us:.0f} us{refusals}"
        )

    @property
    def _staging(self) -> str:
        if self.predicted_direct_us is None or self.predicted_staged_us is None:
            return ""
        other, us = (
            ("direct", self.predicted_direct_us) if self.staged else ("staged", self.predicted_staged_us)
        )
        return f", {'staged on the GPU' if self.staged else 'direct'}, {other} predicted {us:.0f} us"


class Pull:
    """A pull under way or ended. The destination holds valid bytes only after it ended without an error.

    On a GPU they are there for its kernels once `wait` or `await` has returned: either asks the GPU to show them.
    Safe from any thread; `await` works on any event loop.
    """

    __slots__ = ("_on_landed", "_on_unsettled", "_parts", "_starting", "request_id")

    def __init__(
        self,
        request_id: str,
        parts: list[Part] | None,
        starting: Starting | None,
        on_unsettled: Callable[[Part], None] | None,
        on_landed: Callable[[], object] | None = None,
    ) -> None:
        self.request_id = request_id
        self._parts = parts
        self._starting = starting
        self._on_unsettled = on_unsettled
        self._on_landed = on_landed

    def __repr__(self) -> str:
        """State in words."""
        if not self.done():
            return f"Pull({self.request_id!r}: running)"
        error = self._error()
        return (
            f"Pull({self.request_id!r}: {error!r})" if error else f"Pull({self.request_id!r}: {self.stats})"
        )

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        parts = self._started(0)
        return parts is not None and all(transfer.done() for _, _, transfer in parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` seconds with the GIL released. False: still running.

        Raises TransferError (or LayoutMismatch, ConfigError, CoordinatorError when it could not start).
        """
        parts = self._parts if self._on_landed is None else None
        if parts is not None and len(parts) == 1 and parts[0][2].state == SETTLED:
            return True  # a small warm pull: nothing to wait for, nothing to report
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _, _, transfer in self._started(timeout_s) or []:
            if not transfer.wait(-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                return False
        if not self.done():
            return False
        self._conclude()
        return True

    def __await__(self) -> Generator[Any, None, PullStats]:
        """Waits on the running event loop. Cancelling the awaiting task does not cancel the pull."""
        return self._ended().__await__()

    async def _ended(self) -> PullStats:
        if self._starting is not None:
            started = asyncio.shield(asyncio.wrap_future(self._starting))
            await asyncio.gather(started, return_exceptions=True)  # whatever it raised, _conclude says better
        for _, _, transfer in self._started(0) or []:
            await LoopWaiter.of_running_loop().ended(transfer)
        self._conclude()
        return self.stats

    def cancel(self) -> None:
        """Ends the pull; on return no byte of it lands any more. An ended pull stays as it is."""
        if self._parts is None and self._starting is not None:
            self._starting.cancel()
        for part in self._started(None) or []:
            stop(part)

    def settle(self) -> bool:
        """Gives the owners their blocks back, when the pull was made with settle=False. False: one is out of reach.

        For readers that take a request in several pulls: settle the last once all have ended well. Waits for nothing.
        """
        told = [part[1].connection.settle(*settling(part)) for part in self._started(0) or []]
        return all(told)

    @property
    def stats(self) -> PullStats:
        """Of the owners whose transfers were started. Final once done."""
        transfers = [transfer for _, _, transfer in self._started(0) or []]
        if not transfers:
            return PullStats()
        rows = [transfer.stats() for transfer in transfers]
        sums = [sum(row[column] for row in rows) for column in range(3)]
        slowest_us = [max(row[column] for row in rows) / 1000 for column in range(3, 9)]
        ran_inline = all(row[9] for row in rows)
        settled = all(transfer.state == SETTLED for transfer in transfers)
        return PullStats._make([*sums, *slowest_us, ran_inline, settled])

    def explain(self) -> list[PathTaken]:
        """The path to each owner, why better ones were refused, and predicted against measured time."""
        return [_path_taken(part) for part in self._started(0) or []]

    def _started(self, timeout_s: float | None) -> list[Part] | None:
        """The parts, none if it could not start, or None while it is starting."""
        if self._parts is None and self._starting is not None:
            try:
                self._parts = self._starting.result(timeout_s)
            except concurrent.futures.TimeoutError:
                return None
            except (concurrent.futures.CancelledError, KVLinkError):
                return []
        return self._parts

    def _conclude(self) -> None:
        """Raises what the pull failed with; has owners told of what was not settled one-sidedly; flushes."""
        parts = self._parts
        if parts is None or any(transfer.state != SETTLED for _, _, transfer in parts):
            error = self._error()
            if error is not None:
                raise error
            self._report_unsettled()
        flush = self._on_landed
        if flush is not None:
            flush()
            self._on_landed = None

    def _report_unsettled(self) -> None:
        if self._on_unsettled is not None:
            report, self._on_unsettled = self._on_unsettled, None
            for part in self._parts or []:
                if part[2].state != SETTLED:
                    report(part)

    def _error(self) -> KVLinkError | None:
        if self._parts is None and self._starting is not None:
            if self._starting.cancelled():
                return Cancelled(f"request {self.request_id}: cancelled before it was connected")
            error = self._starting.exception(0)
            if error is not None:
                return error if isinstance(error, KVLinkError) else KVLinkError(repr(error))
        for ticket, peer, transfer in self._parts or []:
            where = f"request {self.request_id} from {ticket.worker_id} over {peer.transport}"
            failed = failure(transfer, where)
            if failed is not None:
                return failed
        return None


def _path_taken(part: Part) -> PathTaken:
    ticket, peer, transfer = part
    num_bytes, num_ops, *_, total_ns, ran_inline, staged, direct_us, staged_us = transfer.stats()
    paths = peer.connection.paths()
    nics = tuple(dict.fromkeys(filter(None, paths)))
    has_choice = direct_us > 0
    predicted_us = peer.cost.predict_us(num_ops, num_bytes)
    if has_choice:
        predicted_us = staged_us if staged else direct_us
    if transfer.done() and num_bytes:
        peer.cost.learn(num_ops, num_bytes, total_ns / 1000)
    return PathTaken(
        ticket.worker_id,
        peer.transport,
        len(paths),
        nics,
        peer.nics_left_out if nics else (),
        peer.bounces_at,
        peer.refused,
        num_ops,
        num_bytes,
        predicted_us,
        total_ns / 1000,
        ran_inline,
        staged,
        direct_us if has_choice else None,
        staged_us if has_choice else None,
    )
