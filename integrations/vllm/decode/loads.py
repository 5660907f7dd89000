# SPDX-License-Identifier: Apache-2.0
"""Implements decode's part of the worker's side: it pulls what was prefilled elsewhere, at once or part by part."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvlink import Pull, Worker
from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks
from kvlink.transfer.device_work import DeviceWork
from kvlink.transfer.explain import PathTaken

from ...request_guard import RequestGuard
from ...request_names import printable
from ..model.caches import Caches
from ..model.windows import gap_in
from ..rank_stats import RankStats, Transfer
from ..wire.handoff import Handoff, expanded
from ..wire.handoff_parts import Part
from ..wire.step_commands import Load
from ..wire.stream_timing import LoadCost, Share, cost_of

_log = logging.getLogger("vllm.kvlink")

Launched = Callable[[], DeviceWork | None]
"""Returns the kernels that were launched by now, or None if they have run."""

_REASONS: dict[type[Exception], str] = {StaleBlocks: "stale", PeerUnreachable: "unreachable"}
"""The metric labels of some errors; the others have the name of their exception."""


@dataclass(slots=True)
class _Loading:
    load: Load
    started_ns: int
    post_ns: int = 0
    """The nanoseconds that starting it took."""
    pulls: list[Pull] = field(default_factory=list)
    pulls_began_ns: list[int] = field(default_factory=list)
    pulled_to: list[int] = field(default_factory=list)
    """By cache group, the number of tokens that the pulls so far cover."""
    complete: bool = True
    """True once no more parts come."""
    error: Exception | None = None
    """The error because of which it cannot succeed; pulls may still run."""
    early_bytes: int = 0
    """The bytes that were here when the last part was announced."""
    settles: bool = True
    """False leaves the lease to the scheduler's side: others are under it, or the handoff may come once more."""

    def fail(self, error: Exception) -> None:
        """Lets it end as failed, once the pulls that are cancelled here have ended."""
        self.error = self.error or error
        for pull in self.pulls:
            pull.cancel()

    def over(self) -> bool:
        """Returns whether nothing runs, and nothing more will be started."""
        if not all(pull.done() for pull in self.pulls):
            return False
        if self.error is None:
            self.error = next(filter(None, map(_error_of, self.pulls)), None)
        return self.complete or self.error is not None

    def seconds(self) -> float:
        """Returns the seconds from the call until all was valid; in parts, that includes the rest of the prefill."""
        ended_ns = [
            began_ns + pull.stats.total_us * 1e3
            for began_ns, pull in zip(self.pulls_began_ns, self.pulls, strict=True)
        ]
        return (max(ended_ns) - self.started_ns) / 1e9


