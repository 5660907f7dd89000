# SPDX-License-Identifier: Apache-2.0
"""Decode's side beside the model: pulls of what was prefilled elsewhere, at once or part by part."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from kvlink import Pull, Worker
from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks

from .caches import Caches
from .handoff import Handoff, expanded
from .parts import Part
from .step_commands import Load
from .tally import Tally, Transfer
from .windows import gap_in

_log = logging.getLogger("vllm.kvlink")

_REASONS: dict[type[KVLinkError], str] = {StaleBlocks: "stale", PeerUnreachable: "unreachable"}
"""Names that operators chart; the others go by their exception's."""


class Ended(NamedTuple):
    """Request ids since the last look; `failed` are among `received`."""

    received: set[str]
    failed: set[str]


@dataclass(slots=True)
class _Loading:
    load: Load
    started_ns: int
    post_ns: int = 0
    """Nanoseconds that starting it took."""
    pulls: list[Pull] = field(default_factory=list)
    pulls_began_ns: list[int] = field(default_factory=list)
    pulled_to: list[int] = field(default_factory=list)
    """By cache group, tokens that the pulls so far cover."""
    complete: bool = True
    """No more parts come."""
    error: KVLinkError | None = None
    """It cannot succeed any more; pulls may still run."""
    early_bytes: int = 0
    """That were here when the last part was announced."""
    settles: bool = True
    """False: the lease is left to the scheduler's side: others are under it, or the handoff may come once more."""

    def over(self) -> bool:
        """Whether nothing runs, and nothing more is to be started."""
        if not all(pull.done() for pull in self.pulls):
            return False
        if self.error is None:
            self.error = next(filter(None, map(_error_of, self.pulls)), None)
        return self.complete or self.error is not None

    def seconds(self) -> float:
        """From the call until all was valid; in parts, the rest of the prefill is in between."""
        ended_ns = [
            began_ns + pull.stats.total_us * 1e3
            for began_ns, pull in zip(self.pulls_began_ns, self.pulls, strict=True)
        ]
        return (max(ended_ns) - self.started_ns) / 1e9


