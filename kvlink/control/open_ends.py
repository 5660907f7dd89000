# SPDX-License-Identifier: Apache-2.0
"""The gRPC objects that are open on each event loop. gRPC complains about those that outlive theirs."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import Protocol


class OpenEnd(Protocol):
    """A channel or a server."""

    async def close_now(self) -> None:
        """Idempotent."""


_open: weakref.WeakValueDictionary[tuple[int, int], OpenEnd] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def opened(end: OpenEnd) -> None:
    """Notes an object of the running event loop."""
    _open[id(asyncio.get_running_loop()), next(_numbers)] = end


async def close_all() -> None:
    """Closes what is still open on the running event loop, last opened first."""
    here = id(asyncio.get_running_loop())
    for key in sorted((key for key in list(_open) if key[0] == here), reverse=True):
        end = _open.pop(key, None)
        if end is not None:
            await end.close_now()
