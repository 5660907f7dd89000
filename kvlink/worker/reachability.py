# SPDX-License-Identifier: Apache-2.0
"""Where peers are told that this worker is, and what to do when that leads nowhere."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import replace

from kvlink.addresses import is_loopback, is_wildcard, split_address
from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.types import TransportCard

_FIX = "set KVLINK_HOST to an address of this host that peers reach (ip -brief address)"
_BEHIND = "; KVLINK_ADVERTISE too where peers dial another one"
_COUNT = struct.Struct("<I")


def advertised_host(config: WorkerConfig) -> str:
    """What peers dial. Raises ConfigError for a KVLINK_HOST that is no one address."""
    if is_wildcard(config.host):
        raise ConfigError(
            f"KVLINK_HOST={config.host} means every address of this host, and workers listen on one: {_FIX}{_BEHIND}"
        )
    return config.advertise or config.host


def only_this_host(config: WorkerConfig) -> tuple[str, str]:
    """Why workers on other hosts cannot come here although they are expected to, and the fix; empty: nothing is wrong.

    A coordinator that is not on loopback is taken to serve several hosts.
    """
    host = config.advertise or config.host
    if not is_loopback(host):
        return "", ""
    addresses = (address.strip() for address in config.coordinator.split(",") if address.strip())
    elsewhere = [address for address in addresses if not is_loopback(split_address(address)[0])]
    if not elsewhere:
        return "", ""
    name = "KVLINK_ADVERTISE" if config.advertise else "KVLINK_HOST"
    reason = f"{name}={host} is loopback: peers on other hosts of coordinator {elsewhere[0]} cannot come here"
    return reason, _FIX + _BEHIND


def hint_for(agent: str) -> str:
    """To be added to an error about the agent at "host:port" of a worker that may be on another host."""
    host = agent.rpartition(":")[0]
    if not is_loopback(host):
        return ""
    return f". {host} is loopback: if that worker runs on another host, set its KVLINK_HOST to one of its addresses"


def at_advertised(cards: Iterable[TransportCard], config: WorkerConfig) -> tuple[TransportCard, ...]:
    """The cards with the address that peers dial in those of tcp. Raises ConfigError when its name has no address."""
    if not config.advertise:
        return tuple(cards)
    host = _number_of(config.advertise).encode()
    return tuple(
        replace(card, address=_readdressed(card.address, host))
        if card.address and card.name.removeprefix("fault+") == "tcp"
        else card
        for card in cards
    )


def _number_of(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"KVLINK_ADVERTISE={host}: {error.strerror or error}; write an address") from None
    return str(found[0][4][0])


def _readdressed(address: bytes, host: bytes) -> bytes:
    """Of tcp: the host with its length before it, then port and instance."""
    (length,) = _COUNT.unpack_from(address)
    return _COUNT.pack(len(host)) + host + address[_COUNT.size + length :]
