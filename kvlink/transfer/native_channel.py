# SPDX-License-Identifier: Apache-2.0
"""Opens the native channel of one worker when it is first needed: by which it admits readers, and dials owners."""

from __future__ import annotations

import threading

from kvlink import _core
from kvlink.types import NativeChannel

ChannelClient = _core.ChannelClient


class OwnChannel:
    """The channel of one engine. Any thread may call any method."""

    def __init__(self) -> None:
        self._channel: _core.Channel | None = None
        self._lock = threading.Lock()

    def listen(self, core: _core.Engine, host: str, port: int, advertise: str) -> NativeChannel:
        """Listens for readers of the engine, which are refused until `publish`. Raises ConfigError."""
        addresses, instance, secret = self._opened().listen(core, host, port, advertise)
        return NativeChannel(tuple(addresses), instance, secret)

    def publish(self, card: bytes) -> None:
        """Sets the sealed card of the worker, and admits readers from now on."""
        self._opened().publish(card)

    def dial(self, to: NativeChannel, timeout_s: float) -> ChannelClient:
        """Connects to an owner, for at most `timeout_s`. Raises KVLinkError."""
        return self._opened().dial(list(to.addresses), to.instance, to.secret, to.flags, timeout_s)

    def close(self) -> None:
        """Ends all clients and admits nobody any more. On return the engine is not called. Idempotent."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _opened(self) -> _core.Channel:
        with self._lock:
            if self._channel is None:
                self._channel = _core.Channel()
            return self._channel
