# SPDX-License-Identifier: Apache-2.0
"""Layers with states of a fixed size: how they are described, and what their requests hand off."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_server import ASK_PREFILL, Server, request, same
from waiting import eventually

from kvlink import Worker, WorkerConfig
from kvlink.errors import ConfigError, LayoutMismatch
from kvlink.integrations.vllm.model.caches import Caches, LayerGroup, Rank, caches_of
from kvlink.integrations.vllm.model.states import Stateful, StatePart, States, parts_of
from kvlink.integrations.vllm.prefill.lease_slots import SlotGroups
from kvlink.integrations.vllm.wire.handoff import Handoff, prompt_digest
from kvlink.integrations.vllm.wire.step_commands import HandedOff, Load, StepCommands
from kvlink.integrations.vllm.worker import WorkerSide
from kvlink.layout import num_seats

_PAGES, _HEADS, _ROWS, _BLOCK_TOKENS = 12, 4, 3, 8
_X = 16
_WIDTHS = {"MAMBA1": (_X,), "MAMBA2": (_X, 8, 8), "GDN_ATTN": (8, 8, _X), "KDA": (_X, _X, _X)}
"""The columns of the projections of the whole model: x, x, B, C, or Q, K, V. x and V have 4 columns a head."""


def _shapes(tp: int, columns_first: bool, kind: str = "MAMBA2") -> tuple[tuple[int, ...], ...]:
    columns = sum(_WIDTHS[kind]) // tp
    convolution = (columns, _ROWS) if columns_first else (_ROWS, columns)
    return convolution, (_HEADS // tp, _X // _HEADS, 5)


def _states(kind: str, shapes: Sequence[tuple[int, ...]], **more: Any) -> States:
    """The states of a layer: a convolution's in bfloat16, and a recurrent one in float32."""
    dtypes, items = ("bfloat16", "float32"), (2, 4)
    return States(kind, tuple(shapes), dtypes[: len(shapes)], items[: len(shapes)], **more)


def test_a_convolution_is_cut_by_projection() -> None:
    assert parts_of(_states("MAMBA2", _shapes(2, True), columns_first=True)) == (
        StatePart("bfloat16", 8, 6, (0,)),
        StatePart("bfloat16", 4, 6, (48,)),
        StatePart("bfloat16", 4, 6, (72,)),
        StatePart("float32", 2, 80, (96,)),
    )


def test_columns_that_do_not_adjoin_are_read_input_by_input() -> None:
    parts = parts_of(_states("MAMBA2", _shapes(2, False)))
    assert parts[1] == StatePart("bfloat16", 4, 2, (16, 48, 80))


def test_queries_and_keys_come_before_values() -> None:
    states = _states("GDN_ATTN", ((20, 3), (2, 6, 4)), columns_first=True)
    assert [(part.num_heads, part.offsets) for part in parts_of(states)] == [
        (4, (0,)), (4, (24,)), (12, (48,)), (2, (120,)),
    ]  # fmt: skip


