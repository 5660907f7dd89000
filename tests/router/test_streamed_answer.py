# SPDX-License-Identifier: Apache-2.0
"""One answer of several servers: the events that its client gets, and the request that each server gets."""

from __future__ import annotations

from typing import Any

import pytest

from kvlink.integrations.router import server_events
from kvlink.integrations.router.continuation import CHATS, COMPLETIONS, can_continue
from kvlink.integrations.router.server_events import ServerEvents, event_of, is_comment, is_done, value_of
from kvlink.integrations.router.streamed_answer import BrokenOffError, StreamedAnswer

BODY = {"model": "m", "prompt": "a b", "max_tokens": 9, "stream": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def completion(text: str, ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish, **more}
    return {"id": "c1", "object": "text_completion", "created": 5, "model": "m", "choices": [choice]}


def chat(content: str, ids: list[int] | None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return {"id": "h1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [choice]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.7, "seed": 3, "top_p": 0.9, "stop_token_ids": [2], "logit_bias": {"1": 2}},
        {"n": 1, "best_of": 1, "stop": None, "logprobs": None, "echo": False, "presence_penalty": 0.0},
        {"stop": [], "logprobs": False, "tools": [], "of_a_later_version": None},
        {"response_format": {"type": "text"}, "stream_options": {"include_usage": True}},
    ],
)
def test_requests_that_another_server_can_continue(more: dict[str, Any]) -> None:
    assert can_continue(COMPLETIONS, BODY | more)
    assert can_continue(CHATS, CHAT | more)


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logprobs": 1},
        {"logprobs": 0},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"bad_words": ["x"]},
        {"tools": [{"type": "function"}]},
        {"of_a_later_version": 1},
        {"of_a_later_version": False},
        {"thinking_token_budget": 0},
        {"watermarking": False},
        {"spaces_between_special_tokens": False},
        {"max_tokens": "9"},
        {"max_tokens": True},
        {"min_tokens": 1.0},
        {"vllm_xargs": {"a": 1}},
    ],
)
def test_requests_whose_rest_depends_on_more_than_the_tokens(more: dict[str, Any]) -> None:
    assert not can_continue(COMPLETIONS, BODY | more)
    assert not can_continue(CHATS, CHAT | more)


def test_other_requests_that_are_not_continued() -> None:
    image = {
        "role": "user",
        "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": "u"}],
    }
    assert not can_continue(CHATS, CHAT | {"messages": [image]})
    assert not can_continue("/inference/v1/generate", BODY)
    assert not can_continue(COMPLETIONS, BODY | {"prompt": ["a", "b"]})


def test_a_completion_goes_on_where_it_was() -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY | {"min_tokens": 3, "seed": 1})
    assert answer.first_request()["return_token_ids"] is True
    assert not answer.can_move, "nothing is known of it"
    first = answer.take(completion("x", [7], prompt_token_ids=[1, 2]))
    assert first == completion("x", [7]) | {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    answer.take(completion("y", [8]))
    answer.take(completion("z", [9]))
    assert answer.can_move
    assert not answer.needs_check
    path, asked = answer.begin_continuation()
    assert path == COMPLETIONS
    assert asked == {
        "model": "m",
        "prompt": [1, 2, 7, 8, 9],
        "max_tokens": 6,
        "min_tokens": 0,
        "seed": 1,
        "stream": True,
        "vllm_xargs": {"kvlink_drawn": 3},
        "return_token_ids": True,
    }
    other = completion("w", [4], "length", prompt_token_ids=[1, 2, 7, 8, 9]) | {"id": "c2", "created": 6}
    assert answer.take(other) == completion("w", [4], "length") | {
        "choices": [{"index": 0, "text": "w", "finish_reason": "length"}]
    }
    assert answer.is_finished


def test_tokens_without_text_are_computed_again() -> None:
    """A character may need several tokens, and its text comes with the last one."""
    answer = StreamedAnswer(COMPLETIONS, BODY)
    answer.take(completion("x", [7], prompt_token_ids=[1]))
    answer.take(completion("", [8]))
    assert not answer.can_move
    assert answer.begin_continuation()[1]["prompt"] == [1, 7]
    answer.take(completion("", [8]))
    answer.take(completion("é", [9]))
    assert answer.can_move
    assert answer.begin_continuation()[1]["prompt"] == [1, 7, 8, 9]


def test_a_chat_goes_on_as_a_completion_and_looks_like_a_chat() -> None:
    answer = StreamedAnswer(CHATS, CHAT | {"max_completion_tokens": 5, "max_tokens": 50})
    begun = chat("", None, role="assistant") | {"prompt_token_ids": [1, 2]}
    assert answer.take(begun) == chat("", None, role="assistant")
    answer.take(chat("x", [7]))
    path, asked = answer.begin_continuation()
    assert (path, asked["prompt"], asked["max_tokens"]) == (COMPLETIONS, [1, 2, 7], 4)
    assert "messages" not in asked
    assert answer.take(completion("y", [8], "stop", prompt_token_ids=[1, 2, 7])) == chat("y", None, "stop")


def test_a_chat_without_a_limit_has_the_models() -> None:
    answer = StreamedAnswer(CHATS, CHAT)
    answer.take(chat("", None, role="assistant") | {"prompt_token_ids": [1]})
    assert not answer.needs_limit, "the chat would be asked again"
    answer.take(chat("x", [7]))
    assert answer.needs_limit
    answer.model_limit = 10
    assert answer.begin_continuation()[1]["max_tokens"] == 8


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}])
def test_completions_have_openais_default_limit(more: dict[str, Any]) -> None:
    answer = StreamedAnswer(COMPLETIONS, {"prompt": [1], "stream": True} | more)
    answer.take(completion("x", [7], prompt_token_ids=[1]))
    assert answer.begin_continuation()[1]["max_tokens"] == 15


