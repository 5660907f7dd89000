# SPDX-License-Identifier: Apache-2.0
"""Whose connection a call comes by. Limits are shared out among these, so that a flood by one shuts out no other."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from kvlink.addresses import is_loopback

_MASK = (1 << 64) - 1
_serving: ContextVar[Any] = ContextVar("kvlink_serving")


def serving(context: Any) -> None:
    """Notes gRPC's context of a call, for the task that answers it."""
    _serving.set(context)


def caller_number() -> int:
    """Of the call that is being answered: one number for each process of this host, and for each other host.

    Under TLS the names of the certificate count, too. 0 outside calls.
    """
    context = _serving.get(None)
    if context is None:
        return 0
    host, port = _address(context.peer())
    return hash((tuple(context.peer_identities() or ()), host, port if is_loopback(host) else "")) & _MASK


def _address(peer: str) -> tuple[str, str]:
    """Of gRPC's "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), port
