# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end: mutual TLS by files that may change, tenants, and what each caller may do."""

from kvlink.control.security.callers import (
    EVERY_TENANT,
    Caller,
    Gate,
    Role,
    agent_gate,
    answering,
    caller,
    coordinator_gate,
)
from kvlink.control.security.keys import Keyring, TlsFiles
from kvlink.control.security.names import COORDINATOR, tenant_name
from kvlink.control.security.policy import Security, Trust
from kvlink.control.security.tenants import TenantsFile

__all__ = [
    "COORDINATOR",
    "EVERY_TENANT",
    "Caller",
    "Gate",
    "Keyring",
    "Role",
    "Security",
    "TenantsFile",
    "TlsFiles",
    "Trust",
    "agent_gate",
    "answering",
    "caller",
    "coordinator_gate",
    "tenant_name",
]
