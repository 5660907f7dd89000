# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: greedy tokens of a server that computes all itself, and never those of another image.

Decode itself is that server, asked without a handoff and with an empty prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from images import Parts, chat
from pair import Answer, Pair, eventually, prompt
from servers import ENGINES, Server, router, running
from variant_servers import refused, servers_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("variants"),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

MODEL = "idefics3"
SETTLE_S = 30.0
_CACHING = {"cached-prefixes": "--enable-prefix-caching", "nothing-cached": "--no-enable-prefix-caching"}


@pytest.fixture(scope="module", params=_CACHING)
def seeing(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with servers_of(MODEL, [_CACHING[request.param]]) as (pair, _):
        yield pair


def asked(server: Server, parts: Parts, **extra: Any) -> Answer:
    answer = chat(server.url, MODEL, parts, **extra)
    assert answer.status == 200, answer.body
    return answer


def hand_off(pair: Pair, parts: Parts) -> Any:
    answer = asked(pair.prefill, parts, num_new=1, kv_transfer_params={"do_remote_decode": True})
    assert answer.handoff, answer.body
    return answer.handoff


def text(num_tokens: int) -> list[int]:
    return prompt("about images", num_tokens)


def test_images_anywhere(seeing: Pair) -> None:
    """First, last, across the end of a block or of a chunk, and two of them."""
    messages: list[Parts] = [
        ["a", text(40)],
        [text(300), "a"],
        [text(120), "a", text(60)],
        [text(1015), "a", text(60)],
        [text(60), "a", text(70), "b", text(20)],
        ["a", "a", text(10)],
    ]
    expected = [asked(seeing.decode, parts).tokens for parts in messages]
    seeing.forget()
    loads = seeing.loads()
    for parts, tokens in zip(messages, expected, strict=True):
        handoff = hand_off(seeing, parts)
        assert asked(seeing.decode, parts, kv_transfer_params=handoff).tokens == tokens
    assert eventually(lambda: seeing.loads() == loads + len(messages), SETTLE_S)
    assert seeing.decode.metric("vllm:kvlink_failed_loads_total") == 0
    assert seeing.settles(SETTLE_S)


@pytest.mark.parametrize("images", [(("a",), ("b",)), (("a", "b"), ("b", "a"))], ids=["one", "two"])
def test_another_image_is_refused(seeing: Pair, images: tuple[tuple[str, ...], ...]) -> None:
    """The token ids are the same, and so is the size of the image."""
    first, second = ([text(200), *names, text(60)] for names in images)
    answers = [asked(seeing.decode, parts) for parts in (first, second)]
    expected = [answer.tokens for answer in answers]
    assert expected[0] != expected[1]
    assert answers[0].body["prompt_token_ids"] == answers[1].body["prompt_token_ids"]
    for computed, asks, tokens, others in (
        (first, second, *reversed(expected)),
        (second, first, *expected),
    ):
        seeing.forget()
        before = refused(seeing.decode, "another_prompt")
        handoff = hand_off(seeing, computed)
        assert asked(seeing.decode, asks, kv_transfer_params=handoff).tokens == tokens
        assert eventually(
            lambda before=before: refused(seeing.decode, "another_prompt") == before + 1, SETTLE_S
        )
        # Its blocks wait for their own reader.
        assert asked(seeing.decode, computed, kv_transfer_params=handoff).tokens == others


def test_the_text_before_another_image_is_cached(seeing: Pair) -> None:
    """Decode uses the text that it has, and nothing that it has of another image."""
    first, second = ([text(256), name, text(150)] for name in "ab")
    expected = asked(seeing.decode, second).tokens
    seeing.forget()
    asked(seeing.decode, first)
    loads = seeing.loads()
    handoff = hand_off(seeing, second)
    assert asked(seeing.decode, second, kv_transfer_params=handoff).tokens == expected
    assert eventually(lambda: seeing.loads() == loads + 1, SETTLE_S)


def test_through_the_router(seeing: Pair) -> None:
    """It passes the image on to both servers."""
    parts = [text(30), "a", text(90)]
    expected = asked(seeing.decode, parts).tokens
    seeing.forget()
    loads = seeing.loads()
    with running([router([seeing.prefill], [seeing.decode])]) as (routed,):
        assert asked(routed, parts).tokens == expected
    assert eventually(lambda: seeing.loads() == loads + 1, SETTLE_S)
