# SPDX-License-Identifier: Apache-2.0
"""Identifies callers by the names in their certificate and their token, and checks what they may call.

Both happen before any handler runs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import NamedTuple

from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security.keys import COORDINATOR, listed, tenant_name, tenants_in

EVERY_TENANT = "*"
MEMBER = "kvlink-member"
"""Metadata key of calls to a coordinator. The value is the secret of the calling worker's process."""
_MAX_SECRET = 256
_HAS_SECRET = b"kvm1"
"""The incarnation of a process with a secret begins with this. Those of earlier releases are random."""


class Role(Enum):
    """Says what a caller may do within a tenant."""

    WORKER = "worker"
    """A worker may make every call."""
    OBSERVER = "observer"
    """An observer sees counts and joined workers, but no keys and no tickets."""


class Caller(NamedTuple):
    """Identifies the caller of a call. Without TLS all callers are the same worker."""

    tenant: str = ""
    role: Role = Role.WORKER
    incarnation: bytes = b""
    """That of the process whose secret the caller has sent, or b""."""

    @property
    def sees_all(self) -> bool:
        """Returns whether the caller is bound to no tenant.

        That is an observer of all tenants, this process itself, or any caller without TLS.
        """
        return self.tenant in ("", EVERY_TENANT)


Gate = Callable[[str, Sequence[str], str], Caller]
"""Maps (method, names in the certificate, token or "") to the caller. Raises RefusedError (DENIED)."""

_ANYBODY = Caller()
_caller: ContextVar[Caller] = ContextVar("kvlink_caller")
_COORDINATORS_CALL = "GetCard"
_OBSERVERS_CALL = frozenset({"Status", "Overview", "ListWorkers", "GetWorker"})


def incarnation_of(secret: object) -> bytes:
    """Returns the incarnation of a process with this secret, or b"" for what is no secret.

    The card shows it to everybody, and nobody else can prove to be this process.
    """
    if not isinstance(secret, str) or not 0 < len(secret) <= _MAX_SECRET:
        return b""
    return _HAS_SECRET + hashlib.sha256(secret.encode("utf-8", "replace")).digest()[:12]


def is_caller(incarnation: bytes) -> bool:
    """Returns whether the running task answers this process. One without a secret may be anybody of its tenant."""
    return not incarnation.startswith(_HAS_SECRET) or hmac.compare_digest(incarnation, caller().incarnation)


def caller() -> Caller:
    """Returns the caller of the call that the running task answers."""
    return _caller.get(_ANYBODY)


def set_caller(found: Caller) -> None:
    """Sets the caller for the running task and the tasks that it starts."""
    _caller.set(found)


def caller_by_certificate(names: Sequence[str]) -> Caller:
    """Returns the caller that the names in a certificate identify. Raises RefusedError (DENIED)."""
    tenants = tenants_in(names)
    if len(tenants) == 1:
        return Caller(tenants[0])
    if COORDINATOR in names:
        return Caller(EVERY_TENANT, Role.OBSERVER)
    raise RefusedError(
        Reason.DENIED,
        f"your certificate ({listed(names)}) names {len(tenants)} tenants, not one: issue it with the DNS name "
        f"{tenant_name('tenant')} of its tenant (for development: `kvlink certs worker --tenant NAME`), or "
        "map it in the coordinator's --tenants file",
    )


def check_right(caller: Caller, method: str) -> None:
    """Raises RefusedError (DENIED) if the caller's role may not make the call."""
    if caller.role is Role.OBSERVER and method not in _OBSERVERS_CALL:
        raise RefusedError(Reason.DENIED, f"you are an observer here and may not call {method}; workers may")


def coordinator_gate(method: str, names: Sequence[str], token: str) -> Caller:
    """Is the gate of a coordinator without a tenants file: identifies callers by their certificates."""
    if token:
        raise RefusedError(
            Reason.DENIED,
            "the coordinator has no tenants file to look the token up in: start it with --tenants FILE",
        )
    found = caller_by_certificate(names)
    check_right(found, method)
    return found


def agent_gate(tenant: str) -> Gate:
    """Returns the gate of a worker's agent: it admits workers of its own tenant, and GetCard calls of coordinators."""

    def admit(method: str, names: Sequence[str], token: str) -> Caller:
        if method == _COORDINATORS_CALL and COORDINATOR in names:
            return Caller(EVERY_TENANT, Role.OBSERVER)
        if tenants_in(names) != [tenant]:
            raise RefusedError(
                Reason.DENIED,
                f"this worker belongs to tenant {tenant!r} and answers only certificates with the DNS name "
                f"{tenant_name(tenant)}; yours has {listed(names)}",
            )
        return Caller(tenant)

    return admit