def test_an_event_with_several_tokens_is_checked() -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY)
    answer.take(completion("xy", [7, 8, 9], prompt_token_ids=[1]))
    assert answer.needs_check
    assert answer.last_tokens(0) == [1, 7, 8, 9]
    assert not answer.ends_with("axy\ufffd", 0)
    assert answer.last_tokens(1) == [1, 7, 8]
    assert answer.ends_with("axy", 1)
    assert not answer.needs_check
    assert answer.begin_continuation()[1]["prompt"] == [1, 7, 8]


def test_a_chats_text_is_compared() -> None:
    answer = StreamedAnswer(CHATS, CHAT)
    answer.take(chat("", None, role="assistant") | {"prompt_token_ids": [1]})
    answer.take(chat("x", [7]))
    answer.take(chat("y", [8]))
    assert answer.needs_check
    assert not answer.ends_with("axy<", 0)
    assert answer.ends_with("axy", 1)


def test_before_the_first_text_the_request_is_asked_again() -> None:
    answer = StreamedAnswer(CHATS, CHAT)
    answer.take(chat("", None, role="assistant") | {"prompt_token_ids": [1, 2]})
    assert not answer.can_move
    assert answer.begin_continuation() == (CHATS, CHAT | {"return_token_ids": True})
    assert answer.take(chat("", None, role="assistant")) is None, "the client has it"
    assert answer.take(chat("x", [7])) == chat("x", None)


def test_usage_counts_all_tokens() -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY)
    answer.take(completion("xy", [7, 8], prompt_token_ids=[1, 2, 3]))
    answer.begin_continuation()
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    usage |= {"prompt_tokens_details": {"cached_tokens": 4}}
    event = answer.take({"id": "c2", "choices": [], "usage": usage})
    assert event is not None
    assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


@pytest.mark.parametrize(
    "event", [{"error": {"message": "engine died"}}, {"error": "\ud800"}, completion("", [], "abort")]
)
def test_servers_that_give_up(event: dict[str, Any]) -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY)
    answer.take(completion("x", [7], prompt_token_ids=[1]))
    with pytest.raises(BrokenOffError):
        answer.take(event)
    assert answer.can_be_continued
    assert answer.begin_continuation()[1]["prompt"] == [1, 7]


@pytest.mark.parametrize(
    "event",
    [chat("x", None), chat("", [7], reasoning="hm"), chat("", [7], tool_calls=[{"index": 0}])],
    ids=["no tokens", "reasoning", "tools"],
)
def test_text_that_is_not_that_of_the_tokens_cannot_go_on(event: dict[str, Any]) -> None:
    answer = StreamedAnswer(CHATS, CHAT)
    answer.take(event)
    assert not answer.can_be_continued


def test_a_client_that_asked_for_tokens_gets_them() -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY | {"return_token_ids": True})
    first = completion("x", [7], prompt_token_ids=[1])
    assert answer.take(first) == first
    assert answer.take(completion("", [9])) == completion("", []), "it is computed again"
    answer.begin_continuation()
    assert answer.take(completion("y", [8], prompt_token_ids=[1, 7])) == completion("y", [8])


@pytest.mark.parametrize(
    "event",
    [
        {"object": "?"},
        {"choices": {}},
        {"choices": [5]},
        {"choices": [None]},
        completion("x", [7], prompt_token_ids="1"),
        completion("x", [7.5]),  # type: ignore[list-item]
        completion(5, [7]),  # type: ignore[arg-type]
        completion("x", [7]) | {"choices": [{"delta": [1]}]},
        completion("x", [7]) | {"usage": {"prompt_tokens": None}},
        completion("x", [7]) | {"usage": 5},
        completion("x", [7], finish={}),  # type: ignore[arg-type]
    ],
)
def test_an_event_of_another_form_goes_to_the_client_and_nobody_else_continues(event: dict[str, Any]) -> None:
    answer = StreamedAnswer(COMPLETIONS, BODY)
    answer.take(completion("x", [7], prompt_token_ids=[1]))
    assert answer.can_be_continued
    assert answer.take(event) is event
    assert answer.is_foreign
    assert not answer.can_be_continued
    assert answer.take(completion("y", [8])) is not None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_in_any_pieces(end: str) -> None:
    values = [{"a": "é"}, {"b": "\n"}]
    usual = b"".join(map(event_of, values)) + b": comment\n\ndata: [DONE]\n\n"
    whole = usual.replace(b"\n", end.encode())
    for cut in range(len(whole) + 1):
        events = ServerEvents()
        found = events.feed(whole[:cut]) + events.feed(whole[cut:])
        assert b"".join(found) + events.rest == whole, "no byte is lost or changed"
        assert events.rest in (b"", b"\n")
        assert [value_of(event) for event in found] == [*values, None, None]
        assert [is_comment(event) for event in found] == [False, False, True, False]
        assert [is_done(event) for event in found] == [False, False, False, True]


def test_an_event_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_events, "MOST_PARSED", 1 << 10)
    events = ServerEvents()
    assert events.feed(bytes(1 << 10)) == []
    assert events.feed(b"x") == [bytes(1 << 10) + b"x"]
    assert events.rest == b""


def test_lone_surrogates_are_written() -> None:
    assert event_of({"a": "\ud800é"}) == b'data: {"a":"\\ud800\\u00e9"}\n\n'
