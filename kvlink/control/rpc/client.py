# SPDX-License-Identifier: Apache-2.0
"""Implements what the clients of coordinators and of worker agents have in common."""

from __future__ import annotations

from typing import TypeVar

from kvlink.control.rpc.channel import Channel

_C = TypeVar("_C", bound="Client")


class Client:
    """Calls one server, or one of several equal ones, with a default timeout. Belongs to one event loop."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel = channel
        self._timeout_s = timeout_s

    @property
    def address(self) -> str:
        """Returns the host:port of the server, or several separated by commas."""
        return self._channel.address

    @property
    def next_address(self) -> str:
        """Returns the one of the addresses that the next call goes to."""
        return self._channel.next_address

    @property
    def has_replicas(self) -> bool:
        """Returns whether there are several addresses."""
        return self._channel.has_replicas

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._channel!r})"

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        await self._channel.close()

    async def __aenter__(self: _C) -> _C:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
