# SPDX-License-Identifier: Apache-2.0
"""The spans of offers, which the scheduler's side writes without its workers, and the trace that each belongs to."""

from __future__ import annotations

import time
from typing import Any

from kvlink import tracing
from kvlink.tracing import HEADER, Kind, TraceParent

TRACEPARENT = "kvlink_traceparent"
"""In `kv_transfer_params`, from routers that know of it: vLLM passes headers on only while it traces itself."""


class Traces:
    """Offers that were not `forget`ed. On the scheduler's thread."""

    def __init__(self) -> None:
        tracing.start()
        self._offers: dict[str, TraceParent | None] = {}

    def of(self, request: Any, worker_id: str) -> TraceParent | None:
        """What its readers belong to: the span of its offer, which ends when first asked for; the request's own while
        nobody collects spans. `worker_id`: of the first rank."""
        request_id = request.request_id
        if request_id not in self._offers:
            trace = trace_of(request)
            if tracing.spans is not None:
                now_ns = time.time_ns()
                about = {"kvlink.request_id": request_id, "kvlink.peer": worker_id}
                trace = tracing.spans.record("kvlink.offer", Kind.PRODUCER, trace, (now_ns, now_ns), about)
            self._offers[request_id] = trace
        return self._offers[request_id]

    def forget(self, request_id: str) -> None:
        """The offer has ended. Idempotent."""
        self._offers.pop(request_id, None)


def trace_of(request: Any) -> TraceParent | None:
    """That it had at the router, if anybody said so."""
    given = (request.kv_transfer_params or {}).get(TRACEPARENT) or (request.trace_headers or {}).get(HEADER)
    return TraceParent.parse(given) if isinstance(given, str) else None
