# SPDX-License-Identifier: Apache-2.0
"""Implements the decode side: the handle of one pull of a request's blocks from one or several owners."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from kvlink import _core
from kvlink.config.timeouts import checked
from kvlink.errors import (
    Cancelled,
    ConfigError,
    CoordinatorUnavailable,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    TransferTimeout,
)
from kvlink.ticket import Ticket
from kvlink.transfer.completion import LoopWaiter, SharedAwaitable, cancellation
from kvlink.transfer.engine import error_of, failure
from kvlink.transfer.explain import Part, PathTaken, paths_taken
from kvlink.transfer.owners import Owner
from kvlink.transfer.peer import Peer
from kvlink.transfer.pull_request import settle_args

FAILED, VALID, SETTLED = 3, 4, 5
"""The states of an ended pull, see csrc/engine/pull.h."""


class PullStats(NamedTuple):
    """The statistics of one pull. Counts are summed over its owners, and times are those of the slowest owner in us."""

    num_bytes: int = 0
    num_ops: int = 0
    num_segments: int = 0
    plan_us: float = 0.0
    post_us: float = 0.0
    """The part of read_us until the transport had accepted all reads, summed over its lanes."""
    read_us: float = 0.0
    validate_us: float = 0.0
    settle_us: float = 0.0
    total_us: float = 0.0
    ran_inline: bool = False
    """Whether the caller's thread, and not a thread of kvlink, posted the reads."""
    settled: bool = False


class Observer(Protocol):
    """Records what becomes of one pull."""

    def ended(self, pull: Pull) -> None:
        """Called when a caller has learned that the pull has ended, perhaps several times."""

    def settled(self, pull: Pull, began_ns: int, settled: bool) -> None:
        """Called after `Pull.settle`, which began at `began_ns` by `time.time_ns()`, with its result."""


