# SPDX-License-Identifier: Apache-2.0
"""Defines the DNS names by which certificates state a role or a tenant, beside names and addresses of the host.

Clients can only check DNS names (and addresses) of a server, so roles and tenants are DNS names too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvlink.errors import ConfigError

COORDINATOR = "coordinator.kvlink.internal"
"""Every coordinator's certificate has this DNS name, and no other certificate has it."""
_OF_TENANT = ".tenant.kvlink.internal"
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def tenant_name(tenant: str) -> str:
    """Returns the DNS name in the certificates of a tenant's workers. Raises ConfigError if it is not a DNS label."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is not a valid tenant: use 1 to 63 of a-z, 0-9 and -, without - at either end"
        )
    return tenant + _OF_TENANT


def tenants_in(names: Iterable[str]) -> list[str]:
    """Returns the tenants that the names in a certificate state."""
    stated = [name.removesuffix(_OF_TENANT) for name in names if name.endswith(_OF_TENANT)]
    return [tenant for tenant in dict.fromkeys(stated) if _TENANT.fullmatch(tenant)]


def listed(names: Iterable[str]) -> str:
    """Joins and shortens the names in a certificate for an error text."""
    shown = [name[:80] for name in names]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "") or "no name"
