# SPDX-License-Identifier: Apache-2.0
"""The ticket of a chat's last answer goes to prefill with the next turn, to nobody else, and is not kept for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientError
from test_router import BODY, Place

from kvlink.integrations.router.chats import Chats

TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "d", "kvlink": {"secret": 1}}
USER, ANSWER, MORE = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "ab"), ("user", "and?"))
)


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        place = await Place(stack).start(bidirectional=True)
        for decode in place.decode:
            decode.ticket = TICKET
        yield place


async def ticket_sent(place: Place, number: int) -> Any:
    """Returns what prefill got with the request of that number."""
    asked = place.prefill[number % 2].asked[number // 2]["kv_transfer_params"]
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    return asked.get("kvlink")


async def test_the_next_turn_of_a_chat_brings_its_ticket(place: Place) -> None:
    path = "/v1/chat/completions"
    status, answer = await place.post(chat(USER), path)
    assert (status, answer) == (200, {"model": "d0", "choices": [{"text": "ab"}]})
    await place.post(chat(USER, ANSWER, MORE), path)
    assert await ticket_sent(place, 0) is None
    assert await ticket_sent(place, 1) == TICKET["kvlink"]
    assert await place.counts() == {"handed_off": 2, "tickets_kept": 2, "tickets_sent": 1}
    assert all("kvlink" not in engine.asked[0]["kv_transfer_params"] for engine in place.decode)


async def test_a_session_brings_its_ticket(place: Place) -> None:
    for session, expected in (("a", None), ("b", None), ("a", TICKET["kvlink"])):
        await place.post(BODY, **{"X-Session-Id": session})
        number = sum(len(engine.asked) for engine in place.prefill) - 1
        assert await ticket_sent(place, number) == expected


async def test_an_answer_without_a_handoff_has_a_ticket_too(place: Place) -> None:
    for prefill in place.prefill:
        prefill.handoff = None
    await place.post(BODY, **{"X-Session-Id": "a"})
    assert await place.counts() == {"without_handoff": 1, "tickets_kept": 1}


async def test_the_turn_after_a_streamed_answer_brings_its_name(place: Place) -> None:
    """Decode offers the answer at the coordinator under this name."""
    path = "/v1/chat/completions"
    async with place.client.post(path, json=chat(USER, stream=True)) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    name = place.decode[0].asked[0]["kv_transfer_params"]["kvlink_answer_as"]
    await place.post(chat(USER, ANSWER, MORE), path)
    asked = place.prefill[1].asked[0]["kv_transfer_params"]
    assert name
    assert asked["kvlink_answer_of"] == name
    assert asked["do_remote_decode"] is True
    assert await place.counts() == {"handed_off": 2, "tickets_kept": 2, "tickets_sent": 1}


async def test_a_stream_that_broke_off_has_no_ticket(place: Place) -> None:
    place.decode[0].die = "after a piece"
    with pytest.raises(ClientError):
        async with place.client.post("/v1/chat/completions", json=chat(USER, stream=True)) as answer:
            await answer.read()
    assert (await place.counts()).get("tickets_kept") is None


async def test_an_answer_that_followed_its_prefill_has_a_name_too() -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack).start(bidirectional=True, streaming_from=0)
        async with place.client.post("/v1/chat/completions", json=chat(USER, stream=True)) as answer:
            await answer.read()
        assert place.decode[0].asked[0]["kv_transfer_params"]["kvlink_answer_as"]
        assert (await place.counts())["tickets_kept"] == 1


async def test_without_the_option_nothing_changes() -> None:
    async with AsyncExitStack() as stack:
        place = await Place(stack).start()
        place.decode[0].ticket = place.decode[1].ticket = TICKET
        place.prefill[0].handoff = place.prefill[1].handoff = None
        for _ in range(2):
            await place.post(chat(USER), "/v1/chat/completions")
        assert "kv_transfer_params" not in place.decode[0].asked[0]
        assert await place.counts() == {"without_handoff": 2}


NOBODY: dict[str, str] = {}


def kept(*messages: Any, headers: dict[str, str] = NOBODY, **more: Any) -> Chats:
    chats = Chats()
    assert chats.keep(chat(*messages, **more), headers, TICKET)
    return chats


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ((USER, ANSWER, MORE), True),
        ((USER, ANSWER), True),
        ((USER, ANSWER, MORE, ANSWER, MORE), True),  # a turn without a ticket was between
        ((USER, MORE), False),
        ((MORE, ANSWER, MORE), False),
        ((USER,), False),
        ((), False),
    ],
)
def test_a_chat_is_known_by_the_messages_before_an_answer(messages: tuple[Any, ...], found: bool) -> None:
    assert kept(USER).ticket_for(chat(*messages), NOBODY) == (TICKET if found else None)


def test_the_latest_turn_counts() -> None:
    chats = kept(USER)
    chats.keep(chat(USER, ANSWER, MORE), NOBODY, {"second": 2})
    assert chats.ticket_for(chat(USER, ANSWER, MORE, ANSWER, MORE), NOBODY) == {"second": 2}
    assert chats.ticket_for(chat(USER, ANSWER, USER), NOBODY) == TICKET


@pytest.mark.parametrize(
    ("more", "headers"),
    [({"model": "other"}, NOBODY), ({}, {"Authorization": "Bearer other"}), ({}, {"X-Session-Id": "s"})],
)
def test_a_ticket_is_for_one_model_one_key_and_one_session(
    more: dict[str, Any], headers: dict[str, str]
) -> None:
    assert kept(USER).ticket_for(chat(USER, ANSWER, MORE, **more), headers) is None
    of_other = kept(USER, headers=headers, **more)
    assert of_other.ticket_for(chat(USER, ANSWER, MORE), NOBODY) is None
    assert of_other.ticket_for(chat(USER, ANSWER, MORE, **more), headers) == TICKET


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"messages": []}, {"messages": "x"}, {"session_id": 5}])
def test_a_request_that_names_no_chat(body: dict[str, Any]) -> None:
    chats = Chats()
    assert not chats.keep(body, NOBODY, TICKET)
    assert chats.ticket_for(body, NOBODY) is None


def test_odd_messages_are_no_error() -> None:
    chats = Chats()
    assert chats.keep(chat("x", 5, None), NOBODY, TICKET)
    assert chats.ticket_for(chat("x", 5, None, ANSWER, MORE), NOBODY) == TICKET


def test_tickets_are_bounded_in_number_bytes_and_time() -> None:
    now = [0.0]
    chats = Chats(most=3, most_bytes=1000, kept_s=10, clock=lambda: now[0])
    sessions = [{"X-Session-Id": str(number)} for number in range(5)]
    for session in sessions:
        chats.keep(BODY, session, TICKET)
    assert [chats.ticket_for(BODY, session) is not None for session in sessions] == [False] * 2 + [True] * 3
    chats.keep(BODY, sessions[0], {"long": "x" * 950})
    assert [chats.ticket_for(BODY, session) is not None for session in sessions] == [True] + [False] * 4
    chats.keep(BODY, sessions[0], {"too long": "x" * 1000})
    assert len(chats) == 0
    chats.keep(BODY, sessions[0], TICKET)
    now[0] = 9.9
    assert chats.ticket_for(BODY, sessions[0])
    now[0] = 10.0
    assert chats.ticket_for(BODY, sessions[0]) is None
    assert len(chats) == 0
    chats.keep(BODY, sessions[0], TICKET)
    chats.keep(BODY, sessions[0], {"other": 1})
    assert len(chats) == 1