class Pull(SharedAwaitable[PullStats]):
    """A running or ended pull. The destination holds valid bytes only after the pull ended without an error.

    On a GPU, kernels can read the bytes after `wait` or `await` has returned, which makes them visible to the GPU.
    Safe from any thread, and `await` works on any event loop. At the end of a `with` or `async with` block of a pull
    the block waits for it, or cancels it if the block raises. It raises an error of the pull that nobody has seen: not
    one that `wait` or `await` has raised before, and not that the program itself has cancelled the pull.
    """

    # Defaults of the class, because every small pull creates one.
    _landed = False
    """Whether it has ended well and there is nothing left to do."""
    _told = False
    """Whether it has failed or was cancelled, and the program knows it."""
    _claims = False
    """Whether its tickets are claimed and no coordinator has answered yet."""
    _error: KVLinkError | None = None
    """Why the owners could not be connected."""
    _cuts: dict[str, str] | None = None
    """The errors of a first attempt that was cut, by the owner that is read again."""
    _flush: Callable[[], object] | None = None
    _observer: Observer | None = None
    _pid: int

    def __init__(self, core: _core.Pull, request_id: str, owners: list[Owner]) -> None:
        self._core = core
        self.request_id = request_id
        self._owners = owners

    def __repr__(self) -> str:
        """Describes the state."""
        try:
            if not self.done():
                return f"Pull({self.request_id!r}: running)"
        except ConfigError:
            return f"Pull({self.request_id!r}: belongs to the parent process)"
        return f"Pull({self.request_id!r}: {self._failure() or self.stats!r})"

    def done(self) -> bool:
        """Returns whether the pull has ended, with or without success. Never blocks."""
        return self._core.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` seconds with the GIL released. Returns False if the pull is still running.

        Raises TransferError, or LayoutMismatch, ConfigError or CoordinatorError if the pull could not start.
        """
        if self._landed:  # a small pull that ran inline
            return True
        if not self._core.wait(-1 if timeout_s is None else checked(timeout_s)):
            return False
        self._conclude()
        return True

    def __await__(self) -> Generator[Any, None, PullStats]:
        """Waits on the running event loop. Raises as `wait` does.

        Cancelling a task that awaits the pull cancels the pull, and the await ends when no more bytes of it can arrive.
        Await `asyncio.shield(pull)` to leave it running.
        """
        return self._ended().__await__()

    async def _ended(self) -> PullStats:
        if not self.done():
            self._pid = os.getpid()
            try:
                await LoopWaiter.of_running_loop().ended(self._core)
            except asyncio.CancelledError:
                await self._cancelled()
                raise
            except GeneratorExit:
                self._cancel_own()
                raise
        self._conclude()
        return self.stats

    async def _cancelled(self) -> None:
        """Ends the pull as `cancel` does without blocking the loop. Cancelling this coroutine does not interrupt it."""
        self._told = True
        again: asyncio.CancelledError | None = None
        try:
            self._core.request_cancel()
            while not self.done():
                again = await cancellation(LoopWaiter.of_running_loop().ended(self._core)) or again
        except GeneratorExit:
            self._cancel_own()
            raise
        self._observe()
        if again is not None:
            raise again

    def _cancel_own(self) -> None:
        """Cancels the pull for a closed coroutine or a thread, but not in a forked child: the parent owns the pull."""
        if self._pid == os.getpid():
            self.cancel()

    def __enter__(self) -> Pull:
        self._pid = os.getpid()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cancel_own()
        elif not self._told:
            self.wait()

    async def __aenter__(self) -> Pull:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if not self._told:
                await self
        elif issubclass(kind, GeneratorExit):
            self._cancel_own()
        else:
            await self._cancelled()

    def cancel(self) -> None:
        """Ends the pull. On return no more bytes of it can arrive. It has no effect on an ended pull."""
        self._told = self._told or not self.done()
        self._core.cancel()
        self._observe()

    def close(self) -> None:
        """Cancels the pull as `cancel` does."""
        self.cancel()

    def settle(self) -> bool:
        """Settles the offer at each owner after a pull with settle=False.

        Returns False if an owner is unreachable, and before the pull has found its owners.
        A reader that reads a request in several pulls settles the last one after all have succeeded. A soft offer needs
        no settle. Does not block."""
        if not self.done() and not self._owners:
            return False
        began_ns = time.time_ns()
        hard = [(ticket, peer) for ticket, peer in self._owners if not ticket.soft]
        told = [peer.connection.settle(*settle_args(ticket, peer.assignment)) for ticket, peer in hard]
        if self._observer is not None:
            self._observer.settled(self, began_ns, all(told))
        return all(told)

    @property
    def stats(self) -> PullStats:
        """The statistics of the transfers that were started. They are final when the pull is done."""
        rows = [transfer.stats() for _, _, transfer in self.parts()]
        if not rows:
            return PullStats()
        sums = [sum(row[column] for row in rows) for column in range(3)]
        slowest_us = [max(row[column] for row in rows) / 1000 for column in range(3, 9)]
        return PullStats._make(
            [*sums, *slowest_us, all(row.ran_inline for row in rows), self._core.state == SETTLED]
        )

    @property
    def validated_units(self) -> int:
        """The blocks, layers or tokens (the ticket's `ready_unit`) that have arrived from every owner and are valid.

        Only a streaming pull counts them: decode may use these, in order, while the others are still computed.
        """
        return min((transfer.proven_units for _, _, transfer in self.parts()), default=0)

    def explain(self) -> list[PathTaken]:
        """Returns the path to each owner, why better ones were refused, and the predicted and the measured time."""
        return paths_taken(self.parts(), self._cuts or {})

    def parts(self) -> list[Part]:
        """Returns what has started to be read from each owner."""
        parts = []
        for index, (ticket, peer) in enumerate(self._owners):
            if (transfer := self._core.transfer(index)) is not None:
                parts.append((ticket, peer, transfer))
        return parts

    def _conclude(self) -> None:
        """Raises the error of a failed pull. Otherwise flushes the received bytes."""
        try:
            if self._core.state == FAILED:
                self._told = True
                raise self._failure() or KVLinkError(f"request {self.request_id}: the pull failed")
            if (flush := self._flush) is not None:
                flush()
                self._flush = None
        finally:
            self._observe()

    def _observe(self) -> None:
        if self._observer is not None and self.done():
            self._observer.ended(self)

    def _failure(self) -> KVLinkError | None:
        """Returns why an ended pull has failed, or None."""
        failed = self._core.failure()
        if failed is not None and failed[0] == "PeerUnreachable" and self._error is not None:
            return self._after_cut(self._error)
        if failed is not None and failed[0] == "TransferTimeout" and self._claims:
            return CoordinatorUnavailable(
                f"request {self.request_id}: no coordinator answered the claim within the deadline"
            )
        if failed is not None:
            return self._after_cut(error_of(failed, f"request {self.request_id}"))
        for index, (ticket, peer) in enumerate(self._owners):
            if (transfer := self._core.transfer(index)) is None:
                return _closed_by(ticket, peer)
            if (error := failure_of((ticket, peer, transfer))) is not None:
                return error
        return None

    def _note_cuts(self, parts: Sequence[int]) -> None:
        """Keeps the errors of the parts that were cut, before their owners are connected again."""
        self._cuts = {self._owners[part][0].worker_id: str(self._why_cut(part)) for part in parts}

    def _why_cut(self, part: int) -> KVLinkError:
        """Returns the error of a part that failed before it is read again."""
        ticket, peer = self._owners[part]
        transfer = self._core.cut(part)
        return (transfer and failure_of((ticket, peer, transfer))) or _closed_by(ticket, peer)

    def _after_cut(self, error: KVLinkError) -> KVLinkError:
        """Returns the error of a pull that could not start.

        If the pull was cut before, that is the reason, unless the owner has restarted or the deadline passed.
        """
        if not self._cuts or isinstance(error, (StaleBlocks, Cancelled)):
            return error
        kind = TransferTimeout if isinstance(error, TransferTimeout) else PeerUnreachable
        return kind(f"{'; '.join(self._cuts.values())}; the pull could not restart: {error}")


def _closed_by(ticket: Ticket, peer: Peer) -> PeerUnreachable:
    """Returns the error for an owner whose connection was broken when its part should start."""
    what = f"request {ticket.request_id}: the connection to {ticket.worker_id} ended before anything was read"
    return PeerUnreachable(f"{what}: {peer.connection.why_broken()}")


def failure_of(part: Part) -> KVLinkError | None:
    """Returns why an ended part has failed, or None."""
    ticket, peer, transfer = part
    return failure(transfer, f"request {ticket.request_id} from {ticket.worker_id} over {peer.transport}")
