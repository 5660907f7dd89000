# SPDX-License-Identifier: Apache-2.0
"""Lets LMCache's servers read from each other through kvlink: `--p2p-transfer-engine kvlink`.

docs/servers/lmcache.md describes how to use it. LMCache loads no transfer channels from other packages, so its
commands run as `python -m kvlink.integrations.lmcache`, which calls `register` first.

- `channel`: LMCache's classes for a transfer channel
- `l1`, `adapter`: the parts of LMCache that its interface for channels leaves out: objects, and when they are freed
- `grants`: the owner's side, which leases the objects that a reader asks for
- `reads`: the reader's side, which asks and pulls
- `places`: the pages that leases and reads use, until LMCache frees them
- `messages`, `frames`, `sockets`: the messages between the two sides, and how they are carried
- `pages`, `times`: LMCache's memory as a kvlink pool, and its time for a read
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.config import P2PConfig

    from .channel import KVLinkTransferChannelContext

__all__ = ["KVLinkTransferChannelContext", "register"]

_NAME = "kvlink"


def __getattr__(name: str) -> Any:
    """Imports the channel on demand. Its module needs LMCache, this one does not."""
    if name == "KVLinkTransferChannelContext":
        from .channel import KVLinkTransferChannelContext

        return KVLinkTransferChannelContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(p2p: P2PConfig | None = None) -> None:
    """Registers the channel with LMCache. It may be called again, before LMCache makes the channel.

    p2p: LMCache's settings of a server in this process. Reads end before its `load_timeout`, and the server does not
    start without the L1Manager of its memory. Raises ConfigError if this version of LMCache has other parts than kvlink
    takes for granted, or if KVLINK_TIMEOUT_S is too long.
    """
    from functools import partial

    from lmcache.v1.distributed.transfer_channel import factory

    from .adapter import pass_keys
    from .channel import check_times, create_context

    pass_keys()
    if p2p is not None:
        check_times(p2p)
    known = factory._TRANSFER_CHANNEL_FACTORY_REGISTRY
    if p2p is not None:
        known[_NAME] = partial(create_context, p2p=p2p)
    else:
        known.setdefault(_NAME, create_context)
