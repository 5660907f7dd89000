# SPDX-License-Identifier: Apache-2.0
"""Ids of requests, parameters and handoffs of other servers are parsed and compared once."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_hostile import FIELDS, JSON
from vllm_server import ASK_PREFILL, Server, request

from kvlink.control.values import FoundPrefix
from kvlink.errors import ConfigError
from kvlink.integrations.request_names import name_of
from kvlink.integrations.vllm.chats.cached_blocks import check_pool
from kvlink.integrations.vllm.chats.earlier_turns import EarlierTurns
from kvlink.integrations.vllm.chats.peer_prefixes import PeerPrefixes
from kvlink.integrations.vllm.chats.prefix_lookups import PrefixLookups
from kvlink.integrations.vllm.model.caches import TokenUnit
from kvlink.integrations.vllm.wire.boundary import mismatch, take_params
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff, Owner, RankInfo
from kvlink.integrations.vllm.wire.handoff_parts import Part
from kvlink.ticket import SHARED_SEAT, LeaseSeat
from kvlink.ticket.prefix_digests import PrefixDigests

pytestmark = pytest.mark.usefixtures("unsigned")

PROMPT = list(range(100, 110))
TICKET = "S1ZUM" + "A" * 95
SOFT = Handoff(
    "r", (Owner("w", 1, "h:1"),), (LeaseSeat(1, 1000, SHARED_SEAT),), (array("I", [3]),), (16,), 16, "0" * 32, 30.0,
    digests=PrefixDigests.of([b"0" * 16]),
).to_params()  # fmt: skip
OWN = RankInfo(Owner("w", 1, "127.0.0.1:1"), (16, 0), (1, 1), ((TokenUnit(),), (TokenUnit(),)))
PAGES, ROWS = (TokenUnit(16, is_block=True),), (TokenUnit(), TokenUnit(4), TokenUnit(16))


@pytest.mark.parametrize(
    "name", ["x" * 513, "x" * 100_000, TICKET, f"a{TICKET}b", "\ud800", "a\0\n\x1b[31m", "", "é" * 300]
)
def test_any_id_is_handed_off_and_no_log_shows_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with Server("p") as prefill, Server("d") as decode:
        params = prefill.hands_off(request(name, PROMPT, ASK_PREFILL), [3, 9, 1])
        assert Handoff.from_params(params).request_id == params["remote_request_id"] == name_of(name) != name
        assert decode.loads(request(name, PROMPT, params), [5, 6, 7])
        assert decode.block("layer.1", 6).equal(prefill.block("layer.1", 9))
        prefill.step_until(lambda: name in prefill.sent)
        assert not prefill.ranks[0]._leases._ids
        assert not prefill.ranks[0]._leases._seats
    assert name == "" or name not in caplog.text


def test_ids_that_are_handed_off_as_they_are() -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("cmpl-42-0", PROMPT, ASK_PREFILL), [3, 9, 1])
        assert params["remote_request_id"] == "cmpl-42-0"


@pytest.mark.parametrize("params", ["text", 7, ["do_remote_decode"], True])
def test_parameters_that_are_no_object_are_none(params: Any) -> None:
    """A client can send them in vllm_xargs."""
    asks = request("r", PROMPT, None)
    asks.kv_transfer_params = params
    with Server("p") as server:
        assert server.prefill(asks, [3, 9, 1]) == (False, None)
    assert take_params(asks) == {}
    assert asks.kv_transfer_params is None


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ((16,), OWN, "it has 1 cache group, and this server has 2 cache groups"),
        ((16, 0, 0), OWN, "it has 3 cache groups"),
        ((0, 0), OWN, "cache group 0 has states there and blocks of 16 tokens here"),
        ((16, 16), OWN, "cache group 1 has blocks of 16 tokens there and states here"),
        ((32, 0), replace(OWN, units=(PAGES, PAGES)), "cache group 0 has blocks of 32 tokens there"),
        (
            (24, 0),
            replace(OWN, units=(ROWS, ROWS)),
            "cache group 0 has blocks of 24 tokens there and blocks of 16 tokens here, in rows of 16 tokens",
        ),
        ((32, 0), replace(OWN, units=(ROWS, ROWS)), ""),
        ((32, 0), OWN, ""),
        ((16, 0), OWN, ""),
    ],
)
def test_layouts_that_cannot_be_read_are_named(theirs: tuple[int, ...], ours: RankInfo, why: str) -> None:
    handoff: Any = SimpleNamespace(block_tokens=theirs, owners=[1])
    assert mismatch(handoff, ours).startswith(why)
    assert bool(mismatch(handoff, ours)) is bool(why)


@pytest.mark.parametrize(
    ("owners", "fits"), [(1, True), (2, True), (3, False), (8, True), (12, True), (6, False)]
)
def test_ranks_share_the_heads(owners: int, fits: bool) -> None:
    handoff: Any = SimpleNamespace(block_tokens=(16, 0), owners=[1] * owners)
    assert (mismatch(handoff, OWN, 4) == "") is fits


def test_a_server_of_another_layout_is_refused_and_its_blocks_come_back() -> None:
    """At once, because no rank of this server can read them; and the request is reported as failed."""
    groups = (("layer.0",), ("window.1",))
    with Server("p") as prefill, Server("d", groups=groups) as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        decode.load(request("x", PROMPT, params), [4, 5, 6], [7, 8, 9])
        decode.step_until(lambda: decode.received)
        assert decode.failed == {"x"}
        assert decode.scheduler.take_counts() == {"another_layout": 1}
        prefill.step_until(lambda: "r" in prefill.sent)


def test_a_handoff_waits_until_the_workers_have_reported() -> None:
    """Under MultiConnector they report with the first step."""
    with Server("p") as prefill, Server("d") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        decode.scheduler.set_ranks([])
        asks = request("x", PROMPT, params)
        decode.scheduler.arrived(asks)
        assert decode.scheduler.num_matched(asks, 0) == (None, False)
        decode.scheduler.set_ranks(rank.rank_info for rank in decode.ranks)
        assert decode.scheduler.num_matched(asks, 0) == (10, True)


@pytest.mark.parametrize(
    "owner",
    [
        ["w", "-1", "h:1"], ["w", str(2**64), "h:1"], ["w", "x", "h:1"], ["w", "9" * 5000, "h:1"], ["", "1", "h:1"],
        ["\ud800", "1", "h:1"], ["w" * 513, "1", "h:1"], ["a\nb", "1", "h:1"], ["w", "1", "h"], ["w", "1", "h:0"],
        ["w", "1", "h:65536"], ["w", "1", "\ud800:1"], ["w", "1", "a:1,b:2"], ["w", "1", "xds:///x"],
        ["w", "1", " h:1"], ["w", "1", "0.0.0.0:1"], ["w", "1", "a b:1"], ["w", "1", "a\0:1"], ["w", "1", "é:1"],
        ["w", "1", "h" * 600 + ":1"], ["w", "1"], "w", None,
    ],
)  # fmt: skip
def test_owners_that_cannot_be_asked_are_malformed(owner: Any) -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    Handoff.from_params(params)
    params[KEY]["owners"] = [owner]
    with pytest.raises(ConfigError, match=r"^kv_transfer_params carry no handoff of kvlink: .{1,140}(\n|$)"):
        Handoff.from_params(params)


@pytest.mark.parametrize(("field", "value"), [("owners", []), ("prompt", ""), ("prompt", "00" * 33)])
def test_a_handoff_without_its_parts_is_malformed(field: str, value: object) -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    params[KEY][field] = value
    with pytest.raises(ConfigError, match="no handoff of kvlink"):
        Handoff.from_params(params)


@pytest.mark.parametrize("name", [TICKET, f"a{TICKET}", "a\nb", "\x1b[31m"])
def test_a_name_that_no_log_may_show_is_malformed(name: str) -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    forged = replace(Handoff.from_params(params), request_id=name).to_params()
    with pytest.raises(ConfigError, match="no handoff of kvlink") as refused:
        Handoff.from_params({KEY: forged})
    assert name not in str(refused.value)


@pytest.mark.parametrize("sizes", ["", "-1", "0", "4,4", str(2**31), "9" * 5000, "4.0", "x"])
def test_blocks_of_impossible_sizes_are_malformed(sizes: str) -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    params[KEY]["block_tokens"] = sizes
    with pytest.raises(ConfigError, match="no handoff of kvlink"):
        Handoff.from_params(params)


def test_times_that_no_float_holds_are_malformed() -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    part = Part(Handoff.from_params(params), 10, True, True).to_bytes()
    for times in (b"[1" + b"0" * 400 + b", 1]", b"[NaN, 1]", b"[1]", b'"x"', b"[Infinity, 1]"):
        with pytest.raises(ConfigError, match="a part of a handoff is malformed"):
            Part.from_bytes(part[:-1] + b', "remaining_s": ' + times + b"}")


@settings(derandomize=True, deadline=None, database=None)
@given(
    JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=20)
    | st.builds(
        lambda name, value: json.dumps({KEY: {**SOFT, name: value}}).encode(), st.sampled_from(FIELDS), JSON
    )
)
def test_no_ticket_of_a_directory_or_of_an_answer_raises(ticket: bytes) -> None:
    found: Future[list[FoundPrefix]] = Future()
    found.set_result([FoundPrefix(1, (ticket,))])
    counts: Counter[str] = Counter()
    lookups = PrefixLookups(cast(PeerPrefixes, None), counts)
    turns, asks = EarlierTurns(counts, lookups=lookups), request("r", PROMPT, None)
    lookups._asked["r"] = found
    assert turns.num_matched(asks, 0, [OWN]) == 0
    assert sum(counts.values()) == 1
    answered: Future[bytes] = Future()
    answered.set_result(ticket)
    turns._asked["r"] = answered
    assert turns.num_matched(asks, 0, [OWN]) == 0
    assert sum(counts.values()) == 2


class _Pool:
    def get_new_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            self._forget(block)

    def cache_full_blocks(self, block: Any) -> None:
        self._forget(block)

    def free_blocks(self, block: Any) -> None:
        block.ref_cnt = 0

    def give_away(self, blocks: list[Any]) -> None:
        self.get_new_blocks(blocks)

    def _forget(self, block: Any) -> None:
        block.reset_hash()


class _Trims(_Pool):
    def trim(self, block: Any) -> None:
        self._forget(block)


class _Clears(_Pool):
    def clear(self, block: Any) -> None:
        block.block_hash = None


@pytest.mark.parametrize(("pool", "method"), [(_Trims, "trim"), (_Clears, "clear")])
def test_a_pool_that_forgets_blocks_in_another_way_is_refused(pool: type, method: str) -> None:
    check_pool(_Pool)
    with pytest.raises(ConfigError, match=rf"BlockPool\.{method} makes blocks forget"):
        check_pool(pool)


def test_a_pool_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read how vLLM's Pool gives them away"):
        check_pool(type("Pool", (), {}))