class Loads:
    """The loads of one rank. It is called around vLLM's steps; kvlink's own threads move the bytes."""

    def __init__(self, worker: Worker, caches: Caches, stats: RankStats, guard: RequestGuard) -> None:
        self._worker = worker
        self._caches = caches
        self._stats = stats
        self._guard = guard
        self._loading: dict[str, _Loading] = {}
        self._known: set[tuple[str, str]] = set()
        self._costs: dict[str, LoadCost] = {}

    def __len__(self) -> int:
        return len(self._loading)

    def start(self, load: Load, launched: Launched) -> None:
        """Starts a pull, or waits for `add`. Takes microseconds; a new peer is connected in the background.

        Nothing is written before what `launched` returns has ended.
        """
        loading = self._loading[load.request_id] = _Loading(load, time.perf_counter_ns())
        try:
            self._begin(loading, load, launched)
        except Exception as error:
            self._failed("load", loading, error)

    def _begin(self, loading: _Loading, load: Load, launched: Launched) -> None:
        loading.pulled_to = [load.first_token] * len(self._caches.groups)
        loading.settles = load.settles
        if load.refused or load.handoff is None:
            loading.error = StaleBlocks(load.refused)
        elif load.in_parts:
            loading.complete = False
        else:
            self._pull(loading, load.handoff, load.num_tokens, launched, written=True)

    def add(self, request_id: str, part: Part, launched: Launched) -> None:
        """Pulls what a part has beyond the previous ones. Ignores parts of a load that has ended."""
        loading = self._loading.get(request_id)
        if loading is None or loading.complete or loading.error is not None:
            return
        try:
            self._add(loading, part, launched)
        except Exception as error:
            self._failed("part", loading, error)

    def _add(self, loading: _Loading, part: Part, launched: Launched) -> None:
        loading.complete = part.last
        if part.last:
            loading.settles = part.sure and loading.load.settles
            loading.early_bytes = sum(pull.stats.num_bytes for pull in loading.pulls)
        end = min(part.handoff.num_tokens, loading.load.num_tokens)
        self._pull(loading, part.handoff, end, launched, written=part.written)

    def cut(self, request_id: str, why: str) -> None:
        """Ends the wait for parts. What is here is discarded, unless all of it was announced."""
        loading = self._loading.get(request_id)
        if loading is not None and not loading.complete and loading.error is None:
            loading.error = StaleBlocks(why)

    def fail_all(self, why: str) -> None:
        """Lets every load end as failed."""
        for loading in self._loading.values():
            with self._guard.around("cut", loading.load.request_id):
                loading.fail(StaleBlocks(why))

    def wait(self, timeout_s: float) -> None:
        """Waits until all have ended, for at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for loading in self._loading.values():
            try:
                for pull in loading.pulls:
                    if _wait(pull, max(deadline - time.monotonic(), 0)) is not None:
                        break  # `take` reports it
            except Exception as error:
                self._failed("load", loading, error)

    def take(self) -> tuple[set[str], set[str]]:
        """Returns those that ended since the last call, and those of them that failed. Never waits."""
        ended, failed = set(), set()
        for request_id, loading in list(self._loading.items()):
            if not self._over(loading):
                continue
            del self._loading[request_id]
            ended.add(request_id)
            if loading.error is not None:
                failed.add(request_id)
            with self._guard.around("report", request_id):  # the bytes are here, or they are not
                if loading.error is None:
                    self._conclude(request_id, loading)
                else:
                    self._report(loading.load, loading.error)
        return ended, failed

    def _over(self, loading: _Loading) -> bool:
        try:
            return loading.over()
        except Exception as error:
            self._failed("load", loading, error)
            return False  # its pulls may still write; the next step looks again

    def _failed(self, kind: str, loading: _Loading, error: Exception) -> None:
        """Keeps an exception inside one load, which fails."""
        self._guard.caught(kind, loading.load.request_id, error)
        with self._guard.around(kind, loading.load.request_id):
            loading.fail(error)

    def take_costs(self) -> dict[str, LoadCost]:
        """Returns the cost of loads by prefill server, for the servers that loads came from since the last call."""
        costs, self._costs = self._costs, {}
        return costs

    def _pull(
        self, loading: _Loading, handoff: Handoff, end: int, launched: Launched, *, written: bool
    ) -> None:
        """Starts a pull of what the cache groups have up to token `end` and is not here."""
        start = time.perf_counter_ns()
        try:
            ranges = [self._range(loading, handoff, group, end) for group in range(len(self._caches.groups))]
            # A load of nothing settles the lease, too.
            if any(first < upto for first, upto in ranges) or (loading.complete and not loading.pulls):
                loading.pulls_began_ns.append(time.perf_counter_ns())
                settle = loading.settles and not loading.load.in_parts
                loading.pulls.append(
                    self._start(loading.load, handoff, ranges, written, settle=settle, after=launched())
                )
                loading.pulled_to = [
                    end if first < upto else before
                    for (first, upto), before in zip(ranges, loading.pulled_to, strict=True)
                ]
        except KVLinkError as error:
            loading.fail(error)
        loading.post_ns += time.perf_counter_ns() - start

    def _start(
        self,
        load: Load,
        handoff: Handoff,
        ranges: Sequence[tuple[int, int]],
        written: bool,
        *,
        settle: bool,
        after: DeviceWork | None,
    ) -> Pull:
        groups = self._caches.groups
        tickets = handoff.tickets(groups, written=written)
        into, tokens = [], []
        for group, ours, (first, upto) in zip(groups, load.into, ranges, strict=True):
            ids = expanded(ours, group.kernel_blocks)
            into += [ids] * len(group.units)
            tokens += [unit.range(first, upto) if first < upto else (0, 0) for unit in group.units]
        alone = len(into) == 1
        return self._worker.pull(
            tickets[0] if len(tickets) == 1 else tickets,
            into[0] if alone else into,
            tokens=tokens[0] if alone else tokens,
            settle=settle,
            after=after,
        )

    def _range(self, loading: _Loading, handoff: Handoff, group: int, end: int) -> tuple[int, int]:
        """Returns the tokens to load: those not here that neither side's sliding window has left behind.

        For a group of states, returns the range of the state. Raises StaleBlocks if prefill no longer has a block for
        what is read here.
        """
        load, theirs, cache = loading.load, handoff.block_ids[group], self._caches.groups[group]
        if not theirs and not loading.complete:  # they come with a later part
            return end, end
        if not cache.block_tokens:
            if len(theirs) != 1 or len(load.into[group]) != 1:
                raise StaleBlocks(f"cache group {group} has no state: {len(theirs)} there")
            return 0, 1
        ours = _leading_gaps(load.into[group]) * cache.block_tokens * cache.kernel_blocks
        missing = max(loading.pulled_to[group], ours)
        needed = max(missing, load.needed_from[group] if load.needed_from else 0)
        block_tokens = handoff.block_tokens[group]
        gap = gap_in(theirs, block_tokens, needed, end)
        if gap is not None:
            raise StaleBlocks(
                f"prefill has no block for token {gap} of cache group {group}, and tokens {needed} to {end} are "
                "needed: its sliding window has moved on, as it answered more than one token; have the router ask "
                "prefill for max_tokens=1"
            )
        return max(missing, _leading_gaps(theirs) * block_tokens), end

    def _conclude(self, request_id: str, loading: _Loading) -> None:
        if loading.settles and loading.load.in_parts:
            loading.pulls[0].settle()
        paths = [path for pull in loading.pulls for path in pull.explain()]
        self._stats.early_bytes += loading.early_bytes
        self._stats.transfers.append(
            Transfer(
                transfer_s=loading.seconds(),
                noticed_s=(time.perf_counter_ns() - loading.started_ns) / 1e9,
                post_s=loading.post_ns / 1e9,
                num_bytes=sum(path.num_bytes for path in paths),
                num_ops=sum(path.num_ops for path in paths),
                transports=sorted({path.transport for path in paths}),
            )
        )
        if loading.load.handoff is not None and loading.load.handoff.soft:
            self._stats.turns["loaded"] += 1
        self._predict(loading.load, paths)
        for path in paths:
            if (path.worker_id, path.transport) not in self._known:
                self._known.add((path.worker_id, path.transport))
                _log.info("request %s came from %s", printable(request_id), path)

    def _predict(self, load: Load, paths: Sequence[PathTaken]) -> None:
        """Predicts later loads like this one, now that the paths have learned from it."""
        if load.handoff is None or load.num_tokens <= load.first_token:
            return
        num_tokens = load.num_tokens - load.first_token
        num_ops, num_bytes = Counter[str](), Counter[str]()
        for path in paths:
            num_ops[path.worker_id] += path.num_ops
            num_bytes[path.worker_id] += path.num_bytes
        shares = [
            Share(peer.predict_us, num_ops[owner] / num_tokens, num_bytes[owner] / num_tokens)
            for peer in self._worker.peers()
            if num_bytes[owner := peer.card.worker_id]
        ]
        if shares:
            self._costs[load.handoff.owners[0].worker_id] = cost_of(shares)

    def _report(self, load: Load, error: Exception) -> None:
        reason = _REASONS.get(type(error), type(error).__name__)
        if (
            load.handoff is not None and load.handoff.soft
        ):  # ordinary: its owner may write the blocks at any time
            self._stats.turns[_why(error) or reason] += 1
            name = printable(load.request_id)
            _log.info("request %s: its last turn's answer is computed again: %s", name, error)
            return
        self._stats.failures[reason] += 1
        _log.warning(
            "request %s (prefill request %s): its KV cache was not loaded, and not used: %s",
            printable(load.request_id),
            printable(load.handoff.request_id) if load.handoff is not None else "unknown",
            error,
        )


def _why(error: Exception) -> str:
    return error.why.name.lower() if isinstance(error, StaleBlocks) and error.why.value else ""


def _error_of(pull: Pull) -> KVLinkError | None:
    return _wait(pull, 0)


def _wait(pull: Pull, timeout_s: float) -> KVLinkError | None:
    try:
        pull.wait(timeout_s)
    except KVLinkError as error:
        return error
    return None


def _leading_gaps(blocks: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda block: block == 0, blocks))
