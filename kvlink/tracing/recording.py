# SPDX-License-Identifier: Apache-2.0
"""Makes spans. Only this module imports OpenTelemetry."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points, version

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
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
    """A span that has not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.context = _seen_from_children(span.get_span_context())

    def set(self, attributes: Attributes) -> None:
        """Adds attributes that were not known at the start."""
        self._span.set_attributes(dict(attributes))

    def fail(self, why: str) -> None:
        """Marks the span as failed, for failures that are not exceptions."""
        self._span.set_status(Status(StatusCode.ERROR, why))


class Spans:
    """Records spans. Safe from any thread. Children of a parent that is not recorded are not: samplers decide."""

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
        """Records a span that is over, between two values of `time.time_ns()`. Returns the parent for its own children.

        Without `parent`, the span is a child of the caller's span. `failed` says what failed.
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
        """Records a span until the block ends; it is the current span meanwhile. An exception becomes its error."""
        started = self._tracer.start_as_current_span(
            name, _within(parent), SpanKind[kind.name], dict(attributes)
        )
        with started as span:
            yield OpenSpan(span)

    @contextmanager
    def joined(self, trace: TraceParent) -> Iterator[None]:
        """Makes `trace` the current span until the block ends."""
        token = otel.attach(_inside(trace))
        try:
            yield
        finally:
            otel.detach(token)

    def current(self) -> TraceParent | None:
        """Returns the caller's current span, whichever library made it, or None."""
        context = get_current_span().get_span_context()
        return _seen_from_children(context) if context.is_valid else None


def _within(parent: TraceParent | None) -> otel.Context | None:
    """Returns the context of a parent, or None for the caller's."""
    return None if parent is None else _inside(parent)


def _inside(trace: TraceParent) -> otel.Context:
    flags = TraceFlags(trace.flags)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace.trace_id, trace.span_id, True, flags)))


def _seen_from_children(context: SpanContext) -> TraceParent:
    return TraceParent(context.trace_id, context.span_id, int(context.trace_flags))


_log = logging.getLogger("kvlink.tracing")

_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""The entry point by protocol."""


def provider(env: Mapping[str, str]) -> TracerProvider | None:
    """Returns the provider that the process has set up, else a new one. Returns None, and logs why, without an
    exporter.

    OpenTelemetry itself reads service name, sampler, limits and addresses from the environment.
    """
    existing = trace.get_tracer_provider()
    if not isinstance(existing, trace.ProxyTracerProvider):
        return existing
    own = SdkTracerProvider()
    names = env.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    try:
        for name in names.split(","):
            own.add_span_processor(BatchSpanProcessor(_exporter(name.strip(), env)))
    except Exception as error:
        own.shutdown()
        _log.warning("no traces exporter=%s error=%s", names, error)
        return None
    return own


def _exporter(name: str, env: Mapping[str, str]) -> SpanExporter:
    """Returns a new exporter.

    Raises LookupError if no installed package has one of that name, and what the exporter raises.
    """
    if name == "otlp":
        protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = _OTLP.get(protocol or "grpc", name)
    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = entry.load()()
        return exporter
    raise LookupError(
        f"no installed package exports {name}; for OTLP over gRPC, run pip install 'kvlink[otel]'"
    )
