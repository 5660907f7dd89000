# SPDX-License-Identifier: Apache-2.0
"""Implements the decode side: the handle of one pull of a request's blocks from one or several owners."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from kvlink.errors import Cancelled, ConfigError, KVLinkError
from kvlink.runtime.supervised import guarded
from kvlink.timeouts import checked
from kvlink.transfer.completion import LoopWaiter, SharedAwaitable, cancellation
from kvlink.transfer.engine import FAILED, SETTLED, failure
from kvlink.transfer.explain import PathTaken, paths_taken
from kvlink.transfer.pull_start import Part, PullStart, settle_args, stop
from kvlink.transfer.restart import Restart


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


class Pull(SharedAwaitable[PullStats]):
    """A running or ended pull. The destination holds valid bytes only after the pull ended without an error.

    On a GPU, kernels can read the bytes after `wait` or `await` has returned, which makes them visible to the GPU.
    Safe from any thread, and `await` works on any event loop. At the end of a `with` or `async with` block of a pull
    the block waits for it, or cancels it if the block raises. It raises an error of the pull that nobody has seen: not
    one that `wait` or `await` has raised before, and not that the program itself has cancelled the pull.
    """

    __slots__ = (
        "_landed",
        "_on_landed",
        "_on_unsettled",
        "_parts",
        "_pid",
        "_restart",
        "_starting",
        "_told",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        parts: list[Part] | None,
        starting: PullStart | None,
        on_unsettled: Callable[[Part], None] | None,
        on_landed: Callable[[], object] | None = None,
        restart: Restart | None = None,
        landed: bool = False,
    ) -> None:
        self.request_id = request_id
        self._parts = parts
        self._starting = starting
        self._on_unsettled = on_unsettled
        self._on_landed = on_landed
        self._restart = restart
        self._landed = landed

    def __repr__(self) -> str:
        """Describes the state."""
        try:
            if not self.done():
                return f"Pull({self.request_id!r}: running)"
        except ConfigError:
            return f"Pull({self.request_id!r}: belongs to the parent process)"
        return f"Pull({self.request_id!r}: {self._error() or self.stats!r})"

    def done(self) -> bool:
        """Returns whether the pull has ended, with or without success. Never blocks."""
        parts = self._started(0)
        if parts is None or not all(transfer.done() for _, _, transfer in parts):
            return False
        return self._restart is None or not self._try_restart(self._restart, parts)

    def _try_restart(self, restart: Restart, parts: list[Part]) -> bool:
        """Returns whether the pull continues after `parts`, which have ended."""
        if all(transfer.state != FAILED for _, _, transfer in parts):
            return False
        with restart.lock:
            if parts is not self._started(0):
                return True  # another thread restarted it first
            starting = restart.begin(self.request_id, parts)
            if starting is None:
                return False
            self._starting = starting  # before `_parts` is cleared, because readers then look here
            self._parts = None
            return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` seconds with the GIL released. Returns False if the pull is still running.

        Raises TransferError, or LayoutMismatch, ConfigError or CoordinatorError if the pull could not start.
        """
        if self._landed:  # a small pull that ran inline
            return True
        deadline = None if timeout_s is None else time.monotonic() + checked(timeout_s)
        while self._wait_once(deadline):
            if self.done():
                self._conclude()
                return True
        return False

    def _wait_once(self, deadline: float | None) -> bool:
        """Waits for the started transfers and returns whether they ended in time. The pull may restart then."""
        parts = self._started(None if deadline is None else max(deadline - time.monotonic(), 0))
        if parts is None:
            return False
        for _, _, transfer in parts:
            if not transfer.wait(-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                return False
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
                while not self.done():
                    await self._until_ended()
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
        if self._restart is not None:
            self._restart.give_up()
        again: asyncio.CancelledError | None = None
        try:
            while not self.done():
                again = await cancellation(self._until_ended(stopping=True)) or again
        except GeneratorExit:
            self._cancel_own()
            raise
        if again is not None:
            raise again

    def _cancel_own(self) -> None:
        """Cancels the pull for a closed coroutine or a thread, but not in a forked child: the parent owns the pull."""
        if self._pid == os.getpid():
            self.cancel()

    async def _until_ended(self, stopping: bool = False) -> None:
        if self._parts is None and self._starting is not None:
            self._starting.check_own()
            if stopping:
                self._starting.cancel()
            started = asyncio.wrap_future(self._starting)
            started.add_done_callback(guarded("pull start", _retrieve_exception))  # _conclude raises it
            await asyncio.wait([started])
        transfers = [transfer for _, _, transfer in self._started(0) or []]
        if stopping:
            for transfer in transfers:
                transfer.cancel()
        for transfer in transfers:
            await LoopWaiter.of_running_loop().ended(transfer)

    def __enter__(self) -> Pull:
        self._pid = os.getpid()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cancel_own()
        elif not self._is_told():
            self.wait()

    async def __aenter__(self) -> Pull:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if not self._is_told():
                await self
        elif issubclass(kind, GeneratorExit):
            self._cancel_own()
        else:
            await self._cancelled()

    def _is_told(self) -> bool:
        """Returns whether the pull has failed or was cancelled, and the program knows it. It has ended then."""
        return getattr(self, "_told", False)  # set at that time, because every small pull is created

    def cancel(self) -> None:
        """Ends the pull. On return no more bytes of it can arrive. It has no effect on an ended pull."""
        if self._restart is not None:
            self._restart.give_up()
        self._told = self._is_told() or not self.done()
        if self._parts is None and self._starting is not None:
            self._starting.check_own()
            self._starting.cancel()
        for part in self._started(None) or []:
            stop(part)

    def close(self) -> None:
        """Cancels the pull as `cancel` does."""
        self.cancel()

    def settle(self) -> bool:
        """Settles the offer at each owner after a pull with settle=False. Returns False if an owner is unreachable.

        A reader that reads a request in several pulls settles the last one after all have succeeded. A soft offer needs
        no settle. Does not block."""
        parts = [part for part in self._started(0) or [] if not part[0].soft]
        settled = [peer.connection.settle(*settle_args(ticket, peer.assignment)) for ticket, peer, _ in parts]
        return all(settled)

    @property
    def stats(self) -> PullStats:
        """The statistics of the transfers that were started. They are final when the pull is done."""
        transfers = [transfer for _, _, transfer in self._started(0) or []]
        if not transfers:
            return PullStats()
        rows = [transfer.stats() for transfer in transfers]
        sums = [sum(row[column] for row in rows) for column in range(3)]
        slowest_us = [max(row[column] for row in rows) / 1000 for column in range(3, 9)]
        settled = all(transfer.state == SETTLED for transfer in transfers)
        return PullStats._make([*sums, *slowest_us, all(row.ran_inline for row in rows), settled])

    def explain(self) -> list[PathTaken]:
        """Returns the path to each owner, why better ones were refused, and the predicted and the measured time."""
        cut = {} if self._restart is None else self._restart.cut
        return paths_taken(self._started(0) or [], cut)

    def _started(self, timeout_s: float | None) -> list[Part] | None:
        """Returns the parts, an empty list if the pull could not start, or None while it is starting."""
        if self._parts is None and self._starting is not None:
            self._starting.check_own()
            try:
                return self._starting.result(timeout_s)
            except concurrent.futures.TimeoutError:
                return None
            except (concurrent.futures.CancelledError, KVLinkError):
                return []
        return self._parts

    def _conclude(self) -> None:
        """Raises the error of a failed pull. Otherwise reports unsettled parts and flushes the received bytes."""
        parts = self._started(0)
        if not parts or any(transfer.state != SETTLED for _, _, transfer in parts):
            error = self._error()
            if error is not None:
                self._told = True
                raise error
            self._report_unsettled()
        flush = self._on_landed
        if flush is not None:
            flush()
            self._on_landed = None

    def _report_unsettled(self) -> None:
        if self._on_unsettled is not None:
            report, self._on_unsettled = self._on_unsettled, None
            for part in self._started(0) or []:
                if part[2].state != SETTLED and not part[0].soft:
                    report(part)

    def _error(self) -> KVLinkError | None:
        if self._parts is None and self._starting is not None:
            if self._starting.cancelled():
                return Cancelled(f"request {self.request_id}: cancelled before it was connected")
            error = self._starting.exception(0)
            if error is not None:
                error = error if isinstance(error, KVLinkError) else KVLinkError(repr(error))
                return error if self._restart is None else self._restart.failed(error)
        for ticket, peer, transfer in self._started(0) or []:
            where = f"request {self.request_id} from {ticket.worker_id} over {peer.transport}"
            failed = failure(transfer, where)
            if failed is not None:
                return failed
        return None


def _retrieve_exception(started: asyncio.Future[list[Part]]) -> None:
    """Retrieves the exception, because asyncio logs an error for an exception that is never retrieved."""
    if not started.cancelled():
        started.exception()
