# SPDX-License-Identifier: Apache-2.0
"""Authenticates peers with mutual TLS from reloadable files, maps them to tenants, and checks what they may do."""

from kvlink.control.security.callers import (
    EVERY_TENANT,
    MEMBER,
    Caller,
    Gate,
    Role,
    agent_gate,
    caller,
    coordinator_gate,
    incarnation_of,
    is_caller,
    set_caller,
)
from kvlink.control.security.keys import COORDINATOR, Keyring, TlsFiles, tenant_name
from kvlink.control.security.policy import Security, Trust
from kvlink.control.security.tenants import TenantsFile

__all__ = [
    "COORDINATOR",
    "EVERY_TENANT",
    "MEMBER",
    "Caller",
    "Gate",
    "Keyring",
    "Role",
    "Security",
    "TenantsFile",
    "TlsFiles",
    "Trust",
    "agent_gate",
    "caller",
    "coordinator_gate",
    "incarnation_of",
    "is_caller",
    "set_caller",
    "tenant_name",
]
