# SPDX-License-Identifier: Apache-2.0
"""Answers that decode offers to the next turn: what is offered, and what prefill pulls of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from answered_turns import (
    ANSWER,
    LAYERS,
    NEXT,
    PROMPT,
    ROUTED,
    next_turn,
    offered,
    overwrite,
    pulled,
    results,
    same,
)
from vllm_server import BLOCK_TOKENS, Server, request


def test_the_next_turn_pulls_the_answer_and_is_handed_off(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7, 2])
    assert params
    assert (params["do_remote_decode"], params["remote_num_tokens"]) == (True, 16)
    turn = next_turn(params)
    before = prefill.block("layer.0", 5).clone()
    assert pulled(prefill, turn, 5, 6, 8, 10, computed=2 * BLOCK_TOKENS)
    assert same(prefill, decode, [(8, 1), (10, 7)])
    assert prefill.block("layer.0", 5).equal(before)
    # vLLM computes the rest, and asks again.
    assert prefill.scheduler.num_matched(turn, 16) == (0, False)
    blocks = [5, 6, 8, 10, 11]
    prefill.scheduler.allocated(turn, (blocks,), 0)
    prefill.step()
    turn.num_computed_tokens = turn.num_prompt_tokens
    _, handoff = prefill.scheduler.finished(turn, (blocks,), True)
    prefill.step()
    assert handoff
    assert handoff["do_remote_prefill"] is True
    assert decode.load(request("t2d", NEXT, handoff), [3, 9, 1, 7, 12], computed=16) == (4, True)
    decode.step_until(lambda: "t2d" in decode.received)
    assert same(prefill, decode, [(11, 12)])
    assert results(prefill) == {"loaded": 1}
    assert results(decode) == {"offered": 1}


def test_any_number_of_readers_use_a_ticket(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    for turn in ("a", "b", "c"):
        assert pulled(prefill, next_turn(params, turn), 5, 6, 8, 10)
        assert same(prefill, decode, [(5, 3), (6, 9), (8, 1), (10, 7)])
    assert decode.ranks[0]._worker.soft_lease_counts().active == 1


def test_only_blocks_in_the_prefix_cache_are_offered(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    decode.pool.cache(3, 9, 7)  # the third is missing
    turn = request("t1", PROMPT, ROUTED)
    params = decode.answer(turn, ANSWER, [3, 9, 1, 7])
    assert params
    assert params["remote_num_tokens"] == 2 * BLOCK_TOKENS
    assert prefill.load(next_turn(params), [5, 6]) == (8, True)


def test_rejected_drafts_are_not_offered(servers: tuple[Server, Server]) -> None:
    """Beyond the answer's last token but one, a block may hold drafts, or what a step in advance wrote."""
    _, decode = servers
    decode.pool.cache(3, 9, 1, 7, 2)
    turn = request("t1", PROMPT, ROUTED)
    turn.all_token_ids, turn.num_computed_tokens = PROMPT + ANSWER[:6], 20
    _, params = decode.scheduler.finished(turn, ([3, 9, 1, 7, 2],), True)
    assert params
    assert params["remote_num_tokens"] == 3 * BLOCK_TOKENS


def test_what_is_not_computed_again_is_not_offered(servers: tuple[Server, Server]) -> None:
    """A request that was preempted may end by a token that was in flight."""
    _, decode = servers
    decode.pool.cache(3, 9, 1, 7)
    turn = request("t1", PROMPT, ROUTED)
    turn.all_token_ids, turn.num_computed_tokens = PROMPT + ANSWER, 5
    _, params = decode.scheduler.finished(turn, ([3, 9],), True)
    assert params
    assert params["remote_num_tokens"] == BLOCK_TOKENS


@pytest.mark.parametrize(
    ("params", "complete"), [(None, True), (ROUTED, False), ({"do_remote_decode": True}, True)]
)
def test_requests_that_are_not_offered(
    servers: tuple[Server, Server], params: dict[str, Any] | None, complete: bool
) -> None:
    _, decode = servers
    decode.pool.cache(3, 9, 1, 7)
    turn = request("t1", PROMPT, params)
    turn.all_token_ids, turn.num_computed_tokens = PROMPT + ANSWER, 16
    assert decode.scheduler.finished(turn, ([3, 9, 1, 7],), complete) == (False, None)


def test_without_the_option_nothing_is_offered_and_nothing_pulled(servers: tuple[Server, Server]) -> None:
    with Server("d2") as plain:
        assert offered(plain, [3, 9, 1, 7]) is None
        turn = next_turn(offered(servers[1], [3, 9, 1, 7]))
        assert plain.load(turn, [5, 6, 8, 10, 11]) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "common"),
    [
        (NEXT, 16),
        (NEXT[:16], 12),  # the prompt's last token is computed here
        ([*NEXT[:12], 1, 2, 3, 4, 5], 12),
        ([*NEXT[:5], 1, 2, 3, 4, 5], 4),
        ([1, *NEXT[1:]], 0),
        (NEXT[:4], 0),
    ],
)
def test_what_both_turns_have_in_common_is_pulled(
    servers: tuple[Server, Server], tokens: list[int], common: int
) -> None:
    prefill, decode = servers
    turn = next_turn(offered(decode, [3, 9, 1, 7]), tokens=tokens)
    prefill.scheduler.arrived(turn)
    assert prefill.scheduler.num_matched(turn, 0) == (common, common > 0)


def test_another_adapter_has_nothing_in_common(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    turn = next_turn(offered(decode, [3, 9, 1, 7]))
    turn.lora_request = SimpleNamespace(lora_name="a", lora_path="/adapters/a", lora_int_id=1)
    prefill.scheduler.arrived(turn)
    assert prefill.scheduler.num_matched(turn, 0) == (0, False)
    assert results(prefill) == {"nothing_in_common": 1}


def test_what_prefill_has_cached_is_not_pulled(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    turn = next_turn(offered(decode, [3, 9, 1, 7]))
    assert prefill.load(turn, [5, 6, 8, 10], computed=16) == (0, False)
    assert results(prefill) == {"cached_here": 1}


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(1, 2), (2, 1), (2, 2)])
def test_other_degrees(of_prefill: int, of_decode: int) -> None:
    with (
        Server("p", tp_size=of_prefill, answer_s=600) as prefill,
        Server("d", tp_size=of_decode, answer_s=600) as decode,
    ):
        params = offered(decode, [3, 9, 1, 7])
        assert pulled(prefill, next_turn(params), 5, 6, 8, 10)
        assert all(
            prefill.block(layer, ours).equal(decode.block(layer, theirs))
            for layer in LAYERS
            for ours, theirs in ((5, 3), (6, 9), (8, 1), (10, 7))
        )
        overwrite(decode, 1)
        assert not pulled(prefill, next_turn(params, "again"), 5, 6, 8, 10)