class Loads:
    """The loads of one rank. Called around vLLM's steps; kvlink's own threads move the bytes.

    block_tokens: tokens of vLLM in a block of the pool.
    """

    def __init__(self, worker: Worker, caches: Caches, block_tokens: int, tally: Tally) -> None:
        self._worker = worker
        self._caches = caches
        self._block_tokens = block_tokens
        self._tally = tally
        self._loading: dict[str, _Loading] = {}

    def __len__(self) -> int:
        return len(self._loading)

    def start(self, load: Load) -> None:
        """Pulls what is to be pulled, or waits for `add`. Microseconds, but for a new peer: that connects behind."""
        groups = len(self._caches.groups)
        loading = self._loading[load.request_id] = _Loading(load, time.perf_counter_ns())
        loading.pulled_to = [load.first_token] * groups
        loading.settles = load.settles
        if load.refused or load.handoff is None:
            loading.error = StaleBlocks(f"request {load.request_id}: {load.refused}")
        elif load.in_parts:
            loading.complete = False
        else:
            self._pull(loading, load.handoff, load.num_tokens, written=True)

    def add(self, request_id: str, part: Part) -> None:
        """Pulls what a part has beyond those before. Parts of a load that has ended are nobody's."""
        loading = self._loading.get(request_id)
        if loading is None or loading.complete or loading.error is not None:
            return
        loading.complete = part.last
        if part.last:
            loading.settles = part.sure and loading.load.settles
            loading.early_bytes = sum(pull.stats.num_bytes for pull in loading.pulls)
        end = min(part.handoff.num_tokens, loading.load.num_tokens)
        self._pull(loading, part.handoff, end, written=part.written)

    def cut(self, request_id: str, why: str) -> None:
        """No more parts come: what is here is worth nothing, unless all of it was announced."""
        loading = self._loading.get(request_id)
        if loading is not None and not loading.complete and loading.error is None:
            loading.error = StaleBlocks(f"request {request_id}: {why}")

    def wait(self, patience_s: float) -> None:
        """Until all have ended, for seconds."""
        deadline = time.monotonic() + patience_s
        for loading in self._loading.values():
            for pull in loading.pulls:
                with contextlib.suppress(KVLinkError):  # `take` reports it
                    pull.wait(max(deadline - time.monotonic(), 0))

    def take(self) -> Ended:
        """Those that ended since the last look. Never waits."""
        received, failed = set(), set()
        for request_id in [name for name, loading in self._loading.items() if loading.over()]:
            loading = self._loading.pop(request_id)
            received.add(request_id)
            if loading.error is None:
                self._conclude(request_id, loading)
            else:
                failed.add(request_id)
                self._report(loading.load, loading.error)
        return Ended(received, failed)

    def _pull(self, loading: _Loading, handoff: Handoff, end: int, *, written: bool) -> None:
        """One pull of each cache group that has tokens to load."""
        start = time.perf_counter_ns()
        try:
            ranges = [self._range(loading, handoff, group, end) for group in range(len(self._caches.groups))]
            wanted = [group for group, (first, upto) in enumerate(ranges) if first < upto]
            alone = len(wanted) == 1 and not loading.load.in_parts and loading.settles
            for group in wanted:
                loading.pulls_began_ns.append(time.perf_counter_ns())
                loading.pulls.append(
                    self._pull_group(loading.load, handoff, group, ranges[group], written, settle=alone)
                )
                loading.pulled_to[group] = end
        except KVLinkError as error:
            loading.error = error
            for started in loading.pulls:
                started.cancel()
        loading.post_ns += time.perf_counter_ns() - start

    def _pull_group(
        self,
        load: Load,
        handoff: Handoff,
        group: int,
        tokens: tuple[int, int],
        written: bool,
        *,
        settle: bool,
    ) -> Pull:
        unit = self._caches.token_unit
        tickets = handoff.tickets(group, unit, written=written)
        return self._worker.pull(
            tickets[0] if len(tickets) == 1 else tickets,
            expanded(load.groups[group], self._caches.kernel_blocks),
            tokens=(tokens[0] // unit, -(-tokens[1] // unit)),
            layers=self._caches.groups[group],
            settle=settle,
        )

    def _range(self, loading: _Loading, handoff: Handoff, group: int, end: int) -> tuple[int, int]:
        """Tokens to load: those that are not here, and that neither side's sliding window has left behind.

        Raises StaleBlocks when prefill has no block any more for a token that is read here.
        """
        load, theirs = loading.load, handoff.groups[group]
        if not theirs and not loading.complete:  # they come with a later part
            return end, end
        ours = _leading_gaps(load.groups[group]) * self._block_tokens * self._caches.kernel_blocks
        missing = max(loading.pulled_to[group], ours)
        needed = max(missing, load.needed_from[group] if load.needed_from else 0)
        gap = gap_in(theirs, handoff.block_tokens, needed, end)
        if gap is not None:
            raise StaleBlocks(
                f"prefill holds no block for token {gap} of cache group {group}, and tokens {needed} to {end} are "
                "needed: its sliding window has moved on, as it answered more than one token; have the router ask "
                "prefill for max_tokens=1"
            )
        return max(missing, _leading_gaps(theirs) * handoff.block_tokens), end

    def _conclude(self, request_id: str, loading: _Loading) -> None:
        if loading.settles and (loading.load.in_parts or len(loading.pulls) > 1):
            loading.pulls[0].settle()
        paths = [path for pull in loading.pulls for path in pull.explain()]
        self._tally.early_bytes += loading.early_bytes
        self._tally.transfers.append(
            Transfer(
                seconds=loading.seconds(),
                noticed_s=(time.perf_counter_ns() - loading.started_ns) / 1e9,
                post_s=loading.post_ns / 1e9,
                num_bytes=sum(path.num_bytes for path in paths),
                num_ops=sum(path.num_ops for path in paths),
                transports=sorted({path.transport for path in paths}),
            )
        )
        for path in paths:
            if self._tally.is_new_path(path.worker_id, path.transport):
                _log.info("request %s came from %s", request_id, path)

    def _report(self, load: Load, error: KVLinkError) -> None:
        self._tally.failures[_REASONS.get(type(error), type(error).__name__)] += 1
        _log.warning(
            "request %s (prefill request %s): its KV cache was not loaded, and not used: %s",
            load.request_id,
            load.handoff.request_id if load.handoff is not None else "unknown",
            error,
        )


def _error_of(pull: Pull) -> KVLinkError | None:
    try:
        pull.wait(0)
    except KVLinkError as error:
        return error
    return None


def _leading_gaps(blocks: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda block: block == 0, blocks))
