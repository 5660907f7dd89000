# SPDX-License-Identifier: Apache-2.0
"""Streams that lose their server, or whose server drains, between real HTTP servers: the client sees one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError, ClientResponse, ClientSession
from test_draining_servers import ask
from test_router import Place
from token_engine import HANDOFF, MODEL_LIMIT, TokenEngine

from kvlink.router import resuming
from kvlink.router.choice import Ring
from kvlink.router.server_events import value_of
from kvlink.router.upstream import Upstream

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
        await ask(self, "drain", self.engines[0].url)
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


@pytest.fixture
async def place() -> AsyncIterator[Moving]:
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


@REQUESTS
async def test_an_answer_that_nothing_happens_to(place: Moving, path: str, body: dict[str, Any]) -> None:
    events = await place.stream(body, path)
    assert said(events) == await whole(place, body, path)
    assert not any("token_ids" in choice for event in events for choice in event["choices"])
    assert not any("prompt_token_ids" in place for event in events for place in (event, *event["choices"]))
    assert await place.counts() == {"handed_off": 1}


@REQUESTS
@pytest.mark.parametrize("how", ["cut", ENGINE_DIED, ABORTED], ids=["cut", "engine died", "aborted"])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 19, 20])
async def test_a_server_that_breaks_off(
    place: Moving, path: str, body: dict[str, Any], how: str, after: int
) -> None:
    expected = await whole(place, body, path)
    first, second = place.engines
    first.break_after, first.kind_of_end = after, how
    events = await place.stream(body, path)
    assert said(events) == expected
    assert len(names(events)) == 1
    is_over = path.startswith("/v1/comp") and after == 20
    assert len(second.asked) == (0 if is_over else 1)


@pytest.mark.parametrize("merged", [2, 3, 7])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@REQUESTS
async def test_events_with_several_tokens(
    place: Moving, path: str, body: dict[str, Any], merged: int, after: int
) -> None:
    """Such an event may end within a character, whose text has not come."""
    expected = await whole(place, body, path)
    for engine in place.engines:
        engine.tokens_an_event = merged
    place.engines[0].break_after = after
    shows_ids = body | {"return_token_ids": True}
    assert said(await place.stream(body, path)) == expected
    events = await place.stream(shows_ids, path)
    assert said(events) == expected
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert len(ids) == 20


async def test_events_with_several_tokens_move(place: Moving) -> None:
    expected = await whole(place, BODY, "/v1/completions")
    place.engines[0].tokens_an_event = 2
    async with place.paused(BODY, after=4) as go_on:
        await place.drain_first("")
        events = await go_on()
    assert said(events) == expected
    assert (await place.counts())["moved"] == 1


@pytest.mark.parametrize("holds_back", [0, 1, 4])
async def test_a_parser_that_holds_text_back(place: Moving, holds_back: int) -> None:
    expected = await whole(place, CHAT, "/v1/chat/completions")
    place.engines[0].holds_back = holds_back
    place.engines[0].break_after = 7
    async with place.client.post("/v1/chat/completions", json=CHAT) as answer:
        if holds_back:
            with pytest.raises(ClientError):
                await answer.read()
        else:
            assert said(await rest_of(answer)) == expected


async def test_a_chat_without_a_limit(place: Moving) -> None:
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    expected = await whole(place, body, "/v1/chat/completions")
    place.engines[0].break_after = 7
    events = await place.stream(body, "/v1/chat/completions")
    assert said(events) == expected
    assert place.engines[1].asked[0]["max_tokens"] + len(place.engines[1].asked[0]["prompt"]) == MODEL_LIMIT


async def test_usage_that_a_dying_server_did_not_send(place: Moving) -> None:
    body = BODY | {"stream_options": {"include_usage": True}}
    place.engines[0].break_after = 20
    events = await place.stream(body, "/v1/completions")
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    assert events[-1]["choices"] == []
    assert len(names(events)) == 1


async def test_a_request_that_ends_every_server(place: Moving) -> None:
    """It is not sent to them again and again."""
    for engine in place.engines:
        engine.always_breaks_after = 1
    async with place.client.post("/v1/chat/completions", json=CHAT) as answer:
        with pytest.raises(ClientError):
            await answer.read()
    assert sum(len(engine.asked) for engine in place.engines) == 1 + 3
    assert (await place.counts())["lost"] == 1


async def test_both_servers_break_off_in_turn(place: Moving) -> None:
    expected = await whole(place, BODY, "/v1/completions")
    for engine in place.engines:
        engine.break_after = 7
    events = await place.stream(BODY, "/v1/completions")
    assert said(events) == expected
    assert (await place.counts())["resumed"] == 2


@pytest.mark.parametrize("body", [BODY | {"stop": ["zz"]}, BODY | {"presence_penalty": 1.0}])
async def test_a_request_that_cannot_go_on_is_broken_off(place: Moving, body: dict[str, Any]) -> None:
    place.engines[0].break_after = 5
    async with place.client.post("/v1/completions", json=body) as answer:
        with pytest.raises(ClientError):
            await answer.read()
    assert place.engines[1].asked == []


async def test_a_server_that_tells_no_tokens(place: Moving) -> None:
    for engine in place.engines:
        engine.tells_tokens = False
    expected = await whole(place, BODY, "/v1/completions")
    assert said(await place.stream(BODY, "/v1/completions")) == expected
    place.engines[1].break_after = 5
    async with place.client.post("/v1/completions", json=BODY) as answer:
        with pytest.raises(ClientError):
            await answer.read()


async def test_nobody_can_go_on(place: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_NO_SERVER_S", 0.02)
    monkeypatch.setattr(resuming, "_RETRY_S", 0.01)
    place.engines[0].break_after = 5
    await place.kill(place.engines[1])
    async with place.client.post("/v1/completions", json=BODY) as answer:
        with pytest.raises(ClientError):
            await answer.read()
    assert (await place.counts())["lost"] == 1


@REQUESTS
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
async def test_a_server_that_drains(place: Moving, path: str, body: dict[str, Any], after: int) -> None:
    expected = await whole(place, body, path)
    async with place.paused(body, path, after) as go_on:
        await place.drain_first("")
        events = await go_on()
    assert said(events) == expected
    assert len(names(events)) == 1
    assert (await place.counts())["moved"] == 1


async def test_what_a_move_asks_for(place: Moving) -> None:
    async with place.paused(BODY | {"seed": 3, "stream_options": {"include_usage": True}}) as go_on:
        await place.drain_first("")
        events = await go_on()
    asked, offer = place.engines[0].asked
    pulled, continued = place.engines[1].asked
    so_far = offer["prompt"]
    assert so_far[:3] == [1, 2, 3]
    assert len(so_far) > 3
    assert (offer["max_tokens"], offer["stream"]) == (1, False)
    assert offer["kv_transfer_params"]["do_remote_decode"] is True
    assert (pulled["prompt"], pulled["kv_transfer_params"], pulled["max_tokens"]) == (so_far, HANDOFF, 1)
    assert continued["prompt"][: len(so_far)] == so_far
    drawn = len(continued["prompt"]) - 3
    assert continued["vllm_xargs"] == {"kvlink_drawn": drawn}
    assert continued["max_tokens"] == 20 - drawn
    assert "kv_transfer_params" not in continued
    assert asked["return_token_ids"] is True
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}


@pytest.mark.parametrize("what", ["gives no handoff", "has nobody else"])
async def test_a_stream_that_stays(place: Moving, what: str) -> None:
    expected = await whole(place, BODY, "/v1/completions")
    first, second = place.engines
    async with place.paused(BODY) as go_on:
        if what == "gives no handoff":
            first.handoff = None
        else:
            await ask(place, "drain", second.url)
        await place.drain_first("not_moved")
        events = await go_on()
    assert said(events) == expected
    assert "moved" not in await place.counts()


async def test_a_target_that_dies_after_it_copied(place: Moving) -> None:
    """The server that drains still has the request's cache, and is the only one left."""
    expected = await whole(place, BODY, "/v1/completions")
    async with place.paused(BODY) as go_on:
        await place.drain_first("")
        place.engines[1].die = "at once"
        events = await go_on()
    assert said(events) == expected
    assert (await place.counts())["resumed"] == 1


