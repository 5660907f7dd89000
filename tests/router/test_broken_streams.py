# SPDX-License-Identifier: Apache-2.0
"""Streams that break or move to another server: the client gets each token once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError, ClientSession
from moving_place import (
    ABORTED,
    BODY,
    CHAT,
    ENGINE_DIED,
    REQUESTS,
    Moving,
    moving_place,
    names,
    rest_of,
    said,
    whole,
)
from test_draining_servers import ask
from token_engine import HANDOFF, MODEL_LIMIT

from kvlink.integrations.router import moves, resuming
from kvlink.integrations.router.choice import Ring
from kvlink.integrations.router.counts import Counts
from kvlink.integrations.router.server_events import value_of
from kvlink.integrations.router.upstream import Upstream


@pytest.fixture
async def place() -> AsyncIterator[Moving]:
    async with moving_place() as moving:
        yield moving


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


async def _read(place: Moving, path: str, body: dict[str, Any]) -> bytes:
    async with place.client.post(path, json=body) as answer:
        return await answer.read()


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
@REQUESTS
async def test_events_with_other_line_ends(
    place: Moving, path: str, body: dict[str, Any], line_end: bytes
) -> None:
    """They come one by one, and can go on."""
    expected = await whole(place, body, path)
    for engine in place.engines:
        engine.line_end = line_end
    place.engines[0].break_after = 5
    found = await _read(place, path, body)
    assert said(list(map(value_of, found.splitlines(keepends=True)[:-2:2]))) == expected  # type: ignore[arg-type]
    assert (await place.counts())["resumed"] == 1
    place.engines[0].pause_after = 3
    async with place.client.post(path, json=body) as answer:
        assert await answer.content.readany()
        place.engines[0].going_on.set()
        await answer.read()


@pytest.mark.parametrize(
    ("event", "ends_it"),
    [
        (b": a comment\n\n", False),
        (b"event: ping\ndata: {}\n\n", True),
        (b"id: 7\n\n", True),
        (b'data: {"type": "of_a_later_version"}\n\n', True),
        (b'data: {"choices": [5]}\n\n', True),
        (b'data:{"choices": [{"text": "\\ud800", "token_ids": "1"}]}\n\n', True),
        (b"data: {" + b"[" * 5000 + b"\n\n", True),
        (b"data: \xff\n\n", True),
    ],
)
async def test_events_of_other_kinds(place: Moving, event: bytes, ends_it: bool) -> None:
    """They pass as they are. An answer whose server breaks off afterwards does not go on elsewhere."""
    place.engines[0].says = {3: event}
    assert event in await _read(place, "/v1/completions", BODY)
    assert await place.counts() == {"handed_off": 1}
    place.engines[1].asked.clear()
    place.engines[0].break_after = place.engines[1].break_after = 7
    place.engines[1].says = {3: event}
    if ends_it:
        with pytest.raises(ClientError):
            await _read(place, "/v1/completions", BODY)
    else:
        assert (await _read(place, "/v1/completions", BODY)).endswith(b"data: [DONE]\n\n")
    assert (await place.counts()).get("resumed", 0) == (0 if ends_it else 2)


async def test_a_stream_of_another_form_ends_as_it_ends(place: Moving) -> None:
    """It has no finish_reason and no DONE."""
    event = b"event: done\r\n\r\n: the end"
    place.engines[0].says = {0: event}
    place.engines[0].stops_after = 0
    assert await _read(place, "/v1/completions", BODY) == event


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


@pytest.mark.parametrize("how", ["cut", ENGINE_DIED], ids=["cut", "engine died"])
async def test_a_request_that_ends_every_server(place: Moving, how: str) -> None:
    """It is not sent to them again and again, and the client gets the error, if there is one."""
    for engine in place.engines:
        engine.always_breaks_after, engine.kind_of_end = 1, how
    async with place.client.post("/v1/chat/completions", json=CHAT) as answer:
        if how == "cut":
            with pytest.raises(ClientError):
                await answer.read()
        else:
            assert (await rest_of(answer))[-1] == {"error": {"message": "engine died"}}
    assert sum(len(engine.asked) for engine in place.engines) == 1 + 1
    assert (await place.counts())["lost"] == 1


async def test_an_error_of_the_request_is_passed_on(place: Moving) -> None:
    place.engines[0].break_after = 3
    place.engines[0].kind_of_end = 'data: {"error": {"message": "no", "code": 400}}\n\n'
    events = await place.stream(BODY, "/v1/completions")
    assert events[-1] == {"error": {"message": "no", "code": 400}}
    assert place.engines[1].asked == []


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
    place.engines[0].pause_after, place.engines[0].break_after = 4, 5
    await place.kill(place.engines[1])
    async with place.client.post("/v1/completions", json=BODY) as answer:
        place.engines[0].status = 503
        place.engines[0].going_on.set()
        with pytest.raises(ClientError):
            await answer.read()
    assert (await place.counts())["lost"] == 1


@pytest.mark.parametrize("how", ["gone", "slow", "cannot go on"])
async def test_a_server_that_hangs(place: Moving, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its host may have lost its power, so that nothing ends the connection."""
    expected = await whole(place, BODY, "/v1/completions")
    looked, is_up, stays = asyncio.Event(), how == "slow", how != "gone"
    place.engines[0].tells_tokens = how != "cannot go on"
    first = place.engines[0].url

    def answers(_: object, url: str) -> bool:
        if url == first:
            looked.set()
        return is_up or url != first

    monkeypatch.setattr(resuming, "_CHECK_AFTER_S", 0.01)
    monkeypatch.setattr(Ring, "answers", answers)
    async with place.paused(BODY) as go_on:
        await looked.wait()
        if not stays:
            await place.engines[1].arrived.wait()
        events = await go_on()
    assert said(events) == expected
    assert len(place.engines[1].asked) == (not stays)


