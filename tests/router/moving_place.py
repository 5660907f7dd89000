# SPDX-License-Identifier: Apache-2.0
"""Two decode servers whose answers depend on their tokens, behind a router that moves streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse
from test_draining_servers import ask
from test_router import Place
from token_engine import TokenEngine

from kvlink.integrations.router.server_events import value_of

BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
REQUESTS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)], ids=["completion", "chat"]
)
ENGINE_DIED = 'data: {"error": {"message": "engine died"}}\n\n'
ABORTED = 'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\n'


class Moving(Place):
    """Two decode servers whose answers depend on their tokens."""

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self.engines = [TokenEngine("d0"), TokenEngine("d1")]
        self.decode = [*self.engines]

    async def stream(self, body: dict[str, Any], path: str) -> list[Any]:
        """Returns the events of an answer that must be complete."""
        async with self.client.post(path, json=body) as answer:
            return await rest_of(answer)

    @asynccontextmanager
    async def paused(
        self, body: dict[str, Any], path: str = "/v1/completions", after: int = 5
    ) -> AsyncIterator[Any]:
        """Yields what returns the events of an answer, which pauses at the first server after so many events."""
        self.engines[0].pause_after = after
        async with self.client.post(path, json=body) as answer:
            begun = [value_of(await answer.content.readuntil(b"\n\n")) for _ in range(after)]

            async def go_on() -> list[Any]:
                self.engines[0].going_on.set()
                return begun + await rest_of(answer)

            yield go_on

    async def drain_first(self, until: str) -> None:
        """Drains the first server, and returns when the router has counted `until`, or has copied the answer."""
        await ask(self, "force", self.engines[0].url)
        if until:
            while not (await self.counts()).get(until):
                pass
            return
        await self.engines[1].arrived.wait()
        while [
            row["running"] for row in await ask(self, "servers") if row["server"] == self.engines[1].url
        ] != [0]:
            pass


async def rest_of(answer: ClientResponse) -> list[Any]:
    *events, end = (await answer.read()).decode().strip().split("\n\n")
    assert end == "data: [DONE]"
    return [value_of(event.encode()) for event in events]


@asynccontextmanager
async def moving_place() -> AsyncIterator[Moving]:
    """Yields the started servers and router."""
    async with AsyncExitStack() as stack:
        moving = Moving(stack)
        await moving.start(control=True, migrate=True)
        yield moving


def said(events: list[Any]) -> str:
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for e in events
        for choice in e["choices"]
    ]
    return "".join(texts)


def names(events: list[Any]) -> set[tuple[str, str]]:
    return {(event["id"], event["object"]) for event in events}


async def whole(place: Moving, body: dict[str, Any], path: str) -> str:
    """Returns the answer that one server gives alone."""
    async with place.client.post(f"{place.engines[0].url}{path}", json=body) as answer:
        events = await rest_of(answer)
    place.engines[0].asked.clear()
    return said(events)
