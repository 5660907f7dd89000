# SPDX-License-Identifier: Apache-2.0
"""Offers of answers that end: prefill computes then, and never has other bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch
from answered_turns import (
    ANSWER,
    LAYERS,
    PROMPT,
    ROUTED,
    next_turn,
    offered,
    overwrite,
    pulled,
    results,
)
from vllm_server import NUM_BLOCKS, Server, request


@pytest.mark.parametrize("block", [3, 7])
def test_a_block_with_other_content_ends_the_offer_before_it_is_written(
    servers: tuple[Server, Server], block: int
) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    overwrite(decode, block)
    assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)
    assert results(prefill) == {"evicted": 1}


def test_a_block_that_is_offered_and_given_away_in_one_step(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    decode.pool.cache(3, 9, 1, 7)
    turn = request("t1", PROMPT, ROUTED)
    turn.all_token_ids, turn.num_computed_tokens = PROMPT + ANSWER, 16
    _, params = decode.scheduler.finished(turn, ([3, 9, 1, 7],), True)
    overwrite(decode, 9)
    assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)
    assert results(prefill) == {"evicted": 1}


def test_other_blocks_leave_the_offer(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    decode.pool.give_away(2, 4, 11)
    decode.step()
    assert pulled(prefill, next_turn(params), 5, 6, 8, 10)


def test_a_reset_of_the_prefix_cache_ends_all_offers(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    assert not decode.scheduler.turns.pending
    assert decode.pool.reset_prefix_cache()
    assert decode.scheduler.turns.pending  # vLLM makes a step for it
    decode.step()
    assert not decode.scheduler.turns.pending
    assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_what_else_makes_cached_blocks_invalid(servers: tuple[Server, Server], how: str) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    if how == "evicted":
        decode.pool.evict_blocks({1})
    else:
        assert decode.scheduler.reset()
    decode.step()
    assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)


def test_an_offer_expires() -> None:
    with Server("p", answer_s=600) as prefill, Server("d", answer_s=0.001) as decode:
        params = offered(decode, [3, 9, 1, 7])
        decode.step_until(lambda: decode.ranks[0]._worker.soft_lease_counts().expired)
        assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)
        assert results(prefill) == {"expired": 1}


def test_a_restarted_server_has_no_offer(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    for rank in decode.ranks:
        rank.close()
    decode.start()
    assert not pulled(prefill, next_turn(params), 5, 6, 8, 10)
    assert sum(results(prefill).values()) == 1


def test_the_oldest_offer_ends_when_slots_run_out(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    tickets = [offered(decode, [3, 9, 1, 7], f"t{i}") for i in range(17)]
    assert not pulled(prefill, next_turn(tickets[0], "oldest"), 5, 6, 8, 10)
    assert results(prefill) == {"reused": 1}
    assert pulled(prefill, next_turn(tickets[1], "kept"), 5, 6, 8, 10)


def test_a_pool_that_evicts_all_the_time_gives_no_wrong_byte(servers: tuple[Server, Server]) -> None:
    """Turns are offered, given away and pulled in any order; a load that ends well has the bytes of its own answer."""
    prefill, decode = servers
    chosen, well, turns = random.Random(7), 0, []
    for number in range(300):
        blocks = chosen.sample(range(1, NUM_BLOCKS), 4)
        fill = torch.randint(0, 255, (2, 4, *decode.block("layer.0", 1).shape), dtype=torch.uint8)
        decode.pool.give_away(*blocks)

        def write(blocks: list[int] = blocks, fill: Any = fill) -> None:
            for layer, name in enumerate(LAYERS):
                for index, block in enumerate(blocks):
                    decode.caches[0][name][block] = fill[layer, index]

        decode.step(compute=write)
        turns.append((offered(decode, blocks, f"a{number}"), fill))
        params, expected = chosen.choice(turns[-4:])
        turn = next_turn(params, f"b{number}")
        prefill.load(turn, [5, 6, 8, 10])
        if chosen.random() < 0.5:  # while it is pulled
            overwritten = chosen.randrange(1, NUM_BLOCKS)
            decode.pool.give_away(overwritten)
            decode.step(compute=lambda block=overwritten: decode.caches[0]["layer.0"][block].fill_(255))
        prefill.step_until(lambda name=turn.request_id: name in prefill.received)
        if turn.request_id in prefill.failed:
            continue
        well += 1
        got = torch.stack([torch.stack([prefill.block(name, b) for b in (5, 6, 8, 10)]) for name in LAYERS])
        assert got.equal(expected)
    assert 30 < well < 300
