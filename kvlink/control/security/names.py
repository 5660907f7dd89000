# SPDX-License-Identifier: Apache-2.0
"""What certificates say: DNS names for who somebody is, beside the names and addresses of the host.

Clients can only check DNS names (and addresses) of a server, so roles and tenants are DNS names, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvlink.errors import ConfigError

COORDINATOR = "coordinator.kvlink.internal"
"""In the certificate of every coordinator, and of nobody else."""
_OF_TENANT = ".tenant.kvlink.internal"
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def tenant_name(tenant: str) -> str:
    """The DNS name in the certificate of a tenant's workers. Raises ConfigError for what is no label of DNS."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} cannot be a tenant: write 1 to 63 of a-z, 0-9 and -, with no - at either end"
        )
    return tenant + _OF_TENANT


def tenants_in(names: Iterable[str]) -> list[str]:
    """The tenants that a certificate's names say."""
    said = [name.removesuffix(_OF_TENANT) for name in names if name.endswith(_OF_TENANT)]
    return [tenant for tenant in dict.fromkeys(said) if _TENANT.fullmatch(tenant)]


def listed(names: Iterable[str]) -> str:
    """A certificate's names, fit for a sentence."""
    shown = [name[:80] for name in names]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "") or "no name"
