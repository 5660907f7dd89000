# SPDX-License-Identifier: Apache-2.0
"""Asks both sides at once: decode follows the prefill while it runs, and pulls the blocks that are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from kvlink.router.bodies import Body, announced, following_body
from kvlink.router.retries import Answer, NotServed, Tries
from kvlink.router.upstream import Upstream
from kvlink.runtime.supervised import start_awaited
from kvlink.tracing import HEADER


class Followed(NamedTuple):
    """Decode's answer, and the rest of its body."""

    answer: Answer
    rest: AsyncIterator[bytes]


@asynccontextmanager
async def following(
    prefill: Coroutine[Any, Any, Body | None],
    decode: Upstream,
    tries: Tries,
    url: str,
    path: str,
    body: Body,
    headers: Mapping[str, str],
    stream: str,
    answer_as: str = "",
) -> AsyncIterator[Followed | Body | None]:
    """Yields the answer of the decode server at `url`, or the handoff that `prefill` returned.

    It yields the handoff if decode cannot follow the prefill or failed at it. Leaving the context ends both requests.
    `stream` is the name given to prefill, `answer_as` that of the answer's ticket. `tries` learns of a decode server
    that failed at it. Raises what `prefill` raises, and decode's NotServed.
    """
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(AsyncExitStack())
        prefilling = start_awaited(prefill)
        stack.push_async_callback(_end, prefilling)
        asked = following_body(body, stream, headers.get(HEADER, ""), answer_as)
        answer = decode.stream(url, path, asked, headers)
        answering = start_awaited(opened.enter_async_context(answer))
        stack.push_async_callback(_end, answering)
        await asyncio.wait({prefilling, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not announced(await prefilling, stream):
            yield prefilling.result()
            return
        try:
            came: Followed | Body | None = Followed(*await answering)
        except NotServed as error:
            if error.answer is None or error.answer.status < 500:
                raise
            tries.failed(decode.role, error)
            came = await prefilling
        yield came


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
