# SPDX-License-Identifier: Apache-2.0
"""Streams whose server drains, between real HTTP servers: they move, and the client sees one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientSession
from moving_place import BODY, CHAT, REQUESTS, Moving, moving_place, names, said, whole
from test_draining_servers import ask
from token_engine import HANDOFF

from kvlink.integrations.router import moves
from kvlink.integrations.router.choice import Ring
from kvlink.integrations.router.counts import Counts
from kvlink.integrations.router.upstream import Upstream


@pytest.fixture
async def place() -> AsyncIterator[Moving]:
    async with moving_place() as moving:
        yield moving


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
