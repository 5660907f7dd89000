# SPDX-License-Identifier: Apache-2.0
"""Records spans of offers and pulls, if a tracer is active.

The spans of a pull are recorded when its caller learns that it ended, from the times that the transfers measured. The
ticket carries the trace, and each span is a child of the one before it: offer, claim, read, settle.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from kvlink import tracing
from kvlink.errors import KVLinkError
from kvlink.ticket import Ticket, check_request_id
from kvlink.tracing import Attributes, Kind, TraceParent
from kvlink.transfer.engine import SETTLED
from kvlink.transfer.explain import Part
from kvlink.transfer.group_ids import GroupIds, arrays_of
from kvlink.transfer.offer_check import parent_span
from kvlink.transfer.offers import Offers
from kvlink.transfer.pull import Observer, Pull, failure_of


def kinds() -> tuple[type[Offers], Callable[[bool], Observer] | None]:
    """Returns the class of offers for a new Worker, and what observes its pulls, given whether they settle."""
    tracing.start()
    return (Offers, None) if tracing.spans is None else (TracedOffers, PullSpans)


class TracedOffers(Offers):
    """Records a span for each offer. The ticket carries the context of the span."""

    def offer(self, request_id: str, block_ids: GroupIds, *, trace: str = "", **how: Any) -> Ticket:
        """See `Worker.offer`."""
        check_request_id(request_id)
        ids = arrays_of(block_ids, self._engine.pool.groups, request_id)
        about: Attributes = {
            "kvlink.request_id": request_id,
            "kvlink.peer": self._worker_id,
            "kvlink.blocks": sum(map(len, ids)),
        }
        with tracing.span("kvlink.offer", Kind.PRODUCER, parent_span(request_id, trace), about) as span:
            return super().offer(
                request_id, ids if len(ids) > 1 else ids[0], trace=str(span.context) if span else trace, **how
            )


async def record_claim(request_id: str, claiming: Awaitable[Sequence[Ticket]]) -> Sequence[Ticket]:
    """Awaits `claiming`, records a span, and returns its tickets with the context of that span.

    Raises the errors of `claiming`.
    """
    if tracing.spans is None:
        return await claiming
    began_ns, about = time.time_ns(), {"kvlink.request_id": request_id}
    try:
        tickets = await claiming
    except KVLinkError as error:
        _record("kvlink.claim", None, (began_ns, time.time_ns()), about, str(error))
        raise
    trace = _record("kvlink.claim", tickets[0].trace, (began_ns, time.time_ns()), about)
    return [replace(ticket, trace=trace) for ticket in tickets]


class PullSpans:
    """Records a span for each read and each settle of a pull. The claim or the connect records why it did not start."""

    def __init__(self, settles: bool) -> None:
        self._caller = tracing.spans.current() if tracing.spans else None
        self._settles = settles
        self._reads: list[TraceParent | None] | None = None

    def ended(self, pull: Pull) -> None:
        """Records the spans of all parts, once."""
        if self._reads is None:
            self._reads = []
            self._reads = [self._record_part(part) for part in pull.parts()]

    def settled(self, pull: Pull, began_ns: int, settled: bool) -> None:
        """Records a settle that the program asked for."""
        if pull.done():
            self.ended(pull)
        for part, read in zip(pull.parts(), self._reads or [], strict=False):
            if part[0].soft:
                continue
            why = "" if settled else "the connection is broken"
            _record("kvlink.settle", read, (began_ns, time.time_ns()), _about(part), why)

    def _record_part(self, part: Part) -> TraceParent | None:
        ticket, _, transfer = part
        stats = transfer.stats()
        error = failure_of(part)
        # This clock is read before the other, so that no span is too early.
        ago_ns = time.monotonic_ns() - transfer.started_ns
        began_ns = time.time_ns() - ago_ns
        valid_ns, ended_ns = began_ns + stats.total_ns - stats.settle_ns, began_ns + stats.total_ns
        about = _about(part) | {
            "kvlink.bytes": stats.bytes, "kvlink.operations": stats.num_ops,
            "kvlink.descriptors": stats.num_segments, "kvlink.plan_us": stats.plan_ns / 1e3,
            "kvlink.read_us": stats.read_ns / 1e3, "kvlink.validate_us": stats.validate_ns / 1e3,
            "kvlink.inline": stats.ran_inline,
        }  # fmt: skip
        parent = ticket.trace or self._caller
        read = _record("kvlink.read", parent, (began_ns, valid_ns), about, str(error or ""))
        if self._settles and error is None and not ticket.soft:
            why = "" if transfer.state == SETTLED else "it is settled through the control plane"
            _record("kvlink.settle", read, (valid_ns, ended_ns), _about(part), why)
        return read


def _about(part: Part) -> dict[str, str | int | float | bool]:
    ticket, peer, _ = part
    return {
        "kvlink.request_id": ticket.request_id,
        "kvlink.peer": ticket.worker_id,
        "kvlink.transport": peer.transport,
    }


def _record(
    name: str, parent: TraceParent | None, times_ns: tuple[int, int], about: Attributes, failed: str = ""
) -> TraceParent | None:
    if tracing.spans is None:
        return None
    return tracing.spans.record(name, Kind.CLIENT, parent, times_ns, about, failed)
