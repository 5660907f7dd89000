# SPDX-License-Identifier: Apache-2.0
"""No body, of a client or of a server, makes a function of the router raise, or the router answer 500 of its own."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError, ClientSession
from fake_engine import FakeEngine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_router import BODY, Place

from kvlink.integrations.router import bodies, replies
from kvlink.integrations.router.bodies import HANDOFF, TooDeep, encoded, num_tokens, object_in, parsed
from kvlink.integrations.router.chats import Chats
from kvlink.integrations.router.continuation import CHATS, COMPLETIONS, can_continue, continuing_body
from kvlink.integrations.router.server_events import ServerEvents, event_of, is_comment, is_done, value_of
from kvlink.integrations.router.streamed_answer import BrokenOffError, StreamedAnswer

_NAMES = st.sampled_from(
    [
        *(
            "model",
            "prompt",
            "token_ids",
            "messages",
            "content",
            "role",
            "text",
            "type",
            "stream",
            "stream_options",
        ),
        *("include_usage", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "echo"),
        *(
            "prompt_logprobs",
            "sampling_params",
            "seed",
            "session_id",
            "stop",
            "kv_transfer_params",
            "choices",
        ),
        *(
            "delta",
            "finish_reason",
            "usage",
            "prompt_token_ids",
            "prompt_tokens",
            "completion_tokens",
            "logprobs",
        ),
        *(
            "total_tokens",
            "error",
            "code",
            "id",
            "data",
            "kvlink_announced",
            "kvlink_streams_from",
            "tool_calls",
        ),
    ]
)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-2, 5)
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["\ud800", "assistant", "user", "text", "abort", "stop", "\x00", 10**400, float("nan")])
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)
_BODIES = st.dictionaries(_NAMES, _VALUES, max_size=8)
_DEEP = b"[" * 100_000 + b"]" * 100_000
RAW = [
    b"",
    b"{",
    b"5",
    b"[]",
    b"null",
    b"NaN",
    b"\xff\xfe{\x00",
    b"\xef\xbb\xbf{}",
    '{"prompt": "é"}'.encode("latin-1"),
    '{"prompt": "x"}'.encode("utf-16"),
    b'{"prompt": ' + b"9" * 5000 + b"}",
    b'{"prompt": 1e400}',
    b'{"prompt": -Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": 1, "prompt": "a"}',
    b'{"prompt": ' + _DEEP + b"}",
    b'{"a":' * 990 + b"1" + b"}" * 990,
    b'{"a":' * 199 + b"1" + b"}" * 199,
    b'{"messages": [{"content": ' + b"[" * 150 + b"]" * 150 + b"}]}",
    *(
        b'{"prompt": %s}' % prompt
        for prompt in (b"[5]", b"[null]", b"[true]", b"[1.5]", b"[{}]", b"{}", b"[[]]")
    ),
    *(b'{"token_ids": %s}' % ids for ids in (b"[5]", b"5", b"{}", b'["a"]', b"null")),
    b'{"messages": 5, "stream": true, "stream_options": 5, "prompt": [1], "max_tokens": 3}',
    b'{"prompt": "a", "stream": true, "stream_options": [5], "max_tokens": 3}',
]


def raw_bodies() -> st.SearchStrategy[bytes]:
    return st.sampled_from(RAW) | _BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=30)


@given(_BODIES, _BODIES)
@example({"prompt": [5]}, {})
@example({"token_ids": [5]}, {HANDOFF: {"kvlink_streams_from": float("inf")}})
@example({"stream_options": 5, "stream": True, "prompt": [1]}, {})
@settings(max_examples=400)
def test_no_body_makes_a_function_raise(body: dict[str, Any], answer: dict[str, Any]) -> None:
    body, answer = parsed(encoded(body)), parsed(encoded(answer))
    assert num_tokens(body) >= 0
    bodies.one_handoff_suffices(body)
    handoff = bodies.handoff_of(answer)
    chats, headers = Chats(), {"X-Session-Id": "s"}
    for given_headers in (headers, {}):
        chats.keep(body, given_headers, answer)
        ticket = chats.ticket_for(body, given_headers)
        asked = [
            bodies.prefill_body(body, "s", "t", ticket),
            bodies.asking_for_a_ticket(bodies.following_body(body, "s", "t"), "a"),
            bodies.decode_body(body, handoff),
            bodies.asking_for_a_ticket(bodies.decode_body(body, handoff), "a"),
        ]
        assert all(object_in(encoded(one)) is not None for one in asked)
    bodies.announced(handoff, "s")
    bodies.streams_from(handoff)
    replies._without_ticket(encoded(answer), lambda ticket: None)
    for path in (COMPLETIONS, CHATS):
        if can_continue(path, body):
            encoded(continuing_body(path, body, [1], [2, 3], 9))


@given(_BODIES, st.lists(_BODIES, max_size=4))
@settings(max_examples=400)
def test_no_event_makes_an_answer_raise(body: dict[str, Any], events: list[dict[str, Any]]) -> None:
    for path in (COMPLETIONS, CHATS):
        answer = StreamedAnswer(path, parsed(encoded(body | {"max_tokens": 5, "min_tokens": None})))
        for number, event in enumerate(events):
            try:
                shown = answer.take(parsed(encoded({"choices": [], **event})))
            except BrokenOffError:
                assert answer.error is None or event_of(answer.error)
            else:
                assert shown is None or event_of(shown)
            assert answer.can_move <= answer.can_be_continued
            if number == 1 and answer.can_be_continued:
                answer.begin_continuation()
        answer.missing_usage()
        assert len(answer.last_tokens(1)) <= 64


@given(
    st.lists(
        st.sampled_from([b"data:", b" ", b"{", b"}", b"\r", b"\n", b":", b"[DONE]", b"\xff"]), max_size=12
    )
)
@settings(max_examples=400)
def test_no_stream_loses_a_byte(pieces: list[bytes]) -> None:
    events = ServerEvents()
    found = [event for piece in pieces for event in events.feed(piece)]
    assert b"".join(found) + events.rest == b"".join(pieces)
    for event in found:
        value_of(event), is_done(event), is_comment(event)


@pytest.mark.parametrize("content", RAW)
def test_raw_bodies_are_parsed_or_refused(content: bytes) -> None:
    try:
        value = parsed(content)
    except ValueError as error:
        assert len(str(error)) < 300
    else:
        encoded(value)
    try:
        bodies.without_handoff(content)
    except TooDeep:
        assert content.count(b"[") + content.count(b"{") > 200


async def _play(contents: list[bytes]) -> None:
    for options in ({"streaming_from": 1, "bidirectional": True}, {"migrate": True}):
        async with AsyncExitStack() as stack:
            place = await Place(stack).start(**options)  # type: ignore[arg-type]
            for content in contents:
                for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/x"):
                    async with place.client.post(path, data=content) as answer:
                        assert answer.status in (200, 400), (path, content[:99], await answer.text())
            assert (await place.post())[0] == 200


def test_the_router_answers_400_or_passes_on() -> None:
    asyncio.run(_play(RAW))


@given(st.lists(raw_bodies(), min_size=20, max_size=20))
@settings(max_examples=5)
def test_the_router_answers_no_500_of_its_own(contents: list[bytes]) -> None:
    asyncio.run(_play(contents))


class Answers(FakeEngine):
    """Answers anything with these bytes."""

    content, kind = b"", "application/json"

    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        from aiohttp import web

        return web.Response(body=self.content, headers={"Content-Type": self.kind})


async def _play_answers(contents: list[bytes], options: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        place = Place(stack)
        place.prefill, place.decode = [Answers("p0"), Answers("p1")], [Answers("d0"), Answers("d1")]
        await place.start(**options)
        for content in contents:
            for kind in ("application/json", "text/event-stream"):
                for engine in (*place.prefill, *place.decode):
                    engine.content, engine.kind = content, kind  # type: ignore[attr-defined]
                async with place.client.post("/v1/completions", json=BODY | {"stream": True}) as answer:
                    assert answer.status == 200
                    try:
                        got = await answer.read()
                    except ClientError:
                        continue  # cut short, which the client can see
                    if HANDOFF.encode() not in content:
                        assert got.startswith(content)


@pytest.mark.parametrize("options", [{"bidirectional": True}, {"migrate": True}, {"streaming_from": 1}, {}])
def test_no_answer_of_a_server_makes_the_router_fail(options: dict[str, Any]) -> None:
    handoffs = [b'{"kv_transfer_params": %s}' % one for one in (b"5", b"[]", b'{"a":"\\ud800"}', _DEEP)]
    handoffs.append(b'{"kv_transfer_params":' + b'{"a":' * 800 + b"1" + b"}" * 800 + b"}")
    events = [b"data: " + one + b"\n\n" for one in (*RAW, *handoffs)]
    asyncio.run(_play_answers([*RAW, *handoffs, *events, b"".join(events)], options))


async def test_a_compressed_body_is_refused_and_not_inflated() -> None:
    bomb = zlib.compress(b" " * (64 << 20), 9)
    async with AsyncExitStack() as stack:
        place = await Place(stack).start()
        tracemalloc.start()
        try:
            for path, status in (("/v1/completions", 415), ("/v1/x", 200)):
                async with place.client.post(
                    path, data=bomb, headers={"Content-Encoding": "deflate"}
                ) as answer:
                    assert answer.status == status
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert place.decode[0].others == [("POST", "/v1/x", bomb)], "it passes as it is"


@pytest.mark.parametrize("status", [200, 500])
async def test_a_compressed_answer_is_not_inflated(status: int) -> None:
    bomb = zlib.compress(b" " * (64 << 20), 9)
    async with AsyncExitStack() as stack:
        place = Place(stack)
        place.prefill, place.decode = [Answers("p0")], [Answers("d0")]
        await place.start(bidirectional=True)
        for engine in (*place.prefill, *place.decode):
            engine.content, engine.answer_headers = bomb, {"Content-Encoding": "deflate"}  # type: ignore[attr-defined]
        tracemalloc.start()
        try:
            async with (
                ClientSession(place.url, auto_decompress=False) as client,
                client.post("/v1/completions", json=BODY) as answer,
            ):
                assert await answer.read() == bomb
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


async def _said(url: str, request: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await reader.readuntil(b"\r\n")
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: \xff\xfe\r\n",
        b"POST /v1/completions HTTP/1.1\r\nX-Odd: \xe9\r\nTraceparent: \xff\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json; charset=nope\r\n",
        b"POST /v1/completions?\xff=%ff HTTP/1.1\r\n",
        b"POST /%ff%0a%00 HTTP/1.1\r\n",
        b"POST //evil/x HTTP/1.1\r\n",
        b"POST http://evil/x HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"ODD /x HTTP/1.1\r\n",
        b"CONNECT evil:80 HTTP/1.1\r\n",
    ],
)
async def test_odd_heads(head: bytes) -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack).start()
        content = json.dumps(BODY).encode()
        rest = b"Host: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content)
        line = await _said(place.url, head + rest + content)
        assert line.split()[1] in (b"200", b"400", b"404", b"405"), line
        assert all(len(engine.others) <= 1 for engine in place.decode)


@pytest.mark.parametrize("chunks", [b"zz\r\nabc\r\n", b"5\r\nab\r\n0\r\n\r\n", b"-1\r\n\r\n"])
async def test_a_body_that_is_no_body(chunks: bytes) -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack).start()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        line = await _said(place.url, head + chunks)
        assert line.split()[1] == b"400", line
