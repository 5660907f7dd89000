# SPDX-License-Identifier: Apache-2.0
"""Tickets of answers, and the names of streamed ones: what prefill and decode make of any that a router may send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from answered_turns import ANSWER, NEXT, PROMPT, ROUTED, bidirectional, next_turn, offered, results, same
from vllm_server import ASK_PREFILL, Server, request
from waiting import eventually

from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.chats.earlier_turns import ANSWER_AS, ANSWER_OF
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff


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
