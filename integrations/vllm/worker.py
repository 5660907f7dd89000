# SPDX-License-Identifier: Apache-2.0
"""The connector beside the model: holds leases on what was prefilled here, pulls what was prefilled elsewhere.

Called by vLLM around each step. It posts and looks; kvlink's own threads move the bytes, whatever the step does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from kvlink import LeaseEnd, Pull, Worker, WorkerConfig
from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks

from .caches import Caches
from .handover import Greeting, Handover, Owner, expanded
from .orders import Load, Orders
from .tally import Tally, Transfer

_log = logging.getLogger("vllm.kvlink")

_UNTIL_HANDED_OVER_S = 86400.0
_REASONS: dict[type[KVLinkError], str] = {StaleBlocks: "stale", PeerUnreachable: "unreachable"}
"""Names that operators chart; the others go by their exception's."""
_IDLE_S = 0.001
"""A load that ends this soon is noticed one step earlier. vLLM sleeps as long between steps that compute nothing."""


class Results(NamedTuple):
    """Request ids since the last look; `failed` are among `received`."""

    sent: set[str]
    received: set[str]
    failed: set[str]


@dataclass(slots=True)
class _Loading:
    pulls: list[Pull]
    started_ns: int
    post_ns: int
    """Nanoseconds that starting it took."""


