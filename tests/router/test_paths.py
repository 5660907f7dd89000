# SPDX-License-Identifier: Apache-2.0
"""Paths beside completions and chats: what goes by a handoff, and what goes to a decode server as it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientSession, DummyCookieJar
from fake_engine import HANDOFF, PIECES
from test_router import BODY, Place
from yarl import URL

from kvlink.integrations.router.serving import routing

GENERATE = "/inference/v1/generate"
TOKENS = {
    "model": "m",
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 9, "min_tokens": 4, "seed": 1},
}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(streaming_from=1000)


async def test_tokens_go_by_a_hand_off(place: Place) -> None:
    """Prefill is asked for one token where this path takes that."""
    status, _ = await place.post(TOKENS, GENERATE)
    assert status == 200
    (asked,) = place.prefill[0].asked
    assert asked["sampling_params"] == {"max_tokens": 1, "seed": 1}
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_tokens" not in asked
    assert place.decode[0].asked == [TOKENS | {"kv_transfer_params": HANDOFF}]
    assert await place.counts() == {"handed_off": 1}


@pytest.mark.parametrize("sampling", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_tokens_that_one_hand_off_does_not_serve(place: Place, sampling: dict[str, Any]) -> None:
    body = TOKENS | {"sampling_params": sampling}
    assert (await place.post(body, GENERATE))[0] == 200
    assert place.decode[0].asked == [body]
    assert await place.counts() == {"not_suited": 1}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages?beta=true"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("GET", "/version"),
        ("GET", "/ping"),
        ("GET", "/load"),
        ("GET", "/v1/models/a%2Fb"),
        ("POST", "/v1/audio/transcriptions"),
        ("DELETE", "/v1/responses/r1"),
        ("PUT", "/a/../b"),
        ("PATCH", "/x"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/v1/completions"),
        ("POST", "/health"),
        ("HEAD", "/ping"),
    ],
)
async def test_all_other_paths_go_to_decode_as_they_are(place: Place, method: str, path: str) -> None:
    content = b"\x00\xffany" if method in ("POST", "PUT", "PATCH") else b""
    place.decode[0].answer_headers = {"X-Any": "1", "Retry-After": "3"}
    place.decode[0].status = 203
    url = URL(place.url + path, encoded=True)
    async with place.client.request(method, url, data=content or None) as answer:
        assert answer.status == 203
        assert answer.headers["X-Any"] == "1"
        assert json.loads(await answer.read() or b"{}") == ({} if method == "HEAD" else {"from": "d0"})
    assert place.decode[0].others == [(method, path, content)]
    assert [engine.asked + engine.others for engine in place.prefill] == [[], []]  # type: ignore[operator]
    assert await place.counts() == {"passed_through": 1}


async def test_streams_of_other_paths_pass(place: Place) -> None:
    async with place.client.post("/streams", data=b"{}") as answer:
        first = await answer.content.readany()
        assert first + await answer.read() == b"".join(PIECES)
        assert len(first) < len(b"".join(PIECES))


async def test_own_paths_stay_the_routers(place: Place) -> None:
    for path in ("/health", "/metrics"):
        assert (await place.client.get(path)).status == 200
    assert [engine.others for engine in place.decode] == [[], []]


async def test_a_client_gives_no_handoff_of_its_own(place: Place) -> None:
    body = {"model": "m", "kv_transfer_params": {"remote_host": "evil"}, "input": 1}
    async with place.client.post("/of_messages", json=body) as answer:
        assert answer.status == 200
    assert json.loads(place.decode[0].others[0][2]) == {"model": "m", "input": 1}
    deep = b'{"a":' + b"[" * 5000 + b"]" * 5000 + b',"kv_transfer_params":{"remote_host":"evil"}}'
    async with place.client.post("/of_messages", data=deep) as answer:
        assert answer.status == 400
        assert "levels" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/of_messages"])
async def test_what_is_of_one_connection_goes_no_further(place: Place, path: str) -> None:
    given = {
        "Connection": "close, X-Mine",
        "X-Mine": "1",
        "Proxy-Authorization": "secret",
        "TE": "trailers",
        "Upgrade": "h2c",
        "Keep-Alive": "1",
        "Accept-Encoding": "gzip",
        "X-Other": "2",
        "Cookie": "own=1",
    }
    place.decode[0].answer_headers = {
        "Set-Cookie": "session=ALICE",
        "Proxy-Authenticate": "x",
        "X-Of-Server": "1",
    }
    async with place.client.post(path, json=BODY, headers=given) as answer:
        assert answer.status == 200
        assert answer.headers["X-Of-Server"] == "1"
        assert "Proxy-Authenticate" not in answer.headers
    seen = place.decode[0].headers[0]
    dropped = ("Connection", "X-Mine", "Proxy-Authorization", "TE", "Upgrade", "Keep-Alive")
    assert [name for name in dropped if name in seen] in ([], ["Connection"])
    assert (seen["X-Other"], seen["Cookie"], seen["Accept-Encoding"]) == ("2", "own=1", "identity")


async def test_no_client_gets_the_cookies_of_another(place: Place) -> None:
    """Servers have names here: jars ignore the cookies of addresses."""
    sides = [
        [engine.url.replace("127.0.0.1", "localhost") for engine in side]
        for side in (place.prefill, place.decode)
    ]
    async with routing(*sides) as url, ClientSession(url, cookie_jar=DummyCookieJar()) as client:
        for engine in (*place.prefill, *place.decode):
            engine.answer_headers = {"Set-Cookie": "session=ALICE; Path=/"}
        for _ in range(4):
            async with client.post("/v1/completions", json=BODY) as answer:
                assert answer.headers["Set-Cookie"] == "session=ALICE; Path=/"
    for engine in (*place.prefill, *place.decode):
        assert len(engine.headers) == 2
        assert not any("Cookie" in headers for headers in engine.headers)


async def test_redirects_are_not_followed(place: Place) -> None:
    place.decode[0].status = 307
    place.decode[0].answer_headers = {"Location": place.decode[1].url + "/v1/completions"}
    async with place.client.post("/v1/completions", json=BODY, allow_redirects=False) as answer:
        assert answer.status == 307
        assert answer.headers["Location"].startswith(place.decode[1].url)
    assert place.decode[1].asked == []


@pytest.mark.parametrize("size", [1, 513, 600, 8000])
async def test_a_long_request_id_passes(place: Place, size: int) -> None:
    status, _ = await place.post(BODY, **{"X-Request-Id": "x" * size})
    assert status == 200
    for engine in (place.prefill[0], place.decode[0]):
        assert engine.headers[0]["X-Request-Id"] == "x" * size
