# SPDX-License-Identifier: Apache-2.0
"""Records spans of handoffs for OpenTelemetry: offer → claim → read → settle in the trace of the router's request.

Tracing is off unless a process calls `start` and its OTEL_* variables name an exporter, or it calls `use`. While
`spans` is None, nothing of OpenTelemetry is imported. Code that records spans checks that first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING

from kvlink.tracing.traceparent import HEADER, TraceParent

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kvlink.tracing.recording import OpenSpan, Spans

__all__ = ["HEADER", "Attributes", "Kind", "TraceParent", "joined", "metadata", "span", "start", "use"]

_log = logging.getLogger("kvlink.tracing")

Attributes = Mapping[str, "str | int | float | bool"]

spans: Spans | None = None
"""The recorder of spans; None turns tracing off."""


class Kind(Enum):
    """Mirrors OpenTelemetry's SpanKind without importing it."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"


def start() -> None:
    """Records spans from now on if OTEL_* variables ask for it. Logs what is wrong with them. Idempotent."""
    if spans is not None or not _wanted(os.environ):
        return
    try:
        from kvlink.tracing.recording import provider
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        _log.warning("no traces, although OTEL_* variables ask for them; run pip install 'kvlink[otel]'")
        return
    if (found := provider(os.environ)) is not None:
        use(found)


def use(tracer_provider: TracerProvider | None) -> None:
    """Records spans with this provider, for processes that set up OpenTelemetry in code; None turns tracing off.

    Workers, coordinators and routers that already exist do not change.
    """
    global spans
    if tracer_provider is None:
        spans = None
        return
    from kvlink.tracing.recording import Spans

    spans = Spans(tracer_provider)


def span(
    name: str, kind: Kind, parent: TraceParent | None, attributes: Attributes
) -> AbstractContextManager[OpenSpan | None]:
    """Records a span around the block, for operations long enough that its cost does not matter.

    Without `parent`, the span is a child of the caller's span.
    """
    return nullcontext() if spans is None else spans.span(name, kind, parent, attributes)


def joined(trace: TraceParent | None) -> AbstractContextManager[None]:
    """Makes `trace` the current span for calls from the block."""
    return nullcontext() if spans is None or trace is None else spans.joined(trace)


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Returns the metadata of a gRPC call on behalf of the caller's span, or None without one."""
    current = None if spans is None else spans.current()
    return None if current is None else ((HEADER, str(current)),)


def _wanted(env: Mapping[str, str]) -> bool:
    """Returns whether OTEL_* variables ask for spans.

    Without OTEL_TRACES_EXPORTER, an address suffices, so that nothing is sent by default.
    """
    exporters = env.get("OTEL_TRACES_EXPORTER", "").strip()
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporters.lower() == "none":
        return False
    addresses = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(exporters) or any(env.get(name, "").strip() for name in addresses)