class Serving:
    """One rank's kvlink worker, and what it does for vLLM."""

    def __init__(self, worker_id: str, caches: Caches, config: WorkerConfig) -> None:
        self._caches = caches
        self._worker = Worker(caches.pool, worker_id, config=config)
        self._loading: dict[str, _Loading] = {}
        self._failed: set[str] = set()  # before anything was started
        self._held: set[str] = set()  # leases of requests that are not handed over yet
        self._out: set[str] = set()  # leases whose tickets are out
        self._ended: set[str] = set()  # before we heard that their tickets were out
        self._sent: set[str] = set()
        self._patience_s = 0.0
        self.tally = Tally()
        card = self._worker.card
        owner = Owner(card.worker_id, card.epoch, card.agent)
        self.greeting = Greeting(owner, card.layout.block_tokens * caches.token_unit, caches.kernel_blocks)
        transports = [
            f"{one.name}{f' (cannot lend: {one.refused})' if one.refused else ''}" for one in card.transports
        ]
        _log.info(
            "kvlink worker %s at %s lends %r by %s", worker_id, card.agent, caches.pool, ", ".join(transports)
        )

    def carry_out(self, orders: Orders) -> None:
        """Before the step. Microseconds, but for the first pull from a new peer, which connects in the background."""
        self._patience_s = _IDLE_S if orders.idle else 0.0
        for request_id in orders.withdrawn:
            self._withdraw(request_id)
        for request_id, seats in orders.granted.items():
            self._worker.offers.grant_at(request_id, seats, _UNTIL_HANDED_OVER_S)
            self._held.add(request_id)
        for request_id, ttl_s in orders.handed_over.items():
            self._hand_over(request_id, ttl_s)
        for load in orders.loads:
            self._start(load)

    def results(self) -> Results:
        """After the step. Waits only in a step that is idle, and then for a millisecond."""
        self._collect_ended()
        if self._loading and self._patience_s:
            self._wait(self._patience_s)
        sent, self._sent = self._sent, set()
        failed, self._failed = self._failed, set()
        received = set(failed)
        for request_id in [name for name, loading in self._loading.items() if _done(loading)]:
            received.add(request_id)
            if not self._conclude(request_id, self._loading.pop(request_id)):
                failed.add(request_id)
        return Results(sent, received, failed)

    def take_tally(self) -> dict[str, Any] | None:
        """Since the last call."""
        counts = self._worker.lease_counts()
        return self.tally.take(counts.active, counts.oldest_s)

    def close(self) -> None:
        """Ends pulls and leases. On return nothing touches the caches. Idempotent."""
        self._worker.close()

    # Leases.

    def _withdraw(self, request_id: str) -> None:
        self._held.discard(request_id)
        if request_id in self._ended:
            self._ended.discard(request_id)
            return
        try:
            self._worker.offers.abort(request_id)
        except KVLinkError as error:
            _log.warning("lease not withdrawn request=%s error=%s", request_id, error)

    def _hand_over(self, request_id: str, ttl_s: float) -> None:
        """A fast reader may have settled before we hear that the ticket is out."""
        self._collect_ended()
        self._held.discard(request_id)
        if request_id in self._ended:
            self._ended.discard(request_id)
            self._sent.add(request_id)
            return
        self._out.add(request_id)
        with contextlib.suppress(KVLinkError):  # it ended since we looked: its event follows
            self._worker.offers.set_ttl(request_id, ttl_s)

    def _collect_ended(self) -> None:
        for event in self._worker.events():
            if event.how is LeaseEnd.EXPIRED:
                self.tally.expired += 1
                _log.warning(
                    "request %s: nobody fetched it within its lease (held %.1f s); its blocks are free again",
                    event.request_id,
                    event.held_s,
                )
            if event.request_id in self._out:
                self._out.discard(event.request_id)
                self._sent.add(event.request_id)
            elif event.request_id in self._held:
                self._ended.add(event.request_id)

    # Pulls.

    def _start(self, load: Load) -> None:
        start = time.perf_counter_ns()
        try:
            pulls = self._pulls(load)
        except KVLinkError as error:
            self._report(load.request_id, error)
            self._failed.add(load.request_id)
            return
        now = time.perf_counter_ns()
        self._loading[load.request_id] = _Loading(pulls, start, now - start)

    def _pulls(self, load: Load) -> list[Pull]:
        """One of each cache group that has tokens to load. Raises KVLinkError; none runs then."""
        if load.refused or load.handover is None:
            raise StaleBlocks(f"request {load.request_id}: {load.refused}")
        ranges = [self._range(load, group) for group in range(len(self._caches.groups))]
        wanted = [group for group, (first, end) in enumerate(ranges) if first < end]
        pulls: list[Pull] = []
        for group in wanted:
            try:
                pull = self._pull(
                    load.handover, group, load.groups[group], ranges[group], settle=len(wanted) == 1
                )
            except KVLinkError:
                for started in pulls:
                    started.cancel()
                raise
            pulls.append(pull)
        return pulls

    def _pull(
        self, handover: Handover, group: int, blocks: array[int], tokens: tuple[int, int], *, settle: bool
    ) -> Pull:
        tickets = handover.tickets(group, self._caches.token_unit)
        unit = self._caches.token_unit
        return self._worker.pull(
            tickets[0] if len(tickets) == 1 else tickets,
            expanded(blocks, self._caches.kernel_blocks),
            tokens=(tokens[0] // unit, -(-tokens[1] // unit)),
            layers=self._caches.groups[group],
            settle=settle,
        )

    def _range(self, load: Load, group: int) -> tuple[int, int]:
        """Tokens to load: those that are not here, and that neither side's sliding window has left behind."""
        assert load.handover is not None
        ours = _leading_gaps(load.groups[group]) * self.greeting.block_tokens * self._caches.kernel_blocks
        theirs = _leading_gaps(load.handover.groups[group]) * load.handover.block_tokens
        return max(load.first_token, ours, theirs), load.num_tokens

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for loading in self._loading.values():
            for pull in loading.pulls:
                with contextlib.suppress(KVLinkError):  # _conclude reports it
                    pull.wait(max(deadline - time.monotonic(), 0))

    def _conclude(self, request_id: str, loading: _Loading) -> bool:
        """False: not all of it is valid."""
        try:
            for pull in loading.pulls:
                pull.wait(0)
        except KVLinkError as error:
            self._report(request_id, error)
            return False
        if len(loading.pulls) > 1:
            loading.pulls[0].settle()
        self._tally(request_id, loading)
        return True

    def _tally(self, request_id: str, loading: _Loading) -> None:
        paths = [path for pull in loading.pulls for path in pull.explain()]
        self.tally.transfers.append(
            Transfer(
                seconds=max((pull.stats.total_us for pull in loading.pulls), default=0.0) / 1e6,
                noticed_s=(time.perf_counter_ns() - loading.started_ns) / 1e9,
                post_s=loading.post_ns / 1e9,
                num_bytes=sum(path.num_bytes for path in paths),
                num_ops=sum(path.num_ops for path in paths),
                transports=sorted({path.transport for path in paths}),
            )
        )
        for path in paths:
            if self.tally.is_new_path(path.worker_id, path.transport):
                _log.info("request %s came from %s", request_id, path)

    def _report(self, request_id: str, error: KVLinkError) -> None:
        self.tally.failures[_REASONS.get(type(error), type(error).__name__)] += 1
        _log.warning("request %s: its KV cache was not loaded, and not used: %s", request_id, error)


def _done(loading: _Loading) -> bool:
    return all(pull.done() for pull in loading.pulls)


def _leading_gaps(blocks: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda block: block == 0, blocks))
