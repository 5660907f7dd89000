# SPDX-License-Identifier: Apache-2.0
"""What the router and the roles say to each other: one JSON object a message, one reply to each.

Stands in for the HTTP API of an inference server. A ticket crosses as text; block data never does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

Reply = dict[str, Any]


class Role(Protocol):
    """One part of the demo, hosted by a child process."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Name to what it does; keyword arguments and the reply are JSON values."""

    def close(self) -> None:
        """Idempotent."""


def send(pipe: Connection, message: Reply) -> None:
    """Raises OSError when the other end is gone."""
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Connection) -> Reply:
    """Raises EOFError or OSError when the other end is gone."""
    message: Reply = json.loads(pipe.recv_bytes())
    return message