async def test_streams_leave_a_server_until_it_is_replaced() -> None:
    async with ClientSession() as session:
        servers = Upstream("decode", Ring(["http://a"]), session)
        servers.drain("http://a")
        servers.broke_off("http://a")
        servers.answered("http://a")
        await servers.leaves("http://a")
        assert servers.ring.draining("http://a"), "one stream broke off, and the server is the same"
        servers.ring.failed("http://a", 0.0)
        servers.answered("http://a")
        leaving = asyncio.create_task(servers.leaves("http://a"))
        await asyncio.sleep(0)
        assert not leaving.done()
        leaving.cancel()


async def test_a_client_that_hangs_up_ends_a_stream(place: Moving) -> None:
    async with place.paused(BODY):
        pass
    await asyncio.wait_for(place.engines[0].aborted.wait(), 10)


@pytest.mark.parametrize("is_up", [False, True], ids=["gone", "slow"])
async def test_a_server_that_hangs(place: Moving, monkeypatch: pytest.MonkeyPatch, is_up: bool) -> None:
    """Its host may have lost its power, so that nothing ends the connection."""
    expected = await whole(place, BODY, "/v1/completions")
    looked = asyncio.Event()
    first = place.engines[0].url

    def answers(_: object, url: str) -> bool:
        if url == first:
            looked.set()
        return is_up or url != first

    monkeypatch.setattr(resuming, "_CHECK_AFTER_S", 0.01)
    monkeypatch.setattr(Ring, "answers", answers)
    async with place.paused(BODY) as go_on:
        await looked.wait()
        if not is_up:
            await place.engines[1].arrived.wait()
        events = await go_on()
    assert said(events) == expected
    assert len(place.engines[1].asked) == (not is_up)


async def test_each_server_gets_one_request_id(place: Moving) -> None:
    """Headers have no case, and clients write them as they like."""
    place.engines[0].break_after = 5
    async with place.client.post("/v1/completions", json=BODY, headers={"x-request-id": "r"}) as answer:
        await answer.read()
    ids = [engine.headers[0].getall("X-Request-Id") for engine in place.engines]  # type: ignore[attr-defined]
    assert ids == [["r"], ["r-1"]]
