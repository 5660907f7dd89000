# SPDX-License-Identifier: Apache-2.0
"""Checks arguments before a command computes or starts anything. Every check raises ConfigError with one sentence."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvlink.config.addresses import joined, one_host, shown
from kvlink.errors import ConfigError


def listed(given: Iterable[str]) -> list[str]:
    """Returns the values of an option that may be repeated, and that also takes several values with commas."""
    return list(dict.fromkeys(value.strip() for each in given for value in each.split(",")))


def named_hosts(given: Iterable[str], option: str) -> list[str]:
    """Returns the hosts of a list. The first label of a name may be `*`."""
    return [
        f"*.{one_host(host[2:], option)}" if host.startswith("*.") else one_host(host, option)
        for host in listed(given)
    ]


def can_listen(host: str, port: int, host_option: str, port_option: str) -> str:
    """Returns the host, on which nothing listens at this port yet. Port 0 takes any free one."""
    host = one_host(host, host_option)
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {joined(host, port)}: {error.strerror}; choose another {host_option} or {port_option}"
        ) from None
    return host


def base_urls(given: Iterable[str], option: str) -> list[str]:
    """Returns the base URLs of servers without `/v1`, each once."""
    found = []
    for url in listed(given):
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.port != 0 and "@" not in parts.netloc
            one_host(parts.hostname or "", option)
        except (ValueError, ConfigError):
            good = False
        if not good or parts.query or parts.fragment:
            text = "a value" if "@" in url else shown(url)  # it may hold a password
            raise ConfigError(
                f"{option}: {text} is not a base URL of a server; write http://host:port, without a user name"
            )
        found.append(url.rstrip("/").removesuffix("/v1"))
    return list(dict.fromkeys(found))


Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
ReadyJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON line with the addresses when ready, and nothing else.")
]


def print_ready(as_json: bool, text: str, **addresses: str | None) -> None:
    """Prints `text`, or `addresses` as one JSON object. It is flushed at once, because programs wait for this line."""
    print(json.dumps(addresses) if as_json else text, flush=True)


TRANSPORTS = ("loopback", "shm", "cma", "cuda", "verbs", "tcp", "fabric")


def transport_names(incomplete: str) -> list[str]:
    """Returns what may follow the names that are written already, which commas separate."""
    before, comma, _ = incomplete.rpartition(",")
    written = before.split(",")
    names = TRANSPORTS if comma else ("all", *TRANSPORTS)
    return [f"{before}{comma}{name}" for name in names if name not in written]
