# SPDX-License-Identifier: Apache-2.0
"""A span as tests see it, wherever it was collected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REQUEST = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""A request's `traceparent`."""
TRACE_ID, SPAN_ID = REQUEST.split("-")[1:3]


@dataclass(frozen=True)
class Found:
    """Ids are in hex; `parent` is empty for a root. `failed` is the sentence of an error."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: str
    began_ns: int
    ended_ns: int

    @classmethod
    def of(cls, span: Any) -> Found:
        """Converts a span of the SDK."""
        return cls(
            name=span.name,
            kind=span.kind.name,
            trace=f"{span.context.trace_id:032x}",
            id=f"{span.context.span_id:016x}",
            parent=f"{span.parent.span_id:016x}" if span.parent else "",
            attributes=dict(span.attributes),
            failed=""
            if span.status.is_ok or span.status.is_unset
            else span.status.description or "no sentence",
            began_ns=span.start_time,
            ended_ns=span.end_time,
        )

    def within(self, parent: Found) -> bool:
        """Whether that is its parent."""
        return (self.trace, self.parent) == (parent.trace, parent.id)
