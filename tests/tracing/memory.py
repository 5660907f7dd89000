# SPDX-License-Identifier: Apache-2.0
"""Spans of this process, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tracing.finding import Found

from kvlink import tracing


class Collected:
    """Holds the spans that have ended so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[Found]:
        spans = self._exporter.get_finished_spans()
        return [Found.of(span) for span in spans if span.name == name]

    def one(self, name: str) -> Found:
        (found,) = self.named(name)
        return found


@contextmanager
def collecting_here() -> Iterator[Collected]:
    """Workers, coordinators and routers that are made inside are traced."""
    spans = Collected()
    tracing.use(spans.provider)
    try:
        yield spans
    finally:
        tracing.use(None)
        spans.provider.shutdown()
