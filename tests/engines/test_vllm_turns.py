# SPDX-License-Identifier: Apache-2.0
"""Chats of several turns on two real servers: prefill computes what is new, and no token differs from a plain server's.

Whatever happens to an answer's blocks at decode meanwhile, the prompt is computed and the tokens are the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from chats import ANSWER_S, MODEL, NUM_ANSWER, Chat, bidirectional, computed, plain, say, turns, words
from pair import Pair, ask, eventually, prompt, stream
from servers import ENGINES, Server, post, router, running

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

NUM_BLOCKS = 24
"""One chat fits into a pool, two do not."""
COUNTED_S = 15.0
_SIX = Chat("six turns", 6)
_ONE_EACH = {
    name: Chat(name, 3, 200) for name in ("evicted", "reset", "expired", "edited", "streamed", "restarted")
}
_MANY = [Chat(f"one of many {number}", 4, 150 + 40 * number) for number in range(6)]


@pytest.fixture(scope="module")
def chats() -> None:
    """The right answers. The plain server has ended when the others start."""
    with plain() as answer:
        for chat in (_SIX, *_ONE_EACH.values(), *_MANY):
            chat.learn(answer)


@pytest.fixture(scope="module")
def both(chats: None) -> Iterator[Pair]:
    with bidirectional(NUM_BLOCKS) as pair:
        yield pair


@pytest.fixture
def through(both: Pair) -> Iterator[Server]:
    with running([router([both.prefill], [both.decode], "--bidirectional")]) as (server,):
        yield server


def have(through: Server, chat: Chat, turn: int) -> None:
    """Has one turn, and compares its answer."""
    session = {"session_id": chat.name}
    answer = ask(through.url, MODEL, chat.prompts[turn], NUM_ANSWER, **session)
    assert answer.status == 200, answer.body
    assert answer.tokens == chat.answers[turn], (chat.name, turn)


def results_of(both: Pair, result: str, before: float) -> bool:
    return eventually(lambda: turns(both, result) == before + 1, COUNTED_S)


def test_six_turns(both: Pair, through: Server) -> None:
    """By messages alone, as a client of OpenAI's API has them."""
    counts = []
    for turn in range(6):
        before = computed(both)
        assert say(through.url, _SIX, turn) == words(_SIX.answers[turn]), turn
        assert eventually(lambda before=before: computed(both) > before, COUNTED_S)
        counts.append(computed(both) - before)
    print("computed by prefill:", counts, "prompts:", [len(tokens) for tokens in _SIX.prompts])
    assert counts == [_SIX.new_tokens(turn) for turn in range(6)]
    assert eventually(lambda: turns(both, "loaded") == 5, COUNTED_S)
    assert through.metric("kvlink_router_tickets_sent_total") == 5


@pytest.mark.parametrize("how", ["evicted", "reset", "expired"])
def test_what_ends_an_offer(both: Pair, through: Server, how: str) -> None:
    chat, result = _ONE_EACH[how], "expired" if how == "expired" else "evicted"
    have(through, chat, 0)
    if how == "evicted":
        for part in range(2):  # other requests get every free block
            assert both.ask(both.decode, prompt(f"evicting {part}", 1900), 1).status == 200
    elif how == "reset":
        assert post(f"{both.decode.url}/reset_prefix_cache", {}) == (200, {"success": True})
    else:
        time.sleep(ANSWER_S + 1)
    before, loaded, was = turns(both, result), turns(both, "loaded"), computed(both)
    have(through, chat, 1)
    assert results_of(both, result, before)
    assert computed(both) - was > chat.new_tokens(1)
    have(through, chat, 2)
    assert results_of(both, "loaded", loaded)


def test_a_message_that_was_edited(both: Pair, through: Server) -> None:
    """The ticket covers more than the prompt has in common with it."""
    chat, before = _ONE_EACH["edited"], turns(both, "loaded")
    have(through, chat, 0)
    have(through, chat, 1)
    assert results_of(both, "loaded", before)
    have(through, chat, 1)
    edited = [*chat.prompts[0][:140], *prompt("edited", 200)]
    alone = both.ask(both.decode, edited, NUM_ANSWER)
    asked = ask(through.url, MODEL, edited, NUM_ANSWER, session_id=chat.name)
    assert asked.tokens == alone.tokens
    have(through, chat, 2)


def test_streamed_answers(both: Pair, through: Server) -> None:
    """They carry no ticket, so decode offers them at the coordinator, by the router's name."""
    chat, before = _ONE_EACH["streamed"], turns(both, "loaded")
    for turn in range(3):
        tokens = chat.prompts[turn]
        events = stream(through.url, MODEL, tokens, max_tokens=NUM_ANSWER, session_id=chat.name)
        assert list(itertools.chain(*events)) == chat.answers[turn], turn
    assert eventually(lambda: turns(both, "loaded") == before + 2, COUNTED_S)


def test_a_pool_that_evicts_all_the_time(both: Pair, through: Server) -> None:
    """Six chats at once in pools that hold one or two."""
    before = {result: turns(both, result) for result in ("loaded", "evicted")}

    def has(chat: Chat) -> list[bool]:
        session = {"session_id": chat.name}
        output = []
        for tokens, expected in zip(chat.prompts, chat.answers, strict=True):
            answer = ask(through.url, MODEL, tokens, NUM_ANSWER, **session)
            assert answer.status == 200, answer.body
            output.append(answer.tokens == expected)
        return output

    with ThreadPoolExecutor(len(_MANY)) as pool:
        output = list(pool.map(has, _MANY))
    assert sum(len(one) for one in output) == 24
    came = {result: turns(both, result) - count for result, count in before.items()}
    print("turns:", came)
    assert all(itertools.chain(*output)), output
    assert all(came.values()), came


def test_decode_is_restarted(both: Pair, through: Server) -> None:
    """And its router knows it by the same address."""
    chat = _ONE_EACH["restarted"]
    have(through, chat, 0)
    both.decode.kill()
    both.decode = both.decode.restarted().wait()
    assert eventually(through.healthy, COUNTED_S)  # the router has seen it again
    known = ("restarted", "unreachable", "PeerUnreachable", "TransferTimeout", "never_granted")
    before = sum(turns(both, result) for result in known)
    loaded = turns(both, "loaded")
    have(through, chat, 1)
    assert eventually(lambda: sum(turns(both, result) for result in known) == before + 1, COUNTED_S)
    have(through, chat, 2)
    assert results_of(both, "loaded", loaded)


def test_the_chats_are_what_they_claim(chats: None) -> None:
    for chat in (_SIX, *_MANY):
        assert all(later[: len(first)] == first for first, later in pairwise(chat.prompts))
        assert all(len(answer) == NUM_ANSWER for answer in chat.answers)
