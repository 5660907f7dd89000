# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between the router and the roles: one JSON object per message, one reply to each.

They stand in for the HTTP API of an inference server. A ticket crosses as text; block data never does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

Reply = dict[str, Any]


class Role(Protocol):
    """One part of the demo, hosted by a child process."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Returns the commands by name. Keyword arguments and replies are JSON values."""

    def close(self) -> None:
        """Closes the role. Idempotent."""


def until_none(count: Callable[[], Reply], timeout_s: float) -> Reply:
    """Calls `count` until all of its numbers are 0, or the time has passed. Returns what it returned last."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = count()
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.001)


def send(pipe: Connection, message: Reply) -> None:
    """Sends a message. Raises OSError if the other end is gone."""
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Connection) -> Reply:
    """Returns the next message. Raises EOFError or OSError if the other end is gone."""
    message: Reply = json.loads(pipe.recv_bytes())
    return message
