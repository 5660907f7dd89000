# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent again, and streams that decode servers follow."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError
from fake_engine import HANDOFF, FakeEngine
from test_router import BODY, CHAT, Place
from tracing.finding import REQUEST

from kvlink.integrations.router.bodies import num_tokens

GONE, CUT, CUT_LATER, BROKEN = "gone", "at once", "after the headers", "after a piece"
STREAM = BODY | {"stream": True}
PAGE = Path(__file__).parents[2] / "docs" / "servers" / "routers.md"
ROWS = {
    "no connection: the server never saw the request": (GONE,),
    "the connection breaks, or HTTP 500 and above": (CUT, CUT_LATER, BROKEN, 500, 501, 502, 503),
    "HTTP 429 or 408: the server is busy": (429, 408),
    "HTTP 400 to 499, but 408 and 429": (400, 401, 404, 422),
    "HTTP 300 to 399": (307,),
    "the router has no descriptor or port left, or no memory": ("own limit",),
}
"""The failures that are played of each row of the page's table."""


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """Three servers of each role: a rule that allows one more server differs from one that allows all."""
    async with AsyncExitStack() as stack:
        yield await Place(stack, 3, 3).start()


async def fail(place: Place, engines: list[FakeEngine], how: str | int) -> None:
    for engine in engines:
        if how == GONE:
            await place.kill(engine)
        elif isinstance(how, int):
            engine.status, engine.answer_headers = how, {"Retry-After": "7"}
        else:
            engine.die = how


def asked(engines: list[FakeEngine]) -> int:
    return sum(len(engine.asked) + len(engine.others) for engine in engines)


class Seen(NamedTuple):
    status: int
    """0 for a broken connection."""
    prefill: int
    """The requests that prefill servers saw."""
    decode: int


async def play(
    place: Place, body: dict[str, Any] = BODY, path: str = "/v1/completions", method: str = "POST"
) -> Seen:
    content = {"json": body} if method == "POST" else {}
    async with place.client.request(method, path, **content, allow_redirects=False) as answer:
        status = answer.status
        try:
            await answer.read()
        except ClientError:
            status = 0
        if status == 429:
            assert answer.headers["Retry-After"] == "7"
    return Seen(status, asked(place.prefill), asked(place.decode))


