# SPDX-License-Identifier: Apache-2.0
"""Who calls, and what they may: decided from a certificate's names and a token, before any handler runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import NamedTuple

from kvlink.control.refusal import Reason, Refused
from kvlink.control.security.names import COORDINATOR, listed, tenant_name, tenants_in

EVERY_TENANT = "*"


class Role(Enum):
    """What somebody may do within a tenant."""

    WORKER = "worker"
    """Everything."""
    OBSERVER = "observer"
    """See counts and who is joined; no keys, no tickets."""


class Caller(NamedTuple):
    """Whoever makes a call. Without TLS everybody is the same worker."""

    tenant: str = ""
    role: Role = Role.WORKER

    @property
    def sees_all(self) -> bool:
        """Of no one tenant: an observer of all, this process itself, or anybody where nobody is known."""
        return self.tenant in ("", EVERY_TENANT)


Gate = Callable[[str, Sequence[str], str], Caller]
"""(method, names in the certificate, token or "") -> who calls. Raises Refused (DENIED)."""

_ANYBODY = Caller()
_caller: ContextVar[Caller] = ContextVar("kvlink_caller")
_COORDINATORS_CALL = "GetCard"
_OBSERVERS_CALL = frozenset({"Status", "Overview", "ListWorkers", "GetWorker"})


def caller() -> Caller:
    """Of the call that is being answered."""
    return _caller.get(_ANYBODY)


def answering(who: Caller) -> None:
    """Notes the caller, for the running task and those that it starts."""
    _caller.set(who)


def by_certificate(names: Sequence[str]) -> Caller:
    """Who a certificate says that its holder is. Raises Refused (DENIED)."""
    tenants = tenants_in(names)
    if len(tenants) == 1:
        return Caller(tenants[0])
    if COORDINATOR in names:
        return Caller(EVERY_TENANT, Role.OBSERVER)
    raise Refused(
        Reason.DENIED,
        f"your certificate ({listed(names)}) names {len(tenants)} tenants, not one: make it with the DNS name "
        f"{tenant_name('tenant')} of its tenant (for development: `kvlink certs worker --tenant NAME`), or "
        "have the coordinator's --tenants file map it",
    )


def check_right(who: Caller, method: str) -> None:
    """Raises Refused (DENIED) when this role may not make the call."""
    if who.role is Role.OBSERVER and method not in _OBSERVERS_CALL:
        raise Refused(Reason.DENIED, f"you are an observer here and may not call {method}; workers may")


def coordinator_gate(method: str, names: Sequence[str], token: str) -> Caller:
    """A coordinator's without a tenants file: certificates say who is who."""
    if token:
        raise Refused(Reason.DENIED, "tokens mean nothing here: start the coordinator with --tenants FILE")
    who = by_certificate(names)
    check_right(who, method)
    return who


def agent_gate(tenant: str) -> Gate:
    """A worker's agent answers workers of its own tenant, and tells coordinators that it runs."""

    def admit(method: str, names: Sequence[str], token: str) -> Caller:
        if method == _COORDINATORS_CALL and COORDINATOR in names:
            return Caller(EVERY_TENANT, Role.OBSERVER)
        if tenants_in(names) != [tenant]:
            raise Refused(
                Reason.DENIED,
                f"this worker belongs to tenant {tenant!r} and answers certificates with the DNS name "
                f"{tenant_name(tenant)} alone; yours has {listed(names)}",
            )
        return Caller(tenant)

    return admit
