# SPDX-License-Identifier: Apache-2.0
"""The router: what a request passes through, and which paths it serves."""

from __future__ import annotations

import asyncio
import io
import json
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError, ClientSession, DummyCookieJar
from fake_engine import HANDOFF, PIECES, FakeEngine, events
from yarl import URL

from kvlink.integrations.router import choice, serving, upstream
from kvlink.integrations.router.answering import Options
from kvlink.integrations.router.choice import Ring
from kvlink.integrations.router.serving import routing
from kvlink.runtime.backoff import Backoff
from kvlink.runtime.supervised import failures

BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Place:
    """Prefill servers, decode servers, a router, a client."""

    def __init__(self, stack: AsyncExitStack, num_prefill: int = 2, num_decode: int = 2) -> None:
        self.prefill = [FakeEngine(f"p{number}") for number in range(num_prefill)]
        self.decode = [FakeEngine(f"d{number}") for number in range(num_decode)]
        self._ends: dict[str, AsyncExitStack] = {}
        self._stack = stack

    async def start(
        self,
        recompute: bool = True,
        streaming_from: int | None = None,
        control: bool = False,
        bidirectional: bool = False,
        migrate: bool = False,
    ) -> Place:
        for engine in (*self.prefill, *self.decode):
            end = self._ends[engine.name] = await self._stack.enter_async_context(AsyncExitStack())
            await end.enter_async_context(engine.serving())
        router = routing(
            [p.url for p in self.prefill],
            [d.url for d in self.decode],
            options=Options(recompute, streaming_from, bidirectional, migrate),
            control=control,
        )
        self.url = await self._stack.enter_async_context(router)
        self.client = await self._stack.enter_async_context(ClientSession(self.url))
        return self

    async def kill(self, engine: FakeEngine) -> None:
        await self._ends[engine.name].aclose()

    async def post(self, body: Any = BODY, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        async with self.client.post(path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def counts(self) -> dict[str, int]:
        async with self.client.get("/metrics") as answer:
            lines = [line.split() for line in (await answer.text()).splitlines() if not line.startswith("#")]
        values = {name.removeprefix("kvlink_router_").removesuffix("_total"): int(n) for name, n in lines}
        return {name: value for name, value in values.items() if value}


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def place(stack: AsyncExitStack) -> Place:
    return await Place(stack).start()


@pytest.fixture
def no_second_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that failed stays away for the rest of the test."""
    monkeypatch.setattr(choice, "FIRST_BACK_OFF_S", 60.0)
    monkeypatch.setattr(choice, "MOST_BACK_OFF_S", 60.0)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_prefill_then_decode_with_its_handoff(place: Place, path: str, body: Any) -> None:
    status, answer = await place.post(body, path, **{"X-Request-Id": "r1", "Authorization": "Bearer k"})
    assert (status, answer["choices"]) == (200, [{"text": "ab"}])
    (asked,) = place.prefill[0].asked
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert place.decode[0].asked == [body | {"kv_transfer_params": HANDOFF}]
    for engine in (place.prefill[0], place.decode[0]):
        assert engine.headers[0]["X-Request-Id"] == "r1"
        assert engine.headers[0]["Authorization"] == "Bearer k"
    assert await place.counts() == {"handed_off": 1}


async def test_both_sides_share_a_request_id_that_nobody_gave(place: Place) -> None:
    await place.post()
    (given,) = {engine.headers[0]["X-Request-Id"] for engine in (place.prefill[0], place.decode[0])}
    assert len(given) == 32


async def test_a_stream_arrives_piece_by_piece(place: Place) -> None:
    async with place.client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        first = await answer.content.readany()
        assert b"[DONE]" not in first
        assert events(first + await answer.read()) == [{"text": "a"}, {"text": "b"}]
    assert place.prefill[0].asked[0]["stream"] is False


async def test_servers_take_turns(place: Place) -> None:
    for _ in range(4):
        await place.post()
    assert [len(engine.asked) for engine in (*place.prefill, *place.decode)] == [2, 2, 2, 2]


async def test_without_a_handoff_decode_computes_the_prompt(place: Place) -> None:
    place.prefill[0].handoff = None
    assert (await place.post())[0] == 200
    assert place.decode[0].asked == [BODY]
    assert await place.counts() == {"without_handoff": 1}


async def test_several_continuations_do_not_share_a_handoff(place: Place) -> None:
    assert (await place.post(BODY | {"n": 2}))[0] == 200
    assert [engine.asked for engine in place.prefill] == [[], []]
    assert place.decode[0].asked == [BODY | {"n": 2}]


@pytest.mark.parametrize("how", ["killed", "dies at once", "not ready"])
async def test_the_next_prefill_server_is_asked(place: Place, how: str) -> None:
    if how == "killed":
        await place.kill(place.prefill[0])
    elif how == "dies at once":
        place.prefill[0].die = "at once"
    else:
        place.prefill[0].status = 503
    for _ in range(2):
        assert (await place.post())[0] == 200
    assert len(place.prefill[1].asked) == 2
    assert (await place.counts())["handed_off"] == 2


async def test_without_prefill_decode_computes_the_prompt(place: Place) -> None:
    for engine in place.prefill:
        await place.kill(engine)
    assert (await place.post())[0] == 200
    assert place.decode[0].asked == [BODY]
    assert (await place.counts())["without_prefill"] == 1


@pytest.mark.usefixtures("no_second_chance")
async def test_without_prefill_and_without_leave_to_recompute_it_is_503(stack: AsyncExitStack) -> None:
    place = await Place(stack).start(recompute=False)
    for engine in place.prefill:
        await place.kill(engine)
    status, answer = await place.post()
    assert status == 503
    assert "prefill" in answer["error"]["message"]
    assert (await place.client.get("/health")).status == 503


async def test_a_decode_server_that_is_gone_leaves_its_handoff_to_the_next(place: Place) -> None:
    await place.kill(place.decode[0])
    assert (await place.post())[0] == 200
    assert len(place.prefill[0].asked) == 1
    assert place.decode[1].asked == [BODY | {"kv_transfer_params": HANDOFF}]


@pytest.mark.parametrize("when", ["at once", "after the headers"])
async def test_a_handoff_that_a_dead_server_saw_is_not_used_again(place: Place, when: str) -> None:
    place.decode[0].die = when
    async with place.client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status == 200
        assert events(await answer.read()) == [{"text": "a"}, {"text": "b"}]
    assert len(place.decode[0].asked) == len(place.decode[1].asked) == 1
    assert sum(len(engine.asked) for engine in place.prefill) == 2
    assert (await place.counts())["decode_retried"] == 1


@pytest.mark.usefixtures("no_second_chance")
async def test_without_decode_it_is_503_and_prefill_is_not_asked(place: Place) -> None:
    for engine in place.decode:
        await place.kill(engine)
    statuses = [(await place.post())[0] for _ in range(2)]
    assert statuses == [503, 503]
    assert sum(len(engine.asked) for engine in place.prefill) <= 1  # before the router knew
    assert (await place.client.get("/v1/models")).status == 503


async def test_a_stream_that_breaks_does_not_look_complete(place: Place) -> None:
    place.decode[0].die = "after a piece"
    async with place.client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status == 200
        with pytest.raises(ClientError):
            await answer.read()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_hangs_up_ends_its_request(place: Place, role: str) -> None:
    engine: FakeEngine = getattr(place, role)[0]
    engine.hang = True
    asking = asyncio.create_task(place.post())
    await engine.arrived.wait()
    asking.cancel()
    await asyncio.wait_for(engine.aborted.wait(), 10)


@pytest.mark.verify
async def test_one_that_came_back_is_used_again(place: Place, stack: AsyncExitStack) -> None:
    gone = place.prefill[0]
    port = int(gone.url.rpartition(":")[2])
    await place.kill(gone)
    await place.post()
    await stack.enter_async_context(gone.serving(port))
    for _ in range(300):
        await place.post()
        if gone.asked:
            return
        await asyncio.sleep(0.1)
    pytest.fail("not one request in half a minute went to it")


async def test_one_server_stops_no_probes_of_others(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "_PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(Backoff, "delay_s", lambda self: 0.0)
    place = Place(stack)
    hung, odd, *others = (*place.prefill, *place.decode)
    hung.hangs_at_probes = True
    succeeded = Ring.succeeded

    def fail_for_odd(ring: Ring, url: str) -> None:
        if url == odd.url:
            raise LookupError("an exception that nobody expects")
        succeeded(ring, url)

    monkeypatch.setattr(Ring, "succeeded", fail_for_odd)
    before = failures().get("router probe", 0)
    await place.start()
    while min(engine.probes for engine in (odd, *others)) < 5:
        await asyncio.sleep(0)
    assert hung.probes == 1
    assert failures()["router probe"] - before >= 4


async def test_models_and_health(place: Place) -> None:
    async with place.client.get("/v1/models") as answer:
        assert (await answer.json())["data"] == [{"id": "d0"}]
    async with place.client.get("/health") as answer:
        up = await answer.json()
    assert up == {"prefill": [p.url for p in place.prefill], "decode": [d.url for d in place.decode]}


@pytest.mark.parametrize("body", ["{", "[1]"])
async def test_a_body_that_is_no_request(place: Place, body: str) -> None:
    async with place.client.post("/v1/completions", data=body) as answer:
        assert answer.status == 400
        assert "body" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("sent_in_pieces", [False, True])
async def test_a_body_above_the_limit_is_refused_and_reaches_nobody(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, sent_in_pieces: bool
) -> None:
    monkeypatch.setattr(serving, "MOST_PARSED", 1 << 20)
    place = await Place(stack).start()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"1" * (1 << 19)

    body = pieces() if sent_in_pieces else io.BytesIO(b"1" * ((1 << 20) + 1))
    async with place.client.post("/v1/completions", data=body) as answer:
        assert answer.status == 413
        output = (await answer.json())["error"]["message"]
    assert output == "the body exceeds 1 MiB, the limit of this router; send a shorter prompt"
    assert [engine.asked for engine in (*place.prefill, *place.decode)] == [[], [], [], []]


async def test_it_says_that_it_is_a_demo(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append((kind, both)))
    ready = asyncio.Event()
    serve = serving.serve([], [], "127.0.0.1", 0, Options(), lambda url: ready.set())
    running = asyncio.create_task(serve)
    await ready.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "this router is a demo, not for production"
    ]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert limits == [(resource.RLIMIT_NOFILE, (most, most))]


GENERATE = "/inference/v1/generate"
TOKENS = {
    "model": "m",
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 9, "min_tokens": 4, "seed": 1},
}


@pytest.fixture
async def path_place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(streaming_from=1000)


async def test_tokens_go_by_a_hand_off(path_place: Place) -> None:
    """Prefill is asked for one token where this path takes that."""
    status, _ = await path_place.post(TOKENS, GENERATE)
    assert status == 200
    (asked,) = path_place.prefill[0].asked
    assert asked["sampling_params"] == {"max_tokens": 1, "seed": 1}
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_tokens" not in asked
    assert path_place.decode[0].asked == [TOKENS | {"kv_transfer_params": HANDOFF}]
    assert await path_place.counts() == {"handed_off": 1}


@pytest.mark.parametrize("sampling", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_tokens_that_one_hand_off_does_not_serve(path_place: Place, sampling: dict[str, Any]) -> None:
    body = TOKENS | {"sampling_params": sampling}
    assert (await path_place.post(body, GENERATE))[0] == 200
    assert path_place.decode[0].asked == [body]
    assert await path_place.counts() == {"not_suited": 1}


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
async def test_all_other_paths_go_to_decode_as_they_are(path_place: Place, method: str, path: str) -> None:
    content = b"\x00\xffany" if method in ("POST", "PUT", "PATCH") else b""
    path_place.decode[0].answer_headers = {"X-Any": "1", "Retry-After": "3"}
    path_place.decode[0].status = 203
    url = URL(path_place.url + path, encoded=True)
    async with path_place.client.request(method, url, data=content or None) as answer:
        assert answer.status == 203
        assert answer.headers["X-Any"] == "1"
        assert json.loads(await answer.read() or b"{}") == ({} if method == "HEAD" else {"from": "d0"})
    assert path_place.decode[0].others == [(method, path, content)]
    assert [engine.asked + engine.others for engine in path_place.prefill] == [[], []]  # type: ignore[operator]
    assert await path_place.counts() == {"passed_through": 1}


async def test_streams_of_other_paths_pass(path_place: Place) -> None:
    async with path_place.client.post("/streams", data=b"{}") as answer:
        first = await answer.content.readany()
        assert first + await answer.read() == b"".join(PIECES)
        assert len(first) < len(b"".join(PIECES))


async def test_own_paths_stay_the_routers(path_place: Place) -> None:
    for path in ("/health", "/metrics"):
        assert (await path_place.client.get(path)).status == 200
    assert [engine.others for engine in path_place.decode] == [[], []]


async def test_a_client_gives_no_handoff_of_its_own(path_place: Place) -> None:
    body = {"model": "m", "kv_transfer_params": {"remote_host": "evil"}, "input": 1}
    async with path_place.client.post("/of_messages", json=body) as answer:
        assert answer.status == 200
    assert json.loads(path_place.decode[0].others[0][2]) == {"model": "m", "input": 1}
    deep = b'{"a":' + b"[" * 5000 + b"]" * 5000 + b',"kv_transfer_params":{"remote_host":"evil"}}'
    async with path_place.client.post("/of_messages", data=deep) as answer:
        assert answer.status == 400
        assert "levels" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/of_messages"])
async def test_what_is_of_one_connection_goes_no_further(path_place: Place, path: str) -> None:
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
    path_place.decode[0].answer_headers = {
        "Set-Cookie": "session=ALICE",
        "Proxy-Authenticate": "x",
        "X-Of-Server": "1",
    }
    async with path_place.client.post(path, json=BODY, headers=given) as answer:
        assert answer.status == 200
        assert answer.headers["X-Of-Server"] == "1"
        assert "Proxy-Authenticate" not in answer.headers
    seen = path_place.decode[0].headers[0]
    dropped = ("Connection", "X-Mine", "Proxy-Authorization", "TE", "Upgrade", "Keep-Alive")
    assert [name for name in dropped if name in seen] in ([], ["Connection"])
    assert (seen["X-Other"], seen["Cookie"], seen["Accept-Encoding"]) == ("2", "own=1", "identity")


async def test_no_client_gets_the_cookies_of_another(path_place: Place) -> None:
    """Servers have names here: jars ignore the cookies of addresses."""
    sides = [
        [engine.url.replace("127.0.0.1", "localhost") for engine in side]
        for side in (path_place.prefill, path_place.decode)
    ]
    async with routing(*sides) as url, ClientSession(url, cookie_jar=DummyCookieJar()) as client:
        for engine in (*path_place.prefill, *path_place.decode):
            engine.answer_headers = {"Set-Cookie": "session=ALICE; Path=/"}
        for _ in range(4):
            async with client.post("/v1/completions", json=BODY) as answer:
                assert answer.headers["Set-Cookie"] == "session=ALICE; Path=/"
    for engine in (*path_place.prefill, *path_place.decode):
        assert len(engine.headers) == 2
        assert not any("Cookie" in headers for headers in engine.headers)


async def test_redirects_are_not_followed(path_place: Place) -> None:
    path_place.decode[0].status = 307
    path_place.decode[0].answer_headers = {"Location": path_place.decode[1].url + "/v1/completions"}
    async with path_place.client.post("/v1/completions", json=BODY, allow_redirects=False) as answer:
        assert answer.status == 307
        assert answer.headers["Location"].startswith(path_place.decode[1].url)
    assert path_place.decode[1].asked == []


@pytest.mark.parametrize("size", [1, 513, 600, 8000])
async def test_a_long_request_id_passes(path_place: Place, size: int) -> None:
    status, _ = await path_place.post(BODY, **{"X-Request-Id": "x" * size})
    assert status == 200
    for engine in (path_place.prefill[0], path_place.decode[0]):
        assert engine.headers[0]["X-Request-Id"] == "x" * size
