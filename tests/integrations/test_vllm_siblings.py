# SPDX-License-Identifier: Apache-2.0
"""Requests of one server under one lease: n above 1, several prompts, retries. None fails for another's haste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from test_vllm_connector import PROMPT
from vllm_server import ASK_PREFILL, Server, gone, request, same

from kvlink.integrations.vllm.prefill.lease_slots import SentTickets

LAYERS = ("layer.0", "layer.1")
BLOCKS = {"x": [4, 5, 6], "y": [7, 8, 10], "z": [11, 12, 13]}


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """No lease ends by itself."""
    with Server("p", lease_s=600) as prefill, Server("d") as decode:
        yield prefill, decode


def handed_off(prefill: Server) -> dict[str, Any]:
    return prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])


def arrive(decode: Server, params: dict[str, Any], *names: str) -> list[Any]:
    requests = [request(name, PROMPT, params) for name in names]
    for one in requests:
        decode.scheduler.incoming.arrived(one)
    return requests


def start(decode: Server, asks: Any) -> None:
    assert decode.scheduler.incoming.num_matched(asks, 0) == (10, True)
    decode.scheduler.allocated(asks, (BLOCKS[asks.request_id],), 10)


def landed(decode: Server, prefill: Server, *names: str) -> None:
    decode.step_until(lambda: decode.received.issuperset(names))
    assert not decode.failed
    for name in names:
        assert same(decode, prefill, list(zip(BLOCKS[name], [3, 9, 1], strict=True)), LAYERS)


def ends(prefill: Server) -> None:
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)


def test_both_read_and_the_last_gives_the_blocks_back(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    x, y = arrive(decode, handed_off(prefill), "x", "y")
    start(decode, x)
    landed(decode, prefill, "x")
    prefill.step()
    assert not prefill.sent, "y reads later"
    start(decode, y)
    landed(decode, prefill, "y")
    ends(prefill)
    assert decode.scheduler.take_counts() == {}


def test_they_may_read_at_once(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    for asks in arrive(decode, handed_off(prefill), "x", "y", "z"):
        start(decode, asks)
    landed(decode, prefill, "x", "y", "z")
    ends(prefill)


@pytest.mark.parametrize("how", ["aborted", "cached", "rejected"])
def test_one_that_reads_nothing_takes_nothing_from_the_others(
    servers: tuple[Server, Server], how: str
) -> None:
    prefill, decode = servers
    x, y = arrive(decode, handed_off(prefill), "x", "y")
    if how == "aborted":
        decode.scheduler.finished(y, ([],), False)
    elif how == "cached":
        decode.scheduler.allocated(y, (BLOCKS["y"],), 0)
    else:
        notice = request("n", [0], y.kv_transfer_params)
        notice.abort_immediately = True
        decode.scheduler.incoming.arrived(notice)
        decode.scheduler.finished(notice, ([],), False)
        decode.scheduler.finished(y, ([],), False)
    start(decode, x)
    landed(decode, prefill, "x")
    ends(prefill)
    assert decode.scheduler.take_counts() == {}


def test_the_last_to_go_gives_them_back_unread(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    for asks in arrive(decode, handed_off(prefill), "x", "y"):
        decode.scheduler.finished(asks, ([],), False)
    ends(prefill)
    assert decode.scheduler.take_counts() == {"released": 1}


def test_one_that_comes_while_the_lease_is_being_settled_waits_and_computes(
    servers: tuple[Server, Server],
) -> None:
    """The blocks that the first loaded may be in the prefix cache by then."""
    prefill, decode = servers
    params = handed_off(prefill)
    [x] = arrive(decode, params, "x")
    start(decode, x)
    [y] = arrive(decode, params, "y")
    assert decode.awaits(y)
    landed(decode, prefill, "x")
    assert decode.scheduler.incoming.num_matched(y, 8) == (0, False)
    assert decode.scheduler.take_counts() == {"used_already": 1}
    decode.scheduler.finished(y, ([],), True)
    ends(prefill)
    assert decode.scheduler.take_counts() == {}


def test_a_load_that_fails_leaves_the_lease_to_the_others(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    x, y = arrive(decode, handed_off(prefill), "x", "y")
    start(decode, x)
    commands = decode.scheduler.take_commands()
    decode.scheduler._commands.loads = commands.loads
    decode.scheduler.incoming.received({"x"}, {"x"})
    decode.scheduler._commands.loads.clear()
    start(decode, y)
    landed(decode, prefill, "y")
    ends(prefill)


def test_what_was_used_is_not_released_once_more(servers: tuple[Server, Server]) -> None:
    """vLLM's notice also follows a request that failed after its load."""
    prefill, decode = servers
    params = handed_off(prefill)
    [x] = arrive(decode, params, "x")
    start(decode, x)
    landed(decode, prefill, "x")
    notice = request("n", [0], params)
    notice.abort_immediately = True
    decode.scheduler.incoming.arrived(notice)
    assert decode.scheduler.take_counts() == {}
    ends(prefill)


def test_of_several_prefills_of_one_request_the_last_is_handed_off(servers: tuple[Server, Server]) -> None:
    """vLLM makes n children of a request, and answers with what the last of them said."""
    prefill, decode = servers
    prefill.prefill(request("0_r", PROMPT, ASK_PREFILL), [2, 4, 6])
    _, params = prefill.prefill(request("1_r", PROMPT, ASK_PREFILL), [3, 9, 1])
    prefill.prefill(request("1_other", PROMPT, ASK_PREFILL), [5, 7, 8])
    prefill.step_until(lambda: "0_r" in prefill.sent)
    assert params
    [x] = arrive(decode, params, "x")
    start(decode, x)
    landed(decode, prefill, "x")
    prefill.step_until(lambda: prefill.sent == {"0_r", "1_r"})


def test_children_of_other_prompts_keep_their_leases(servers: tuple[Server, Server]) -> None:
    prefill, _ = servers
    prefill.prefill(request("0_r", PROMPT, ASK_PREFILL), [2, 4, 6])
    prefill.prefill(request("1_r", PROMPT[1:], ASK_PREFILL), [3, 9, 1])
    for _ in range(3):
        prefill.step()
    assert not prefill.sent


def test_a_reset_ends_the_leases_that_nobody_has_read(servers: tuple[Server, Server]) -> None:
    """Through the report, so that vLLM frees no block that may still be read; a reader that comes later is refused."""
    prefill, decode = servers
    params = handed_off(prefill)
    assert prefill.scheduler.reset() is False, "blocks are still in use"
    assert not prefill.sent
    ends(prefill)
    assert prefill.scheduler.reset() is True
    [x] = arrive(decode, params, "x")
    start(decode, x)
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}


def test_the_last_of_several_answers_replaces_the_one_before() -> None:
    sent = SentTickets()
    assert [sent.add(name, "prompt") for name in ("0_r", "1_r", "2_r")] == [[], ["0_r"], ["1_r"]]
    assert sent.add("3_r", "another prompt") == []
    assert [sent.add(name, "prompt") for name in ("r", "r_1", "0_other")] == [[], [], []]
    sent.ended("2_r")
    sent.ended("2_r")
    assert sent.add("4_r", "prompt") == []
    assert sent.all() == ["0_r", "1_r", "3_r", "r", "r_1", "0_other", "4_r"]
    assert len(sent) == 7
