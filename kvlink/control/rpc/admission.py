# SPDX-License-Identifier: Apache-2.0
"""Checks the caller of every method on a server without certificates, before the method runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvlink.control.refusal import REASON_TRAILER, Reason
from kvlink.control.security.host_tokens import Verifier

_OPEN = frozenset({"/grpc.health.v1.Health/Check"})
"""Health probes need no token. They learn only the serving status."""

Denied = Callable[[str, str], None]
"""Takes (path of the method, address of the peer), and is called for each refused call."""


class Admission(grpc.aio.ServerInterceptor):
    """Admits calls that show this host's token. `port` is set when the server has bound it."""

    def __init__(self, verifier: Verifier, what: str, denied: Denied) -> None:
        self.port = 0
        self._verifier = verifier
        self._what = what
        self._denied = denied

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Implements grpc.aio.ServerInterceptor: returns the method's handler, or one that refuses the call."""
        if details.method in _OPEN or self._verifier.admits(details.invocation_metadata or (), self.port):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(self._refuse(details.method))

    def _refuse(self, method: str) -> Callable[..., Awaitable[None]]:
        async def refuse(_: Any, context: Any) -> None:
            self._denied(method, context.peer())
            reason = Reason.DENIED
            sentence = self._verifier.refusal(self._what)
            await context.abort(grpc.StatusCode[reason.status], sentence, ((REASON_TRAILER, reason.name),))

        return refuse