def test_kda_is_cut_as_gated_delta_nets_are() -> None:
    """vLLM names KDA so; its keys have as many heads as its values."""
    states = _states("GDN_ATTN", ((3, 3 * 2 * 4), (2, 4, 4)))
    assert [(part.num_heads, part.offsets) for part in parts_of(states)] == [
        (8, (0, 48, 96)), (8, (16, 64, 112)), (8, (32, 80, 128)), (2, (144,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "states",
    [
        _states("SHORT_CONV", ((3, 8),)),
        _states("LINEAR", ((2, 4, 4),)),
        _states("GDN_ATTN", ((20, 3), (2, 6, 4)), replicated=True),
    ],
    ids=["a short convolution", "linear attention", "that every rank has"],
)
def test_other_states_are_one_piece(states: States) -> None:
    parts = parts_of(states)
    assert sum(part.head_bytes for part in parts) == states.num_bytes()
    assert [part.num_heads for part in parts] == [1] * len(states.shapes)


def test_shapes_that_are_not_of_the_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="MAMBA2: 9 columns of a convolution are not two of a kind and 8"):
        parts_of(_states("MAMBA2", ((9, 3), (2, 4, 5)), columns_first=True))


def test_the_last_block_of_a_group_of_states_holds_them() -> None:
    stateful = Stateful([None, _states("MAMBA2", ())])
    assert stateful.holding([[1, 2], [0, 0, 7]]) == ([1, 2], [7])
    assert stateful.holding([[1, 2], []]) == ([1, 2], [])


# Two ranks of either degree, over pages that hold attention or states.


def _server(
    rank: int, tp: int, columns_first: bool, kind: str = "MAMBA2"
) -> tuple[Caches, list[torch.Tensor]]:
    """Caches of a layer of attention and a layer of states in the same pages, and the views of both states."""
    named = "GDN_ATTN" if kind == "KDA" else kind  # vLLM's name for both
    states = _states(named, _shapes(tp, columns_first, kind), columns_first=columns_first)
    heads = max(1, 2 // tp)
    page = max(heads * _BLOCK_TOKENS * 6, states.num_bytes() + 8)
    pages = torch.zeros((_PAGES, page), dtype=torch.uint8)
    attention = pages.as_strided((_PAGES, heads, _BLOCK_TOKENS, 6), (page, _BLOCK_TOKENS * 6, 6, 1))
    tensors = {"attention": attention, "mamba": pages.view(_PAGES, 1, 1, page)}
    groups = [LayerGroup(("attention",)), LayerGroup(("mamba",), states)]
    caches = caches_of(tensors, groups, _PAGES, Rank(rank, tp, 2), "hybrid")
    views, first = [], 0
    for shape, dtype in zip(states.shapes, (torch.bfloat16, torch.float32), strict=True):
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        views.append(pages[:, first : first + num_bytes].view(dtype).view(_PAGES, *shape))
        first += num_bytes
    return caches, views


def _columns(tp: int, rank: int, kind: str) -> list[int]:
    """The columns of the model that a rank's convolution has, in its order."""
    columns, first = [], 0
    for width in _WIDTHS[kind]:
        columns += range(first + rank * width // tp, first + (rank + 1) * width // tp)
        first += width
    return columns


@pytest.mark.parametrize("kind", _WIDTHS)
@pytest.mark.parametrize("columns_first", [True, False], ids=["columns first", "inputs first"])
@pytest.mark.parametrize(("owner_tp", "reader_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_states_are_read_at_any_degree(owner_tp: int, reader_tp: int, columns_first: bool, kind: str) -> None:
    convolution = torch.randn(_ROWS, sum(_WIDTHS[kind])).bfloat16()
    recurrent = torch.randn(_HEADS, _X // _HEADS, 5)
    config = WorkerConfig(transports="loopback", lease_slots=8)
    workers: list[Worker] = []
    try:
        tickets = []
        for rank in range(owner_tp):
            caches, states = _server(rank, owner_tp, columns_first, kind)
            mine = convolution[:, _columns(owner_tp, rank, kind)]
            states[0][5] = mine.T if columns_first else mine
            heads = _HEADS // owner_tp
            states[1][5] = recurrent[rank * heads : (rank + 1) * heads]
            worker = Worker(caches.pool, f"p{rank}", config=config)
            workers.append(worker)
            lists = [[2, 3]] + [[5]] * (len(caches.pool.groups) - 1)
            seats = num_seats(caches.pool.groups, reader_tp)
            if seats:
                tokens = 2 * caches.pool.groups[0].block_tokens
                tickets.append(worker.offer("r", lists, num_tokens=tokens, readers=seats))
        for rank in range(reader_tp):
            caches, states = _server(rank, reader_tp, columns_first, kind)
            worker = Worker(caches.pool, f"d{rank}", config=config)
            workers.append(worker)
            lists = [[1, 7]] + [[4]] * (len(caches.pool.groups) - 1)
            worker.pull(tickets, lists).wait(20)
            mine = convolution[:, _columns(reader_tp, rank, kind)]
            assert torch.equal(states[0][4], mine.T if columns_first else mine)
            heads = _HEADS // reader_tp
            assert torch.equal(states[1][4], recurrent[rank * heads : (rank + 1) * heads])
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("states", [_states("SHORT_CONV", ((3, 8),)), _states("LINEAR", ((2, 4, 4),))])
def test_states_of_other_kinds_are_refused_at_other_degrees(states: States) -> None:
    """Nobody knows how their ranks share them."""
    workers = []
    try:
        for name, rank in (("p", Rank(0, 1, 2)), ("d", Rank(0, 2, 2))):
            pages = torch.zeros((_PAGES, 1, 1, states.num_bytes()), dtype=torch.uint8)
            caches = caches_of({"conv": pages}, [LayerGroup(("conv",), states)], _PAGES, rank, "hybrid")
            config = WorkerConfig(transports="loopback", lease_slots=8)
            workers.append(Worker(caches.pool, name, config=config))
        owner, reader = workers
        ticket = owner.offer("r", [5], num_tokens=1)
        with pytest.raises(LayoutMismatch, match="total_heads"):
            reader.pull([ticket], [4]).wait(20)
    finally:
        for worker in workers:
            worker.close()


def test_pages_that_do_not_hold_the_states_are_refused_by_layer() -> None:
    states = _states("MAMBA2", _shapes(1, True), columns_first=True)
    for pages in (
        torch.zeros(_PAGES, 1, 1, states.num_bytes() - 1, dtype=torch.int8),
        torch.zeros(_PAGES, 900),
    ):
        with pytest.raises(ConfigError, match=r"layer mamba: kvlink takes states as pages of bytes"):
            caches_of({"mamba": pages}, [LayerGroup(("mamba",), states)], _PAGES, Rank(0, 1, 2), "hybrid")


def test_a_prefix_that_decode_has_is_not_read_but_the_state_is() -> None:
    """With prefix caching, decode may have the first block of attention, and then needs the state after the last."""
    config = WorkerConfig(transports="loopback", lease_slots=8, timeout_s=5.0)
    sides, pages = [], []
    try:
        for name in ("p", "d"):
            caches, _ = _server(0, 1, True)
            sides.append(WorkerSide(name, caches, config))
            whole = _PAGES - 1  # the pool ends with the last page's last state
            size = caches.pool.groups[0].block_stride
            pages.append(torch.from_numpy(caches.pool.numpy(0))[: whole * size].view(whole, size))
            pages[-1].random_(256)
        prefill, decode = sides
        seats = SlotGroups(8, 2).take()
        assert seats is not None
        prefill.carry_out(StepCommands(granted={"r": seats}, handed_off={"r": HandedOff(3, 30.0)}))
        theirs, ours = ((array("I", [2, 3]), array("I", [5])), (array("I", [1, 7]), array("I", [4])))
        handoff = Handoff(
            "r", (prefill.rank_info.owner,), seats, theirs, prefill.rank_info.block_tokens, 2 * _BLOCK_TOKENS,
            prompt_digest([1]), 30.0,
        )  # fmt: skip
        before = pages[1].clone()
        load = Load("x", handoff, ours, first_token=_BLOCK_TOKENS, num_tokens=2 * _BLOCK_TOKENS)
        decode.carry_out(StepCommands(loads=[load]))
        eventually(lambda: "x" in decode.results().received)
        num_bytes = _states("MAMBA2", _shapes(1, True)).num_bytes()
        attention = 2 * _BLOCK_TOKENS * 6
        assert torch.equal(pages[1][7, :attention], pages[0][3, :attention])
        assert torch.equal(pages[1][4, :num_bytes], pages[0][5, :num_bytes])
        untouched = [page for page in range(_PAGES - 1) if page not in (4, 7)]
        assert torch.equal(pages[1][untouched], before[untouched])
    finally:
        for side in sides:
            side.close()


# What prefill does with a request.


@pytest.fixture
def request_of() -> Any:
    def make(tokens: list[int], skips: bool = False) -> Any:
        return SimpleNamespace(
            request_id="r", prompt_token_ids=list(tokens), prompt_embeds=None, _all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens), max_tokens=90, get_skip_reading_prefix_cache=lambda: skips,
        )  # fmt: skip

    return make


def test_prefill_leaves_the_last_token_to_decode_once(request_of: Any) -> None:
    stateful, request = Stateful([None, _states("MAMBA2", ())]), request_of([4, 5, 6])
    for _ in range(2):  # a preempted request arrives once more
        stateful.shorten(request)
        assert (request.prompt_token_ids, request._all_token_ids) == ([4, 5], [4, 5])
        assert (request.num_prompt_tokens, request.max_tokens) == (2, 1)
    assert stateful.can_hand_off("r")
    stateful.forget("r")
    assert not stateful.can_hand_off("r")


@pytest.mark.parametrize(("tokens", "skips"), [([4], False), ([4, 5], True)])
def test_what_decode_computes_itself_is_not_handed_off(
    request_of: Any, tokens: list[int], skips: bool
) -> None:
    stateful, request = Stateful([_states("MAMBA2", ())]), request_of(tokens, skips)
    stateful.shorten(request)
    assert request.num_prompt_tokens == len(tokens)
    assert not stateful.can_hand_off("r")


def test_without_states_nothing_changes(request_of: Any) -> None:
    stateful, request = Stateful([None, None]), request_of([4, 5])
    stateful.shorten(request)
    assert request.num_prompt_tokens == 2
    assert stateful.can_hand_off("r")
    assert not stateful.moved_on(SimpleNamespace(num_computed_tokens=9, num_prompt_tokens=2))


def test_a_state_that_moved_on_is_noticed() -> None:
    stateful = Stateful([_states("MAMBA2", ())])
    assert stateful.moved_on(SimpleNamespace(num_computed_tokens=3, num_prompt_tokens=2))
    assert not stateful.moved_on(SimpleNamespace(num_computed_tokens=2, num_prompt_tokens=2))


# Drafts of several MTP modules, with states or without.


def test_prefill_leaves_the_tokens_that_several_draft_modules_read_to_decode(request_of: Any) -> None:
    for states, count in (([None], 2), ([_states("MAMBA2", ())], 2)):
        stateful, request = Stateful(states, back_off=2), request_of([4, 5, 6, 7])
        stateful.shorten(request)
        assert request.num_prompt_tokens == 4 - count
        stateful, request = Stateful(states, back_off=2), request_of([4, 5])
        stateful.shorten(request)
        assert request.num_prompt_tokens == 2
        assert stateful.can_hand_off("r") is (states == [None])


@pytest.mark.parametrize(("prefill", "decode", "num_loaded"), [(2, 2, 8), (0, 2, 8), (2, 0, 8), (0, 0, 10)])
def test_decode_computes_them(prefill: int, decode: int, num_loaded: int) -> None:
    """Also where prefill has no such drafts."""
    prompt = list(range(10))
    with Server("p", back_off=prefill) as owner, Server("d", back_off=decode) as reader:
        asks = request("r", list(prompt), ASK_PREFILL)
        asks._all_token_ids, asks.get_skip_reading_prefix_cache = asks.all_token_ids, lambda: False
        params = owner.hands_off(asks, [3, 9, 1])
        assert params["remote_num_tokens"] == 10 - prefill
        assert reader.load(request("x", prompt, params), [5, 6, 7]) == (num_loaded, True)
        reader.step_until(lambda: "x" in reader.received)
        assert not reader.failed
        assert same(reader, owner, [(5, 3), (6, 9)])
