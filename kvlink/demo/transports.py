# SPDX-License-Identifier: Apache-2.0
"""Chooses the transports to try, and says why some cannot work on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.errors import ConfigError
from kvlink.transfer.engine import host_transports, transports_here
from kvlink.transfer.transport_names import select

_TO_GPUS = ("cuda", "verbs", "tcp")  # the others cannot register GPU memory


def choose(names: Sequence[str] | None, device: str = "cpu") -> list[str]:
    """Returns the transports to try. None chooses all that can work here.

    Raises ConfigError for an unknown one, and for one that cannot work here.
    """
    everywhere = transports_here()
    why_not = host_transports() if device == "cpu" else {name: everywhere[name] for name in _TO_GPUS}
    if names is None:
        return [name for name, reason in why_not.items() if not reason]
    chosen = select(",".join(names), list(why_not))
    for name in chosen:
        if reason := why_not[name.removeprefix("fault+")]:
            raise ConfigError(f"--transport {name} cannot work here: {reason}")
    return list(chosen)


def absent_here(device: str = "cpu") -> dict[str, str]:
    """Returns the transports that this machine cannot use, with the reasons."""
    everywhere = transports_here() if device != "cpu" else host_transports()
    return {name: reason for name, reason in everywhere.items() if reason}
