# SPDX-License-Identifier: Apache-2.0
"""Speaks to a router on this host by its control socket."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvlink.errors import ConfigError, KVLinkError
from kvlink.router.control_socket import is_own, socket_name

_PATIENCE_S = 10.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, port: int) -> None:
        super().__init__("router", timeout=_PATIENCE_S)
        self._name = socket_name(port)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_PATIENCE_S)
        self.sock.connect(self._name)
        if not is_own(self.sock):
            raise KVLinkError("another user's process has the name of the router's control socket")


@contextmanager
def asking(port: int) -> Iterator[Callable[[str, str], list[dict[str, Any]]]]:
    """Yields a function that sends "drain", "force", "resume" or "servers", and a server, and returns all servers.

    Raises ConfigError if no router listens on `port`, and for what the router refuses.
    """
    connection = _Connection(port)

    def ask(command: str, server: str) -> list[dict[str, Any]]:
        body = json.dumps({"server": server}) if server else None
        try:
            connection.request("POST" if server else "GET", f"/{command}", body)
            answer = connection.getresponse()
            found = json.loads(answer.read())
        except OSError as error:
            raise ConfigError(
                f"no router of this host answers for port {port} ({error.strerror or error}); give its port by --router"
            ) from error
        if answer.status != 200:
            raise ConfigError(found["error"])
        rows: list[dict[str, Any]] = found
        return rows

    try:
        yield ask
    finally:
        connection.close()
