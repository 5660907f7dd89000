# SPDX-License-Identifier: Apache-2.0
"""Makes spans. With `export` the only module that imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import context as otel
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)

from kvlink.tracing import Attributes, Kind
from kvlink.tracing.traceparent import TraceParent


class OpenSpan:
    """One that has not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.context = _seen_from_children(span.get_span_context())

    def set(self, attributes: Attributes) -> None:
        """Adds what only turned out on the way."""
        self._span.set_attributes(dict(attributes))

    def fail(self, why: str) -> None:
        """For failures that are no exceptions."""
        self._span.set_status(Status(StatusCode.ERROR, why))


class Spans:
    """Safe from any thread. A parent that is not recorded has children that are not, either: samplers decide."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("kvlink", version("kvlink"))

    def record(
        self,
        name: str,
        kind: Kind,
        parent: TraceParent | None,
        times_ns: tuple[int, int],
        attributes: Attributes,
        failed: str = "",
    ) -> TraceParent:
        """A span of what is over, from and to `time.time_ns()`; without `parent` as a child of the caller's span.

        failed: what went wrong. Returns what its own children need.
        """
        span = self._tracer.start_span(
            name, _within(parent), SpanKind[kind.name], dict(attributes), start_time=times_ns[0]
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(times_ns[1])
        return _seen_from_children(span.get_span_context())

    @contextmanager
    def span(
        self, name: str, kind: Kind, parent: TraceParent | None, attributes: Attributes
    ) -> Iterator[OpenSpan]:
        """Until the block ends, whose exception is its error; the caller's span meanwhile."""
        started = self._tracer.start_as_current_span(
            name, _within(parent), SpanKind[kind.name], dict(attributes)
        )
        with started as span:
            yield OpenSpan(span)

    @contextmanager
    def joined(self, trace: TraceParent) -> Iterator[None]:
        """The caller's span is this one until the block ends."""
        token = otel.attach(_inside(trace))
        try:
            yield
        finally:
            otel.detach(token)

    def current(self) -> TraceParent | None:
        """The caller's span, of whatever library."""
        context = get_current_span().get_span_context()
        return _seen_from_children(context) if context.is_valid else None


def _within(parent: TraceParent | None) -> otel.Context | None:
    """None: where the caller is."""
    return None if parent is None else _inside(parent)


def _inside(trace: TraceParent) -> otel.Context:
    flags = TraceFlags(trace.flags)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace.trace_id, trace.span_id, True, flags)))


def _seen_from_children(context: SpanContext) -> TraceParent:
    return TraceParent(context.trace_id, context.span_id, int(context.trace_flags))
