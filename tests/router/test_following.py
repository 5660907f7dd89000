# SPDX-License-Identifier: Apache-2.0
"""The router with `--streaming-from`: decode follows a prefill that runs, and what happens when it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from fake_engine import HANDOFF
from test_router import BODY, CHAT, Place
from tracing.finding import REQUEST

from kvlink.integrations.router.bodies import num_tokens


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(streaming_from=3)


def names(place: Place) -> tuple[Any, Any]:
    asked = place.prefill[0].asked[0], place.decode[0].asked[0]
    return tuple(body["kv_transfer_params"]["kvlink_stream"] for body in asked)  # type: ignore[return-value]


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_both_sides_are_asked_at_once_under_one_name(place: Place, slow: str) -> None:
    getattr(place, slow)[0].slow_s = 0.2
    status, answer = await place.post()
    assert (status, answer["model"]) == (200, "d0")
    assert len(set(names(place))) == 1
    assert place.prefill[0].asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert place.decode[0].asked[0]["kv_transfer_params"]["do_remote_prefill"] is True
    assert (await place.counts())["followed"] == 1
    await place.post()
    assert place.prefill[1].asked[0]["kv_transfer_params"]["kvlink_stream"] != names(place)[0]


async def test_both_sides_are_told_of_the_trace(place: Place) -> None:
    assert (await place.post(traceparent=REQUEST))[0] == 200
    for side in (place.prefill[0], place.decode[0]):
        assert side.asked[0]["kv_transfer_params"]["kvlink_traceparent"] == REQUEST


async def test_short_prompts_go_one_after_the_other(place: Place) -> None:
    await place.post(BODY | {"prompt": [1, 2]})
    assert place.decode[0].asked[0]["kv_transfer_params"] == HANDOFF
    assert await place.counts() == {"handed_off": 1}


async def test_a_prefill_that_was_not_announced_is_handed_off_as_ever(place: Place) -> None:
    place.prefill[0].follows = place.decode[0].follows = False
    assert (await place.post())[0] == 200
    waited, answered = place.decode[0].asked
    assert "kvlink_stream" in waited["kv_transfer_params"]
    assert answered["kv_transfer_params"] == HANDOFF
    await asyncio.wait_for(place.decode[0].aborted.wait(), 10)
    assert await place.counts() == {"handed_off": 1}


async def test_prefill_advises_against_prompts_that_it_would_not_announce(place: Place) -> None:
    for engine in (*place.prefill, *place.decode):
        engine.handoff, engine.follows = HANDOFF | {"kvlink_streams_from": 5}, False
    body = BODY | {"prompt": [1, 2, 3, 4]}
    assert (await place.post(body))[0] == 200
    asked = [len(engine.asked) for engine in place.decode]
    assert (await place.post(body))[0] == 200
    assert sum(len(engine.asked) for engine in place.decode) == sum(asked) + 1
    for engine in (*place.prefill, *place.decode):
        engine.follows = True
    assert (await place.post(body | {"prompt": [1, 2, 3, 4, 5]}))[0] == 200
    assert await place.counts() == {"handed_off": 3, "followed": 1}


async def test_a_decode_server_that_fails_at_it_gets_the_hand_off(place: Place) -> None:
    place.decode[0].fails_to_follow = True
    place.prefill[0].slow_s = 0.1
    assert (await place.post())[0] == 200
    assert place.decode[0].asked[1]["kv_transfer_params"]["of_another_connector"] == {"deep": [1, None]}


async def test_what_prefill_refuses_ends_both(place: Place) -> None:
    place.prefill[0].status = 400
    place.decode[0].follows = False
    assert await place.post() == (400, {"error": {"message": "p0 says no"}})
    await asyncio.wait_for(place.decode[0].aborted.wait(), 10)


async def test_the_next_decode_server_follows_anew(place: Place) -> None:
    await place.kill(place.decode[0])
    place.prefill[0].slow_s = 0.1
    status, answer = await place.post()
    assert (status, answer["model"]) == (200, "d1")
    streams = {
        engine.asked[0]["kv_transfer_params"]["kvlink_stream"]
        for engine in (place.prefill[1], place.decode[1])
    }
    assert len(streams) == 1
    counts = await place.counts()
    assert (counts["followed"], counts["decode_retried"]) == (1, 1)


async def test_without_prefill_decode_computes_the_prompt(place: Place) -> None:
    place.decode[0].follows = False
    for engine in place.prefill:
        await place.kill(engine)
    assert (await place.post())[0] == 200
    assert place.decode[0].asked[-1] == BODY


async def test_a_client_that_hangs_up_ends_both(place: Place) -> None:
    place.prefill[0].hang = place.decode[0].hang = True
    asking = asyncio.create_task(place.post())
    await asyncio.gather(place.prefill[0].arrived.wait(), place.decode[0].arrived.wait())
    asking.cancel()
    for engine in (place.prefill[0], place.decode[0]):
        await asyncio.wait_for(engine.aborted.wait(), 10)


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2, 3]]}, 3),
        ({"prompt": "x" * 40}, 10),
        ({"prompt": ["x" * 40]}, 10),
        (CHAT, 8),
        ({"messages": [{"role": "user", "content": [_IMAGE, {"type": "text", "text": "x" * 40}]}]}, 10),
        ({}, 1),
    ],
)
def test_prompts_are_measured(body: dict[str, Any], tokens: int) -> None:
    assert num_tokens(body) == tokens
