# SPDX-License-Identifier: Apache-2.0
"""Determines the address that peers use for this worker, and explains addresses that other hosts cannot reach."""

from __future__ import annotations

from kvlink.config import WorkerConfig
from kvlink.config.addresses import is_loopback, is_wildcard, split_address
from kvlink.errors import ConfigError

_FIX = "set KVLINK_HOST to an address of this host that peers reach (ip -brief address)"
_BEHIND_NAT = "; set KVLINK_ADVERTISE too if peers connect to another address"


def advertised_host(config: WorkerConfig) -> str:
    """Returns the host that peers connect to. Raises ConfigError if that is a wildcard address."""
    if not config.advertise and is_wildcard(config.host):
        raise ConfigError(
            f"KVLINK_HOST={config.host} means every address of this host, and peers connect to one: set "
            "KVLINK_ADVERTISE to the address that they reach, or KVLINK_HOST to one of this host (ip -brief address)"
        )
    return config.advertise or config.host


def loopback_problem(config: WorkerConfig) -> tuple[str, str]:
    """Returns why workers on other hosts cannot reach this one, and the fix. Both are empty if there is no problem.

    A coordinator that is not on loopback is assumed to serve several hosts.
    """
    host = config.advertise or config.host
    if not is_loopback(host):
        return "", ""
    addresses = (address.strip() for address in config.coordinator.split(",") if address.strip())
    elsewhere = [address for address in addresses if not is_loopback(split_address(address)[0])]
    if not elsewhere:
        return "", ""
    name = "KVLINK_ADVERTISE" if config.advertise else "KVLINK_HOST"
    reason = f"{name}={host} is loopback: peers on other hosts of coordinator {elsewhere[0]} cannot reach this worker"
    return reason, _FIX + _BEHIND_NAT


def loopback_hint(agent: str) -> str:
    """Returns a hint for errors about an agent at "host:port", which may be on another host, or ""."""
    host = agent.rpartition(":")[0]
    if not is_loopback(host):
        return ""
    return f". {host} is loopback: if that worker runs on another host, set its KVLINK_HOST to one of its addresses"