async def test_each_server_gets_one_request_id(place: Moving) -> None:
    """Headers have no case, and clients write them as they like."""
    place.engines[0].break_after = 5
    async with place.client.post("/v1/completions", json=BODY, headers={"x-request-id": "r"}) as answer:
        await answer.read()
    ids = [engine.headers[0].getall("X-Request-Id") for engine in place.engines]  # type: ignore[attr-defined]
    assert ids == [["r"], ["r-1"]]


async def test_events_with_several_tokens_move(place: Moving) -> None:
    expected = await whole(place, BODY, "/v1/completions")
    place.engines[0].tokens_an_event = 2
    async with place.paused(BODY, after=4) as go_on:
        await place.drain_first("")
        events = await go_on()
    assert said(events) == expected
    assert (await place.counts())["moved"] == 1


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


async def test_a_target_that_hangs_after_it_copied(place: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat's text is checked there first, while its server goes on."""
    expected = await whole(place, CHAT, "/v1/chat/completions")
    monkeypatch.setattr(moves, "CHECK_S", 0.01)
    async with place.paused(CHAT, "/v1/chat/completions") as go_on:
        await place.drain_first("")
        place.engines[1].hang = True
        events = await go_on()
    assert place.engines[1].hung.is_set()
    assert said(events) == expected
    assert "moved" not in await place.counts()


NOBODY = "http://127.0.0.1:1"


async def test_streams_leave_a_server_until_it_is_replaced() -> None:
    async with ClientSession() as session:
        servers = Upstream("decode", Ring([NOBODY]), session, Counts())
        await servers.drain(NOBODY)
        servers.broke_off(NOBODY)
        servers.answered(NOBODY)
        await servers.leaves(NOBODY)
        assert servers.ring.draining(NOBODY), "one stream broke off, and the server is the same"
        servers.ring.failed(NOBODY, 0.0)
        servers.answered(NOBODY)
        leaving = asyncio.create_task(servers.leaves(NOBODY))
        await asyncio.sleep(0)
        assert not leaving.done()
        leaving.cancel()


async def test_a_client_that_hangs_up_ends_a_stream(place: Moving) -> None:
    async with place.paused(BODY):
        pass
    await asyncio.wait_for(place.engines[0].aborted.wait(), 10)
