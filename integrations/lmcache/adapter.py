# SPDX-License-Identifier: Apache-2.0
"""Lets LMCache's adapter of a peer pass the key of each object that it reads, and its own timeout, to kvlink's channel.

LMCache's channel interface has the places of objects only. Its adapter knows their keys, so `pass_keys` has it replace
the addresses of a read by `ObjectAddress`es, which other channels take as their base class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lmcache.v1.distributed.l2_adapters.p2p_l2_adapter import P2PL2Adapter
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress

from kvlink.errors import ConfigError

from .l1 import check_parameters

_DONE = "_kvlink_passes_keys"


@dataclass(frozen=True)
class ObjectAddress(TransferChannelAddress):  # type: ignore[misc]
    """The place of an object at the peer, and LMCache's key of it."""

    key: Any = None


@runtime_checkable
class TakesKeys(Protocol):
    """A client of kvlink's channel."""

    def expect_load_timeout(self, load_timeout_s: float) -> None:
        """Is told after how many seconds LMCache gives up on a read."""


def pass_keys() -> None:
    """Changes LMCache's P2PL2Adapter. Idempotent. Raises ConfigError if this LMCache's has other parts."""
    load = P2PL2Adapter.submit_load_task
    if hasattr(load, _DONE):
        return
    check_parameters(P2PL2Adapter, "submit_load_task", ["self", "keys", "objects"])
    used = {"_remote_addresses", "_tc_client", "_config", "load_timeout_s", "submit_read"}
    if missing := used.difference(load.__code__.co_names):
        raise ConfigError(
            f"this version of LMCache is not one that kvlink knows: P2PL2Adapter.submit_load_task has no "
            f"{', '.join(sorted(missing))}; install LMCache 0.5.6, or another version of kvlink"
        )

    @functools.wraps(load)
    def submit_load_task(self: Any, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        if isinstance(self._tc_client, TakesKeys):
            self._tc_client.expect_load_timeout(self._config.load_timeout_s)
            for key in keys:
                if (address := self._remote_addresses.get(key)) is not None:
                    self._remote_addresses[key] = ObjectAddress(address.offset, address.size, key)
        return load(self, keys, objects)

    setattr(submit_load_task, _DONE, True)
    P2PL2Adapter.submit_load_task = submit_load_task
