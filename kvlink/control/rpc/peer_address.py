# SPDX-License-Identifier: Apache-2.0
"""Identifies the caller of a call. Limits apply per caller, so that a flood from one does not shut out others."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from kvlink.config.addresses import is_loopback

_MASK = (1 << 64) - 1
_serving: ContextVar[Any] = ContextVar("kvlink_serving")


def serving(context: Any) -> None:
    """Stores gRPC's context of a call for the task that answers it."""
    _serving.set(context)


def caller_number() -> int:
    """Returns a number for the caller of the running call: one per process of this host, and one per other host.

    Under TLS the names in the certificate also count. Returns 0 outside calls.
    """
    context = _serving.get(None)
    if context is None:
        return 0
    host, port = _address(context.peer())
    return hash((tuple(context.peer_identities() or ()), host, port if is_loopback(host) else "")) & _MASK


def _address(peer: str) -> tuple[str, str]:
    """Splits gRPC's "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711" into host and port."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), port
