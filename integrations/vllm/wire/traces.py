# SPDX-License-Identifier: Apache-2.0
"""Records the spans of offers, which the scheduler's side writes without its workers, and the trace of each."""

from __future__ import annotations

import time
from typing import Any

from kvlink import tracing
from kvlink.tracing import HEADER, Kind, TraceParent

from ...request_names import name_of

TRACEPARENT = "kvlink_traceparent"
"""The key in `kv_transfer_params`, for routers that know it. vLLM passes headers on only while it traces itself."""


class Traces:
    """The offers that were not removed by `forget`. Used on the scheduler's thread."""

    def __init__(self) -> None:
        tracing.start()
        self._offers: dict[str, TraceParent | None] = {}

    def of(self, request: Any, worker_id: str) -> TraceParent | None:
        """Returns the parent of its readers' spans: the span of its offer, which ends at the first call.

        While tracing is off, it is the request's own. `worker_id` is that of the first rank.
        """
        request_id = request.request_id
        if request_id not in self._offers:
            trace = trace_of(request)
            if tracing.spans is not None:
                now_ns = time.time_ns()
                about = {"kvlink.request_id": name_of(request_id), "kvlink.peer": worker_id}
                trace = tracing.spans.record("kvlink.offer", Kind.PRODUCER, trace, (now_ns, now_ns), about)
            self._offers[request_id] = trace
        return self._offers[request_id]

    def forget(self, request_id: str) -> None:
        """Forgets an offer that has ended. Idempotent."""
        self._offers.pop(request_id, None)


def trace_of(request: Any) -> TraceParent | None:
    """Returns the trace that the request had at the router, if known."""
    given = (request.kv_transfer_params or {}).get(TRACEPARENT) or (request.trace_headers or {}).get(HEADER)
    return TraceParent.parse(given) if isinstance(given, str) else None
