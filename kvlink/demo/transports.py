# SPDX-License-Identifier: Apache-2.0
"""Chooses the transports to try, and says why some cannot work on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.transfer.engine import host_transports, transports_here
from kvlink.transfer.transport_names import select

_TO_GPUS = ("cuda", "verbs", "tcp")  # the others cannot register GPU memory


def choose(names: Sequence[str] | None, device: str = "cpu") -> dict[str, str]:
    """Returns, per transport, why it cannot work here, or "". None chooses all that can. Raises ConfigError."""
    everywhere = transports_here()
    why_not = host_transports() if device == "cpu" else {name: everywhere[name] for name in _TO_GPUS}
    if names is None:
        return {name: "" for name, reason in why_not.items() if not reason}
    chosen = select(",".join(names), list(why_not))
    return {name: why_not[name.removeprefix("fault+")] for name in chosen}


def absent_here(device: str = "cpu") -> dict[str, str]:
    """Returns the transports that this machine cannot use, with the reasons."""
    everywhere = transports_here() if device != "cpu" else host_transports()
    return {name: reason for name, reason in everywhere.items() if reason}
