# SPDX-License-Identifier: Apache-2.0
"""Prepares the move of one answer away from a server that drains, while that server decodes on.

That server is asked for a handoff of the tokens so far, as prefill is. It has their blocks in its prefix cache. The
other server pulls them, and keeps them in its own cache for the request that follows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from kvlink.runtime.supervised import start_loop

from .bodies import Body, decode_body, handoff_of, object_in, prefill_body
from .counts import Counts
from .retries import Answer, NotServedError
from .streamed_answer import StreamedAnswer
from .upstream import Sent, Upstream, ended

_log = logging.getLogger("kvlink.integrations.router")

_AGAIN_S = 5.0
"""The wait after a copy that failed."""
CHECK_S = 3.0
"""The longest wait for what a server is asked before it continues."""
_MOST_CHECKS = 8
"""The events after which the target is asked in vain before the answer stays."""
_MOST_COPIES = 3
_FEW_TOKENS = 256
"""The tokens that come during a copy and are computed again instead of copied, which takes about one step."""
_MOST_OF_A_CHARACTER = 4
"""The tokens that may be left out at the end: those of an incomplete character, which has at most four bytes."""


class Move:
    """The move of an answer from `source`. While it is entered, it waits for a drain, and copies the cache then."""

    def __init__(
        self, servers: Upstream, source: str, answer: StreamedAnswer, asked: Sent, counts: Counts
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
        await ended(self._preparing)

    async def can_begin(self) -> bool:
        """Returns whether the target can continue after the last event. It may be asked for what is not known."""
        can: bool | None = None
        if self._servers.ring.draining(self._source):
            checking = can_continue_here(self._servers, self.target, self._answer, self._headers)
            with suppress(NotServedError, asyncio.TimeoutError):
                can = await asyncio.wait_for(checking, CHECK_S)
        if can is None:
            self.target = ""
            self._preparing = start_loop("router move", partial(self._prepare, _AGAIN_S))
            return False
        self._checks_left -= not can
        if not self._checks_left:
            self.target = ""
            self._counts["not_moved"] += 1
        return can

    async def _prepare(self, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        is_counted = False
        await self._servers.leaves(self._source)
        while not await self._copied():
            self._counts["not_moved"] += not is_counted
            is_counted = True
            await asyncio.sleep(_AGAIN_S)
            await self._servers.leaves(self._source)

    async def _copied(self) -> bool:
        target = self._servers.ring.choose(time.monotonic(), [self._source])
        if target is None or not self._answer.can_be_continued:
            return False
        try:
            copied = await copy_ahead(self._servers, self._source, target, self._answer, self._headers)
        except NotServedError as error:
            about = "an answer stays request=%s server=%s error=%s"
            _log.warning(about, self.request_id, self._source, error)
            return False
        self.target = target if copied else ""
        return copied


async def copy_ahead(
    servers: Upstream, source: str, target: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    """Copies until `target` lacks few tokens. Returns False if a server does not take part. Raises NotServedError."""
    for _ in range(_MOST_COPIES):
        before = answer.num_tokens
        path, body = answer.continuation()
        asked = prefill_body(body)
        handoff = handoff_of(_value(await servers.ask(source, Sent(path, asked, headers))))
        if handoff is None:
            return False
        pulled = await servers.ask(target, Sent(path, decode_body(asked, handoff), headers))
        if pulled.status != 200:
            return False
        if answer.num_tokens - before <= _FEW_TOKENS:
            break
    return True


async def can_continue_here(
    servers: Upstream, url: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    """Returns whether the server can continue exactly after the client's text, and asks it. Raises NotServedError.

    The text may end within that of the last tokens, which are then left out and computed again.
    """
    if answer.needs_limit:
        answer.model_limit = await _model_limit(servers, url, headers)
    if answer.needs_limit:
        return False
    return not answer.needs_check or await _ends_with_token(servers, url, answer, headers)


async def _model_limit(servers: Upstream, url: str, headers: Mapping[str, str]) -> int | None:
    """Returns the limit of the server's models, which differ only by adapters."""
    models = _value(await servers.ask(url, Sent("/v1/models", None, headers, "GET"))).get("data")
    models = models if isinstance(models, list) else []
    limits = [model.get("max_model_len") for model in models if isinstance(model, dict)]
    return min((limit for limit in limits if type(limit) is int), default=None)


async def _ends_with_token(
    servers: Upstream, url: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    for without in range(_MOST_OF_A_CHARACTER):
        asked = {"model": answer.model, "tokens": answer.last_tokens(without)}
        text = _value(await servers.ask(url, Sent("/detokenize", asked, headers))).get("prompt")
        if not isinstance(text, str):
            return False
        if answer.ends_with(text, without):
            return True
    return False


def _value(answer: Answer) -> Body:
    """Returns the object in an answer, or an empty one."""
    return (object_in(answer.begin) if answer.status == 200 else None) or {}
