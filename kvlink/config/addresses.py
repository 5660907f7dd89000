# SPDX-License-Identifier: Apache-2.0
"""Parses and classifies hosts and addresses: brackets, loopback, wildcards. Only `numeric` asks a name server."""

from __future__ import annotations

import ipaddress
import re
import socket

from kvlink.errors import ConfigError

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_LABEL = r"(?!-)[\w-]{1,63}(?<!-)"
_LABELS = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.ASCII)
_NUMBERS = re.compile(r"[\d.]+")
"""An address that is none, such as 256.1.1.1."""
_MOST_NAME, _MOST_SHOWN = 253, 80
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def plain_host(host: str) -> str:
    """Returns `host` without surrounding blanks and without the brackets that an IPv6 address has before a port."""
    host = host.strip()
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def can_be_dialled(host: str) -> bool:
    """Returns whether `host` is a name or an address of one host, and not for example host:port."""
    return not is_wildcard(host) and (_ip(host) is not None or _NAME.fullmatch(host) is not None)


def one_host(given: str, option: str) -> str:
    """Returns the name or address of one host without brackets. Raises ConfigError that says what else `given` is."""
    host = plain_host(given)
    if _ip(host) is not None or (
        _LABELS.fullmatch(host) and len(host) <= _MOST_NAME and not _NUMBERS.fullmatch(host)
    ):
        return host
    if not host:
        wrong = "is empty; write a host name or an IP address"
    elif "," in host:
        wrong = "names several hosts; write one"
    elif "://" in host:
        wrong = "is a URL; write only its host"
    elif re.fullmatch(r"[^:]+:\d*|\[.*\]:\d*", given.strip()):
        wrong = "has a port; write only the host"
    else:
        wrong = "is neither a host name nor an IP address"
    raise ConfigError(f"{option} {shown(given)} {wrong}")


def shown(given: str) -> str:
    """Returns text from outside for an error: quoted, and cut if it is long."""
    return repr(given if len(given) <= _MOST_SHOWN else f"{given[:_MOST_SHOWN]}…")


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address. The only name that counts as loopback is localhost."""
    address = _ip(host)
    return plain_host(host).lower() == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Returns whether `host` stands for every address of a host, which a process can listen on but no peer can dial."""
    address = _ip(host)
    return not plain_host(host) if address is None else address.is_unspecified


def numeric(host: str, setting: str, listens: str) -> str:
    """Asks the name server for the first address of `host`, of the family of the address `listens` if it has one.

    Raises ConfigError, which names the setting.
    """
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ConfigError(f"{setting}={host}: {error.strerror or error}; set an address") from None
    family = getattr(_ip(listens), "version", None)
    return next((each for each in found if getattr(_ip(each), "version", None) == family), found[0])


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port, with brackets around an IPv6 host. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not host:port; write for example 10.0.0.1:7400")
    return plain_host(host), int(port)


def joined(host: str, port: int) -> str:
    """Joins a host and a port into an address. This is the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip(host: str) -> _Ip | None:
    """Returns None for a name. An IPv4 address that is written as IPv6 (::ffff:…) becomes the IPv4 address."""
    try:
        address = ipaddress.ip_address(plain_host(host).partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
