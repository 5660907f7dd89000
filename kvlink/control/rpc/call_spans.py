# SPDX-License-Identifier: Apache-2.0
"""Records spans of calls that a server answers, and of the offers and claims in handoff streams.

A call that belongs to no trace, such as a beat or a status call, has no span.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any, TypeVar

from kvlink import tracing
from kvlink.control.codec import CoordinatorCalls, Method
from kvlink.control.values import Offer
from kvlink.runtime.supervised import guarded
from kvlink.ticket import trace_in
from kvlink.tracing import HEADER, Attributes, Kind, TraceParent

Q = TypeVar("Q")
R = TypeVar("R")


async def traced(method: Method[Q, R], request: Q, answering: Awaitable[R], metadata: Any) -> R:
    """Awaits `answering`, records its span, and returns or raises its outcome. `metadata` belongs to the call."""
    began_ns, reply, failed = time.time_ns(), None, ""
    try:
        reply = await answering
        return reply
    except BaseException as error:
        failed = str(error) or type(error).__name__
        raise
    finally:
        parent = _callers(metadata) or _tickets(method, request, reply)
        _record(method, request, parent, began_ns, failed)


def follow(method: Method[Q, Any], requests: Iterable[Q], answers: Iterable[asyncio.Future[Any]]) -> None:
    """Records a span for each operation of a batch when its answer is done.

    A stream carries many traces, so each operation belongs to the trace in its ticket.
    """
    began_ns = time.time_ns()
    for request, answer in zip(requests, answers, strict=True):
        note = partial(_followed, method, request, began_ns)
        answer.add_done_callback(guarded("call spans", note))


def _followed(method: Method[Q, Any], request: Q, began_ns: int, answer: asyncio.Future[Any]) -> None:
    if answer.cancelled():
        reply, failed = None, "the caller no longer waits"
    elif error := answer.exception():
        reply, failed = None, str(error) or type(error).__name__
    else:
        reply, failed = answer.result(), ""
    _record(method, request, _tickets(method, request, reply), began_ns, failed)


def _record(
    method: Method[Any, Any], request: object, parent: TraceParent | None, began_ns: int, failed: str
) -> None:
    if tracing.spans is not None and parent is not None:
        times_ns = began_ns, time.time_ns()
        tracing.spans.record(method.path.lstrip("/"), Kind.SERVER, parent, times_ns, _about(request), failed)


def _callers(metadata: Any) -> TraceParent | None:
    header = dict(metadata or ()).get(HEADER, "")
    return TraceParent.parse(header) if isinstance(header, str) else None


def _tickets(method: Method[Any, Any], request: object, reply: Any) -> TraceParent | None:
    """Returns the trace named in a ticket. The claiming reader does not know the request's trace before that."""
    if isinstance(request, Offer):
        return trace_in(request.ticket)
    return trace_in(reply[0]) if reply and method is CoordinatorCalls.CLAIM else None


def _about(request: object) -> Attributes:
    about = {"rpc.system": "grpc"}
    request_id = getattr(request, "request_id", "")
    return about | {"kvlink.request_id": request_id} if request_id else about
