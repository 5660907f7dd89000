# SPDX-License-Identifier: Apache-2.0
"""An OTLP collector on loopback, as any backend's, that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tracing.finding import Found


class Collector(service.TraceServiceServicer):
    """`services` has the names of the processes that sent something."""

    def __init__(self) -> None:
        self.address = ""
        self.services: set[str] = set()
        self._came = threading.Condition()
        self._spans: list[Found] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._came:
            for resource in request.resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                self.services.add(about["service.name"])
                for scope in resource.scope_spans:
                    self._spans += map(_found, scope.spans)
            self._came.notify_all()
        return messages.ExportTraceServiceResponse()

    def wait_for(self, *names: str) -> list[Found]:
        """Returns one span of each name, once they have come."""
        with self._came:
            self._came.wait_for(lambda: set(names) <= {span.name for span in self._spans})
            return [self._one(name) for name in names]

    def _one(self, name: str) -> Found:
        (found,) = [span for span in self._spans if span.name == name]
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        service.add_TraceServiceServicer_to_server(collector, server)
        collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield collector
        server.stop(None).wait()


def _found(span: Any) -> Found:
    return Found(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        attributes={
            each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
        },
        failed=(span.status.message or "no sentence") if span.status.code == Status.STATUS_CODE_ERROR else "",
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
    )
