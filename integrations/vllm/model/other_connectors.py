# SPDX-License-Identifier: Apache-2.0
"""Checks the other connectors of vLLM's MultiConnector: one of them hands requests off, the others store or offload.

MultiConnector gives every connector the handshake of the first that has one, raises in the engine's process when two
answer a handoff with the same parameters, and lets one of them load. So two of them cannot serve one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvlink.errors import ConfigError

_HANDING_OFF = ("Nixl", "MooncakeConnector", "MoRIIO", "KVLink")
"""How the names of the classes begin that answer `do_remote_decode`, as this connector does."""


def check_others(own: object, top: Any) -> None:
    """Raises ConfigError if another connector under `top`, the server's connector, hands requests off as `own` does."""
    for one in _under(top):
        name = type(one).__name__
        if one is not own and name.startswith(_HANDING_OFF):
            raise ConfigError(
                f"MultiConnector has KVLinkConnector and {name}, and both hand requests off: vLLM passes the handshake "
                "of one to both, and refuses two answers to one request. Keep one of them; for a fleet that changes "
                "over, run the servers of each kind behind routers of their own"
            )


def _under(connector: Any) -> Iterator[Any]:
    """Yields the connector, or those that it consists of."""
    parts = getattr(connector, "sub_connectors", None)
    if parts is None:
        yield connector
        return
    for part in parts:
        yield from _under(part)
