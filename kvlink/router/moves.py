# SPDX-License-Identifier: Apache-2.0
"""Prepares the move of one answer away from a server that drains, while that server decodes on."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from kvlink.router.answering import Asked
from kvlink.router.copying import can_continue_here, copy_ahead
from kvlink.router.counts import Counts
from kvlink.router.retries import NotServed
from kvlink.router.streamed_answer import StreamedAnswer
from kvlink.router.upstream import Upstream
from kvlink.runtime.supervised import start_loop

_log = logging.getLogger("kvlink.router")

_AGAIN_S = 5.0
"""The wait after a copy that failed."""
CHECK_S = 3.0
"""The longest wait for what a server is asked before it continues."""
_MOST_CHECKS = 8
"""The events after which the target is asked in vain before the answer stays."""


class Move:
    """The move of an answer from `source`. While it is entered, it waits for a drain, and copies the cache then."""

    def __init__(
        self, servers: Upstream, source: str, answer: StreamedAnswer, asked: Asked, counts: Counts
    ) -> None:
        self.target = ""
        """The server that has copied the cache, or "" for none."""
        self.request_id = asked.request_id
        self._servers = servers
        self._source = source
        self._answer = answer
        self._headers = asked.named("copy").headers
        self._counts = counts
        self._checks_left = _MOST_CHECKS

    async def __aenter__(self) -> Move:
        self._preparing = start_loop("router move", self._prepare)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._preparing.cancel()
        await asyncio.gather(self._preparing, return_exceptions=True)

    async def can_begin(self) -> bool:
        """Returns whether the target can continue after the last event. It may be asked for what is not known."""
        if not self._servers.ring.draining(self._source):
            self._begin_again()
            return False
        try:
            checking = can_continue_here(self._servers, self.target, self._answer, self._headers)
            can = await asyncio.wait_for(checking, CHECK_S)
        except (NotServed, asyncio.TimeoutError):
            self._begin_again()
            return False
        self._checks_left -= not can
        if not self._checks_left:
            self.target = ""
            self._counts["not_moved"] += 1
        return can

    def _begin_again(self) -> None:
        self.target = ""
        self._preparing = start_loop("router move", partial(self._prepare, _AGAIN_S))

    async def _prepare(self, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        is_counted = False
        while not self.target:
            await self._servers.leaves(self._source)
            if await self._copied():
                return
            self._counts["not_moved"] += not is_counted
            is_counted = True
            await asyncio.sleep(_AGAIN_S)

    async def _copied(self) -> bool:
        target = self._servers.ring.choose(time.monotonic(), [self._source])
        if target is None or not self._answer.can_be_continued:
            return False
        try:
            copied = await copy_ahead(self._servers, self._source, target, self._answer, self._headers)
        except NotServed as error:
            _log.warning(
                "an answer stays request=%s server=%s error=%s", self.request_id, self._source, error
            )
            return False
        self.target = target if copied else ""
        return copied
