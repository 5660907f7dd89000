# SPDX-License-Identifier: Apache-2.0
"""Exports spans as OTEL_* variables say, like OpenTelemetry's own start-up, but does not set process-wide defaults.

The inference server in this process may set its own later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

_log = logging.getLogger("kvlink.tracing")

_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""The entry point by protocol."""


def provider(env: Mapping[str, str]) -> trace.TracerProvider | None:
    """Returns the provider that the process has set up, else a new one. Returns None, and logs why, without an
    exporter.

    OpenTelemetry itself reads service name, sampler, limits and addresses from the environment.
    """
    existing = trace.get_tracer_provider()
    if not isinstance(existing, trace.ProxyTracerProvider):
        return existing
    own = TracerProvider()
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
