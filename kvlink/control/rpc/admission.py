# SPDX-License-Identifier: Apache-2.0
"""Checks the caller of every method on a server without certificates, before the method runs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvlink.control.refusal import REASON_TRAILER, Reason
from kvlink.control.security.host_tokens import Verdict, Verifier

_OPEN = frozenset({"/grpc.health.v1.Health/Check"})
"""Health probes need no token. They learn only the serving status."""

Denied = Callable[[str, str], None]
"""Takes (path of the method, address of the peer), and is called for each refused call."""


class Admission(grpc.aio.ServerInterceptor):
    """Admits calls that show this host's token, and begins each answer with the proof that this server knows it."""

    def __init__(self, verifier: Verifier, what: str, denied: Denied) -> None:
        self._verifier = verifier
        self._what = what
        self._denied = denied

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Implements grpc.aio.ServerInterceptor: returns the method's handler, or one that refuses the call."""
        verdict, proof = self._verifier.judge(details.invocation_metadata or ())
        if verdict is Verdict.ADMITTED or details.method in _OPEN:
            return _begun_with(proof, await continuation(details))
        return grpc.stream_stream_rpc_method_handler(self._refuse(details.method, verdict))

    def _refuse(self, method: str, verdict: Verdict) -> Callable[..., Awaitable[None]]:
        async def refused(_: Any, context: Any) -> None:
            reason, sentence = Reason.NOT_READY, f"this {self._what} has just started; retry"
            if verdict is Verdict.REFUSED:
                self._denied(method, context.peer())
                reason, sentence = Reason.DENIED, self._verifier.refusal(self._what)
            refuse(context, reason, sentence)

        return refused


def refuse(context: Any, reason: Reason, sentence: str) -> None:
    """Sets the status with which a call ends once its handler returns."""
    context.set_code(grpc.StatusCode[reason.status])
    context.set_details(sentence)
    context.set_trailing_metadata(((REASON_TRAILER, reason.name),))


def _begun_with(proof: Sequence[tuple[str, str]], handler: Any) -> Any:
    """Returns the handler of a method, which first sends `proof`. It may be None, for a method that there is not."""
    if handler is None or not proof:
        return handler
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, kind)

    async def answer(request: Any, context: Any) -> Any:
        await context.send_initial_metadata(proof)
        return await behaviour(request, context)

    async def answers(request: Any, context: Any) -> Any:
        await context.send_initial_metadata(proof)
        async for each in behaviour(request, context):
            yield each

    return handler._replace(**{kind: answers if inspect.isasyncgenfunction(behaviour) else answer})
