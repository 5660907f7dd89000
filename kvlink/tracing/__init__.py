# SPDX-License-Identifier: Apache-2.0
"""Spans of handoffs, for OpenTelemetry: offer → claim → read → settle in the trace of the router's request.

Off unless a process calls `start` and its OTEL_* variables name an exporter, or it calls `use`. While `spans` is None
nothing of OpenTelemetry is imported; who has something to tell looks at that first.
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
"""Where spans go; None: nobody collects them."""


class Kind(Enum):
    """OpenTelemetry's SpanKind, without it."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"


def start() -> None:
    """Collects spans from now on if OTEL_* variables ask for it; what is wrong with them is logged. Idempotent."""
    if spans is not None or not _wanted(os.environ):
        return
    try:
        from kvlink.tracing.export import provider
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        _log.warning("no traces, although OTEL_* variables ask for them: pip install 'kvlink[otel]'")
        return
    if (found := provider(os.environ)) is not None:
        use(found)


def use(tracer_provider: TracerProvider | None) -> None:
    """Collects spans with this one, for processes that set OpenTelemetry up in code; None: no more.

    Workers, coordinators and routers that are there already stay as they were made.
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
    """Around what takes long enough not to mind; without `parent` as a child of the caller's span."""
    return nullcontext() if spans is None else spans.span(name, kind, parent, attributes)


def joined(trace: TraceParent | None) -> AbstractContextManager[None]:
    """Calls from within belong to this span."""
    return nullcontext() if spans is None or trace is None else spans.joined(trace)


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Of a gRPC call on behalf of the caller's span; None: there is none."""
    current = None if spans is None else spans.current()
    return None if current is None else ((HEADER, str(current)),)


def _wanted(env: Mapping[str, str]) -> bool:
    """Without a name in OTEL_TRACES_EXPORTER an address suffices, so that nothing is sent by default."""
    exporters = env.get("OTEL_TRACES_EXPORTER", "").strip()
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporters.lower() == "none":
        return False
    addresses = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(exporters) or any(env.get(name, "").strip() for name in addresses)
