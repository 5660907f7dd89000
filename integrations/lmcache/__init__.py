# SPDX-License-Identifier: Apache-2.0
"""Lets LMCache's servers read from each other through kvlink: `--p2p-transfer-engine kvlink`.

docs/servers/lmcache.md describes how to use it. LMCache loads no transfer channels from other packages, so its
commands run as `python -m kvlink.integrations.lmcache`, which calls `register` first.

- `channel`: LMCache's classes for a transfer channel, and its ZMQ sockets
- `grants`: the owner's side, which offers the pages that a reader asks for
- `reads`: the reader's side, which asks and pulls
- `messages`: the messages between the two sides
- `pages`: LMCache's memory as a kvlink pool
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .channel import KVLinkTransferChannelContext

__all__ = ["KVLinkTransferChannelContext", "register"]

_NAME = "kvlink"


def __getattr__(name: str) -> Any:
    """Imports the channel on demand. Its module needs LMCache, this one does not."""
    if name == "KVLinkTransferChannelContext":
        from .channel import KVLinkTransferChannelContext

        return KVLinkTransferChannelContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Registers the channel with LMCache. It may be called twice."""
    from lmcache.v1.distributed.transfer_channel import factory

    from .channel import create_context

    if _NAME not in factory._TRANSFER_CHANNEL_FACTORY_REGISTRY:
        factory.register_transfer_channel_factory(_NAME, create_context)