@pytest.mark.parametrize(
    ("how", "one", "all_"),
    [
        (GONE, Seen(200, 1, 1), Seen(200, 0, 1)),
        (CUT, Seen(200, 2, 1), Seen(200, 2, 1)),
        (500, Seen(200, 2, 1), Seen(200, 2, 1)),
        (501, Seen(200, 2, 1), Seen(200, 2, 1)),
        (503, Seen(200, 2, 1), Seen(200, 2, 1)),
        (408, Seen(200, 2, 1), Seen(200, 2, 1)),
        (429, Seen(200, 2, 1), Seen(200, 2, 1)),
        (307, Seen(200, 1, 1), Seen(200, 1, 1)),
        (400, Seen(400, 1, 0), Seen(400, 1, 0)),
        (401, Seen(401, 1, 0), Seen(401, 1, 0)),
        (404, Seen(404, 1, 0), Seen(404, 1, 0)),
        (422, Seen(422, 1, 0), Seen(422, 1, 0)),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
async def test_prefill(place: Place, how: str | int, one: Seen, all_: Seen, number: int) -> None:
    await fail(place, place.prefill[:number], how)
    assert await play(place) == (one if number == 1 else all_)
    counts, seen = await place.counts(), all_ if number == 3 else one
    is_about_request = seen.status != 200
    assert counts.get("without_prefill", 0) == (number == 3 and how != 307 and not is_about_request)
    if not is_about_request and how != 307:
        assert counts["prefill_retried"] == (1 if number == 1 else 3 if how == GONE else 2)
    for engine in place.decode:
        alone = number == 3 or how == 307
        assert all(("kv_transfer_params" in body) != alone for body in engine.asked)


@pytest.mark.parametrize(
    ("how", "one", "all_"),
    [
        (GONE, Seen(200, 1, 1), Seen(503, 1, 0)),
        (CUT, Seen(200, 2, 2), Seen(502, 2, 2)),
        (CUT_LATER, Seen(200, 2, 2), Seen(502, 2, 2)),
        (500, Seen(200, 2, 2), Seen(500, 2, 2)),
        (501, Seen(200, 2, 2), Seen(501, 2, 2)),
        (502, Seen(200, 2, 2), Seen(502, 2, 2)),
        (503, Seen(200, 2, 2), Seen(503, 2, 2)),
        (408, Seen(200, 2, 2), Seen(408, 2, 2)),
        (429, Seen(200, 2, 2), Seen(429, 2, 2)),
        (400, Seen(400, 1, 1), Seen(400, 1, 1)),
        (404, Seen(404, 1, 1), Seen(404, 1, 1)),
        (307, Seen(307, 1, 1), Seen(307, 1, 1)),
        (BROKEN, Seen(0, 1, 1), Seen(0, 1, 1)),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
async def test_decode(place: Place, how: str | int, one: Seen, all_: Seen, number: int) -> None:
    """A server that may have begun leaves the next one a new handoff, and after the first byte there is no next one."""
    await fail(place, place.decode[:number], how)
    async with place.client.post("/v1/completions", json=STREAM, allow_redirects=False) as answer:
        status = answer.status
        try:
            await answer.read()
        except ClientError:
            status = 0
    seen = Seen(status, asked(place.prefill), asked(place.decode))
    assert seen == (one if number == 1 else all_)
    counts = await place.counts()
    assert counts.get("refused", 0) == (number == 3 and seen.status >= 408)
    assert counts["handed_off"] == seen.prefill


@pytest.mark.parametrize(
    ("method", "path", "is_repeated"),
    [
        ("GET", "/v1/models", True),
        ("GET", "/version", True),
        ("OPTIONS", "/v1/chat/completions", True),
        ("POST", "/v1/embeddings", True),
        ("POST", "/tokenize", True),
        ("POST", "/v1/messages/count_tokens", True),
        ("POST", "/v1/responses", False),
        ("POST", "/v1/messages", False),
        ("POST", "/of_a_later_version", False),
        ("DELETE", "/v1/responses/r1", False),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("how", [GONE, CUT, 500, 503, 429, 408, 404, 307])
async def test_other_paths(
    place: Place, method: str, path: str, is_repeated: bool, how: str | int, number: int
) -> None:
    """A request that may have had an effect is not repeated, unless no server saw it."""
    await fail(place, place.decode[:number], how)
    final = int({CUT: 502, GONE: 503}.get(str(how), how))
    if how == GONE:
        expected = Seen(200, 0, 1) if number == 1 else Seen(final, 0, 0)
    elif how in (404, 307) or not is_repeated:
        expected = Seen(final, 0, 1)
    else:
        expected = Seen(200 if number == 1 else final, 0, 2)
    assert await play(place, {"input": "hi"}, path, method) == expected
    assert (await place.counts())["passed_through"] == 1


def test_each_row_of_the_page_is_played() -> None:
    """So a row that is added or changed fails here until its failures are played."""
    lines = PAGE.read_text().partition("### What is sent to another server")[2].splitlines()
    table = [line for line in lines if line.startswith("|")]
    rows = [line.split("|")[1].strip() for line in table[2 : 2 + len(ROWS) + 1]]
    assert rows[: len(ROWS)] == list(ROWS)
    assert len(table[2 : 2 + len(ROWS)]) == len(ROWS)
    played = {how for hows in ROWS.values() for how in hows} - {"own limit"}
    cells = [
        mark for test in (test_prefill, test_decode) for mark in test.pytestmark if "one" in mark.args[0]
    ]
    assert played == {row[0] for mark in cells for row in mark.args[1]}


@pytest.mark.parametrize("how", [CUT, 500])
@pytest.mark.parametrize("options", [{}, {"streaming_from": 1}, {"migrate": True}, {"recompute": False}])
async def test_a_request_that_ends_its_servers_ends_few(how: str | int, options: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack, 3, 4).start(**options)
        engines = [*place.prefill, *place.decode]
        await fail(place, engines, how)
        seen = await play(place, STREAM)
        assert seen.status == (502 if how == CUT else 500)
        assert 2 <= sum(bool(engine.asked) for engine in engines) <= 3
        for engine in engines:
            engine.die, engine.status = "", 200
        assert (await play(place)).status == 200, "they are asked again at once"


async def test_one_failure_of_each_role_is_not_the_end(place: Place) -> None:
    await fail(place, [place.prefill[0], place.decode[0]], 500)
    assert await play(place) == Seen(200, 3, 2)


@pytest.mark.parametrize(
    ("how", "expected"),
    [(429, Seen(429, 2, 0)), (500, Seen(500, 2, 0)), (CUT, Seen(502, 2, 0)), (GONE, Seen(503, 0, 0))],
)
async def test_without_leave_to_recompute_the_client_gets_prefills_last_answer(
    how: str | int, expected: Seen
) -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack, 3, 1).start(recompute=False)
        await fail(place, place.prefill, how)
        assert await play(place) == expected


async def test_a_decode_server_that_cannot_follow_has_failed_once() -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack, 1, 3).start(streaming_from=1)
        await fail(place, place.decode, 500)
        assert (await play(place)).decode == 2


async def test_a_server_that_answers_500_gets_fewer_requests_than_the_others(place: Place) -> None:
    await fail(place, place.decode[:1], 500)
    assert [(await play(place)).status for _ in range(6)] == [200] * 6
    assert len(place.decode[0].asked) < 3
    for engine in place.decode[1:]:
        await place.kill(engine)
    place.decode[0].status = 200
    assert (await play(place)).status == 200, "it is there, and nobody else is"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [429, 408])
async def test_a_server_that_is_busy_stays_in_turn(place: Place, role: str, status: int) -> None:
    engines = {"prefill": place.prefill, "decode": place.decode}[role]
    await fail(place, engines[:1], status)
    for _ in range(4):
        assert (await play(place)).status == 200
    assert len(engines[0].asked) == 2
    async with place.client.get("/health") as answer:
        assert len((await answer.json())[role]) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_each_failure_is_a_line_with_the_requests_id(
    place: Place, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    await fail(place, {"prefill": place.prefill, "decode": place.decode}[role][:1], 500)
    with caplog.at_level(logging.WARNING, "kvlink.integrations.router"):
        assert (await place.post(**{"X-Request-Id": "r1"}))[0] == 200
    assert [record.getMessage() for record in caplog.records if "request=r1" in record.getMessage()]
    assert (await place.counts())[f"{role}_retried"] == 1


@contextmanager
def no_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_limits_of_the_router_are_named_as_its_own(place: Place, path: str) -> None:
    assert (await place.post(path=path))[0] == 200  # the client keeps this connection
    with no_descriptors():
        status, answer = await place.post(path=path)
    assert status == 503
    assert "EMFILE" in answer["error"]["message"]
    assert "the router" in answer["error"]["message"]
    assert (await place.counts())["own_limit"] == 1
    async with place.client.get("/health") as health:
        up = await health.json()
    assert len(up["prefill"]) == len(up["decode"]) == 3
    assert (await place.post(path=path))[0] == 200


@pytest.fixture
async def following_place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(streaming_from=3)


def names(following_place: Place) -> tuple[Any, Any]:
    asked = following_place.prefill[0].asked[0], following_place.decode[0].asked[0]
    return tuple(body["kv_transfer_params"]["kvlink_stream"] for body in asked)  # type: ignore[return-value]


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_both_sides_are_asked_at_once_under_one_name(following_place: Place, slow: str) -> None:
    getattr(following_place, slow)[0].slow_s = 0.2
    status, answer = await following_place.post()
    assert (status, answer["model"]) == (200, "d0")
    assert len(set(names(following_place))) == 1
    assert following_place.prefill[0].asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert following_place.decode[0].asked[0]["kv_transfer_params"]["do_remote_prefill"] is True
    assert (await following_place.counts())["followed"] == 1
    await following_place.post()
    assert (
        following_place.prefill[1].asked[0]["kv_transfer_params"]["kvlink_stream"]
        != names(following_place)[0]
    )


async def test_both_sides_are_told_of_the_trace(following_place: Place) -> None:
    assert (await following_place.post(traceparent=REQUEST))[0] == 200
    for side in (following_place.prefill[0], following_place.decode[0]):
        assert side.asked[0]["kv_transfer_params"]["kvlink_traceparent"] == REQUEST


async def test_short_prompts_go_one_after_the_other(following_place: Place) -> None:
    await following_place.post(BODY | {"prompt": [1, 2]})
    assert following_place.decode[0].asked[0]["kv_transfer_params"] == HANDOFF
    assert await following_place.counts() == {"handed_off": 1}


async def test_a_prefill_that_was_not_announced_is_handed_off_as_ever(following_place: Place) -> None:
    following_place.prefill[0].follows = following_place.decode[0].follows = False
    assert (await following_place.post())[0] == 200
    waited, answered = following_place.decode[0].asked
    assert "kvlink_stream" in waited["kv_transfer_params"]
    assert answered["kv_transfer_params"] == HANDOFF
    await asyncio.wait_for(following_place.decode[0].aborted.wait(), 10)
    assert await following_place.counts() == {"handed_off": 1}


async def test_prefill_advises_against_prompts_that_it_would_not_announce(following_place: Place) -> None:
    for engine in (*following_place.prefill, *following_place.decode):
        engine.handoff, engine.follows = HANDOFF | {"kvlink_streams_from": 5}, False
    body = BODY | {"prompt": [1, 2, 3, 4]}
    assert (await following_place.post(body))[0] == 200
    asked = [len(engine.asked) for engine in following_place.decode]
    assert (await following_place.post(body))[0] == 200
    assert sum(len(engine.asked) for engine in following_place.decode) == sum(asked) + 1
    for engine in (*following_place.prefill, *following_place.decode):
        engine.follows = True
    assert (await following_place.post(body | {"prompt": [1, 2, 3, 4, 5]}))[0] == 200
    assert await following_place.counts() == {"handed_off": 3, "followed": 1}


async def test_a_decode_server_that_fails_at_it_gets_the_hand_off(following_place: Place) -> None:
    following_place.decode[0].fails_to_follow = True
    following_place.prefill[0].slow_s = 0.1
    assert (await following_place.post())[0] == 200
    assert following_place.decode[0].asked[1]["kv_transfer_params"]["of_another_connector"] == {
        "deep": [1, None]
    }


async def test_what_prefill_refuses_ends_both(following_place: Place) -> None:
    following_place.prefill[0].status = 400
    following_place.decode[0].follows = False
    assert await following_place.post() == (400, {"error": {"message": "p0 says no"}})
    await asyncio.wait_for(following_place.decode[0].aborted.wait(), 10)


async def test_the_next_decode_server_follows_anew(following_place: Place) -> None:
    await following_place.kill(following_place.decode[0])
    following_place.prefill[0].slow_s = 0.1
    status, answer = await following_place.post()
    assert (status, answer["model"]) == (200, "d1")
    streams = {
        engine.asked[0]["kv_transfer_params"]["kvlink_stream"]
        for engine in (following_place.prefill[1], following_place.decode[1])
    }
    assert len(streams) == 1
    counts = await following_place.counts()
    assert (counts["followed"], counts["decode_retried"]) == (1, 1)


async def test_without_prefill_decode_computes_the_prompt(following_place: Place) -> None:
    following_place.decode[0].follows = False
    for engine in following_place.prefill:
        await following_place.kill(engine)
    assert (await following_place.post())[0] == 200
    assert following_place.decode[0].asked[-1] == BODY


async def test_a_client_that_hangs_up_ends_both(following_place: Place) -> None:
    following_place.prefill[0].hang = following_place.decode[0].hang = True
    asking = asyncio.create_task(following_place.post())
    await asyncio.gather(following_place.prefill[0].arrived.wait(), following_place.decode[0].arrived.wait())
    asking.cancel()
    for engine in (following_place.prefill[0], following_place.decode[0]):
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
