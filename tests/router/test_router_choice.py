# SPDX-License-Identifier: Apache-2.0
"""The router's decisions: whose turn it is, who is away for how long, and what each side is asked."""

from __future__ import annotations

import pytest

from kvlink.integrations.router.bodies import (
    HANDOFF,
    decode_body,
    handoff_of,
    one_handoff_suffices,
    prefill_body,
)
from kvlink.integrations.router.choice import FIRST_BACK_OFF_S, MOST_BACK_OFF_S, Ring

URLS = ["http://a", "http://b", "http://c"]
CLIENTS = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "min_tokens": 3, "stream": True, "seed": 7}


def test_servers_take_turns() -> None:
    ring = Ring(URLS)
    assert [ring.choose(0) for _ in range(6)] == URLS * 2


def test_the_tried_are_left_out() -> None:
    ring = Ring(URLS)
    tried: list[str] = []
    while (url := ring.choose(0, tried)) is not None:
        tried.append(url)
    assert tried == URLS


def test_one_that_failed_stays_away_and_comes_back() -> None:
    ring = Ring(URLS)
    ring.failed("http://b", now_s=100)
    assert [ring.choose(100) for _ in range(4)] == ["http://a", "http://c"] * 2
    assert "http://b" in [ring.choose(100 + FIRST_BACK_OFF_S) for _ in range(3)]


def test_an_answer_ends_the_back_off() -> None:
    ring = Ring(URLS[:1])
    ring.failed(URLS[0], now_s=100)
    assert ring.choose(100) is None
    ring.succeeded(URLS[0])
    assert ring.choose(100) == URLS[0]


def test_back_off_doubles_up_to_its_limit() -> None:
    ring, now_s, waits = Ring(URLS[:1]), 0.0, []
    for _ in range(8):
        ring.failed(URLS[0], now_s)
        wait_s = FIRST_BACK_OFF_S
        while not ring.available(URLS[0], now_s + wait_s):
            wait_s += FIRST_BACK_OFF_S
        waits.append(wait_s)
        now_s += wait_s
    assert waits[:3] == [FIRST_BACK_OFF_S, 2 * FIRST_BACK_OFF_S, 4 * FIRST_BACK_OFF_S]
    assert waits[-1] == MOST_BACK_OFF_S


def test_a_draining_server_is_left_out_until_it_has_been_replaced() -> None:
    ring = Ring(URLS[:2])
    ring.drain("http://a")
    ring.succeeded("http://a")  # it still answers what it has
    assert ring.draining("http://a")
    assert [ring.choose(0) for _ in range(3)] == ["http://b"] * 3
    ring.failed("http://a", now_s=0)
    assert ring.draining("http://a")
    ring.succeeded("http://a")
    assert not ring.draining("http://a")
    assert sorted(str(ring.choose(0)) for _ in range(2)) == URLS[:2]


@pytest.mark.parametrize(
    ("times", "replaced"),
    [
        (["1.0", "1.0"], False),
        (["1.0", "2.0"], True),
        (["", "1.0"], False),
        (["1.0", ""], False),
        (["1.0", "", "2.0"], True),
    ],
)
def test_a_server_that_began_at_another_time_was_replaced(times: list[str], replaced: bool) -> None:
    ring = Ring(URLS[:2])
    ring.began("http://a", "an earlier process")
    ring.drain("http://a", times[0])
    for when in times:
        ring.began("http://a", when)
        ring.succeeded("http://a")
    assert ring.draining("http://a") is not replaced


def test_draining_can_be_undone() -> None:
    ring = Ring(URLS[:1])
    ring.drain(URLS[0])
    assert ring.choose(0) is None
    ring.resume(URLS[0])
    assert ring.choose(0) == URLS[0]


def test_prefill_computes_one_token_and_keeps_its_blocks() -> None:
    asked = prefill_body(CLIENTS)
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
    assert "min_tokens" not in asked
    assert asked["seed"] == 7
    handoff = asked[HANDOFF]
    assert (handoff["do_remote_decode"], handoff["do_remote_prefill"]) == (True, False)
    assert [
        handoff[key] for key in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    ] == [None] * 4


def test_decode_gets_the_clients_body_and_the_handoff_untouched() -> None:
    handoff = {"do_remote_prefill": True, "unknown": {"deep": [1]}}
    assert decode_body(CLIENTS, handoff) == CLIENTS | {HANDOFF: handoff}
    assert decode_body(CLIENTS | {HANDOFF: {"stale": True}}, None) == CLIENTS


@pytest.mark.parametrize("answer", [{}, {HANDOFF: None}, {HANDOFF: {}}, {HANDOFF: "text"}, [], None])
def test_an_answer_without_a_handoff(answer: object) -> None:
    assert handoff_of(answer) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
    ],
)
def test_what_one_handoff_cannot_serve(extra: dict[str, object]) -> None:
    assert one_handoff_suffices(CLIENTS)
    assert one_handoff_suffices({"messages": [], "n": 1})
    assert not one_handoff_suffices(CLIENTS | extra)
