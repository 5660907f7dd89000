# SPDX-License-Identifier: Apache-2.0
"""Answers that decode offers to the next turn: what is offered, how offers end, and what prefill pulls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch
from answered_turns import (
    ANSWER,
    LAYERS,
    NEXT,
    PROMPT,
    ROUTED,
    bidirectional,
    next_turn,
    offered,
    overwrite,
    pulled,
    results,
)
from vllm_server import ASK_PREFILL, BLOCK_TOKENS, NUM_BLOCKS, Server, request, same
from waiting import eventually

from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.chats.earlier_turns import ANSWER_AS, ANSWER_OF
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff


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


@pytest.mark.parametrize(
    ("params", "complete", "answer", "computed", "blocks", "offered_blocks"),
    [
        pytest.param(ROUTED, True, ANSWER[:6], 20, [3, 9, 1, 7, 2], 3, id="drafts beyond the answer"),
        pytest.param(ROUTED, True, ANSWER, 5, [3, 9], 1, id="preempted, and not computed again"),
        pytest.param(None, True, ANSWER, 16, [3, 9, 1, 7], 0, id="not routed"),
        pytest.param(ROUTED, False, ANSWER, 16, [3, 9, 1, 7], 0, id="aborted"),
        pytest.param({"do_remote_decode": True}, True, ANSWER, 16, [3, 9, 1, 7], 0, id="handed off"),
    ],
)
def test_what_is_computed_for_good_is_offered(
    servers: tuple[Server, Server], params: Any, complete: bool, answer: list[int], computed: int,
    blocks: list[int], offered_blocks: int,
) -> None:  # fmt: skip
    _, decode = servers
    decode.pool.cache(3, 9, 1, 7, 2)
    turn = request("t1", PROMPT, params)
    turn.all_token_ids, turn.num_computed_tokens = PROMPT + answer, computed
    stays, handoff = decode.scheduler.finished(turn, (blocks,), complete)
    assert not stays
    assert (handoff["remote_num_tokens"] if handoff else 0) == offered_blocks * BLOCK_TOKENS


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


def test_the_ticket_of_an_answer_is_no_handoff_for_decode(servers: tuple[Server, Server]) -> None:
    _, decode = servers
    params = offered(decode, [3, 9, 1, 7])
    assert params
    with Server("d2", answer_s=600) as another:
        asked = request("x", NEXT[:16], params | {"do_remote_prefill": True, "do_remote_decode": False})
        another.load(asked, [5, 6, 8, 10])
        another.step_until(lambda: "x" in another.received)
        assert another.failed == {"x"}
        assert another.scheduler.counts["malformed"] == 1


def test_a_handoff_is_no_ticket_of_an_answer(servers: tuple[Server, Server]) -> None:
    prefill, _ = servers
    with Server("p2") as another:
        _, handoff = another.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        turn = next_turn(handoff)
        assert prefill.load(turn, [5, 6, 8, 10, 11]) == (0, False)


@pytest.mark.parametrize("spoilt", ["", "ticket", {"ticket": 1}, {"ticket": "S1ZUM"}])
def test_malformed_tickets_are_ignored(servers: tuple[Server, Server], spoilt: Any) -> None:
    prefill, _ = servers
    assert prefill.load(request("x", NEXT, {**ASK_PREFILL, KEY: spoilt}), [5, 6, 8, 10, 11]) == (0, False)
    assert results(prefill) == ({"malformed": 1} if spoilt else {})


def test_a_ticket_crosses_a_router_as_json(servers: tuple[Server, Server]) -> None:
    params = offered(servers[1], [3, 9, 1, 7])
    handoff = Handoff.from_params(json.loads(json.dumps(params)))
    assert handoff.soft
    assert handoff.digests is not None
    assert len(handoff.digests) == 4


@pytest.fixture
def coordinated(coordinator: Coordinator) -> Iterator[tuple[Server, Server]]:
    with bidirectional(coordinator=coordinator.address) as both:
        yield both


def asks_for(name: Any) -> Any:
    return request("t2", NEXT, {**ASK_PREFILL, ANSWER_OF: name})


def known(prefill: Server, turn: Any) -> tuple[int | None, bool]:
    """Returns what is to be loaded once the coordinator has answered."""
    prefill.scheduler.arrived(turn)
    eventually(lambda: prefill.scheduler.num_matched(turn, 0) != (None, False))
    return prefill.scheduler.num_matched(turn, 0)


def test_a_streamed_answer_is_offered_by_its_name(coordinated: tuple[Server, Server]) -> None:
    prefill, decode = coordinated
    decode.pool.cache(3, 9, 1, 7)
    assert decode.answer(request("t1", PROMPT, {**ROUTED, ANSWER_AS: "n"}), ANSWER, [3, 9, 1, 7])
    turn = asks_for("n")
    assert known(prefill, turn) == (16, True)
    prefill.scheduler.allocated(turn, ([5, 6, 8, 10],), 16)
    prefill.step_until(lambda: "t2" in prefill.received)
    assert same(prefill, decode, [(5, 3), (6, 9), (8, 1), (10, 7)])


@pytest.mark.parametrize("name", ["another", "", 5, None, "x" * 300])
def test_a_name_that_nobody_offered_is_computed(coordinated: tuple[Server, Server], name: Any) -> None:
    prefill, _ = coordinated
    assert known(prefill, asks_for(name)) == (0, False)
    assert results(prefill) == ({"not_offered": 1} if isinstance(name, str) and name else {})


def test_what_is_offered_under_a_name_may_be_anything(coordinated: tuple[Server, Server]) -> None:
    prefill, decode = coordinated
    announcements, owner = decode.scheduler._announcements, decode.ranks[0].rank_info.owner
    assert announcements is not None
    for number, blob in enumerate((b"x", b"[]", b"{}", b'{"kvlink": {"ticket": 1}}', b"\xff")):
        announcements.announce(f"n{number}", 0, owner, 60.0, blob, None).result(5)
        assert known(prefill, asks_for(f"n{number}")) == (0, False)
    assert results(prefill) == {"malformed": 5}


def test_a_request_that_ends_while_its_answer_is_asked_for(coordinated: tuple[Server, Server]) -> None:
    prefill, _ = coordinated
    turn = asks_for("nobody")
    prefill.scheduler.arrived(turn)
    assert prefill.scheduler.finished(turn, ([],), False) == (False, None)
    assert prefill.scheduler.num_matched(turn, 0) == (0, False)
    assert results(prefill) == {}


def test_without_a_coordinator_a_name_is_ignored(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    assert offered(decode, [3, 9, 1, 7], kv_transfer_params={**ROUTED, ANSWER_AS: "n"})
    prefill.scheduler.arrived(turn := asks_for("n"))
    assert prefill.scheduler.num_matched(turn, 0) == (0, False)
