# SPDX-License-Identifier: Apache-2.0
"""What stays of a native engine when it is closed: what it counted, and none of its descriptors."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from kvlink import _core
from kvlink.errors import ConfigError, TransportUnavailable


def closed(core: _core.Engine) -> _core.Engine:
    """Closes `core`, and returns what answers in its place: as a closed one does. Let go of `core` then."""
    core.close()
    return core if isinstance(core, _ClosedCore) else cast(_core.Engine, _ClosedCore(core))


class _ClosedCore:
    """No lease lives any more, and nobody is admitted."""

    def __init__(self, core: _core.Engine) -> None:
        self._counts, self._access = core.lease_counts(), core.access()
        self._ended = core.take_ended()

    def close(self) -> None: ...

    def lease_counts(self) -> Any:
        return self._counts

    def access(self) -> Any:
        return self._access

    def take_ended(self) -> Any:
        ended, self._ended = self._ended, []
        return ended

    def ports(self) -> list[Any]:
        return []

    def watch(self, queue: _core.CompletionQueue) -> None:
        """Nothing comes any more."""

    watch_ended = watch_ports = watch

    def refuse_lease(self, *_: object) -> bool:
        """It has ended."""
        return False

    abort = extend = set_ttl = set_ready = settle_own = renew = refuse_lease

    def grant(self, *_: object) -> NoReturn:
        raise ConfigError("this worker is closed")

    grant_at = grant

    def accept(self, transport: str, *_: object) -> NoReturn:
        raise TransportUnavailable(f"this worker is closed and does not use {transport}")

    open = accept
