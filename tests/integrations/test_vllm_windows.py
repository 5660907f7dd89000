# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: decode has every token that it reads, or nothing of the handoff is used."""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from vllm_server import ASK_PREFILL, BLOCK_TOKENS, Server, gone, request, same

from kvlink.errors import StaleBlocks
from kvlink.integrations.vllm.decode.loads import Loads, _Loading
from kvlink.integrations.vllm.model.caches import CacheGroup
from kvlink.integrations.vllm.model.windows import Window, gap_in, loadable, needed_from
from kvlink.integrations.vllm.wire.step_commands import Load

PROMPT = list(range(100, 122))  # five blocks of 4 and a half
WINDOW = 6
GROUPS = (("full.0",), ("window.0",))


def server(name: str, **options: Any) -> Server:
    return Server(name, groups=GROUPS, window=WINDOW, **options)


def kept(num_computed: int, first_block: int, num_tokens: int | None = None) -> list[int]:
    """Block ids of the window's group as vLLM has them: those wholly before the window are given up."""
    gaps = max(num_computed - WINDOW + 1, 0) // BLOCK_TOKENS
    blocks = -(-(num_tokens or num_computed) // BLOCK_TOKENS)
    return [0] * gaps + list(range(first_block + gaps, first_block + blocks))


FULL, OURS = [1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15]


def test_the_window_moves_with_the_request() -> None:
    with server("p") as prefill, server("d") as decode:
        stays, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), FULL, kept(22, 7))
        assert stays
        assert decode.load(request("x", PROMPT, params), OURS, kept(22, 1)) == (22, True)
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        assert same(decode, prefill, list(zip(OURS, FULL, strict=True)), ("full.0",))
        assert same(decode, prefill, [(5, 11), (6, 12)], ("window.0",))
        prefill.step_until(lambda: "r" in prefill.sent)
        assert gone(prefill)


def answered(prefill: Server, num_tokens: int) -> tuple[bool, dict[str, Any] | None]:
    """The router let prefill answer so many tokens."""
    asks = request("r", PROMPT, ASK_PREFILL)
    prefill.begin(asks, FULL, kept(22, 7))
    prefill.step()
    asks.num_computed_tokens = len(PROMPT) + num_tokens - 1
    ended = prefill.scheduler.finished(asks, (FULL, kept(asks.num_computed_tokens, 7)), True)
    prefill.step()
    return ended


@pytest.mark.parametrize(("num_tokens", "handed_off"), [(1, True), (3, True), (4, False), (9, False)])
def test_prefill_keeps_its_ticket_when_the_window_has_passed(num_tokens: int, handed_off: bool) -> None:
    """Decode reads from token 16 on: its block is given up when the window starts at token 20, with 25 computed."""
    with server("p") as prefill:
        stays, params = answered(prefill, num_tokens)
        assert (stays, params is not None) == (handed_off, handed_off)
        assert prefill.scheduler.take_counts() == ({} if handed_off else {"window_passed": 1})
        if not handed_off:
            assert gone(prefill)


@pytest.mark.parametrize("num_tokens", [4, 9])
def test_decode_refuses_what_an_older_prefill_hands_off(num_tokens: int) -> None:
    """Before the first byte, of any group; and it is counted."""
    with Server("p", groups=GROUPS) as prefill, server("d") as decode:
        _, params = answered(prefill, num_tokens)
        assert params
        before = [tensor.clone() for tensor in decode.caches[0].values()]
        assert not decode.loads(request("x", PROMPT, params), OURS, kept(22, 1))
        assert decode.ranks[0].take_stats()["failures"] == {"stale": 1}  # type: ignore[index]
        assert all(now.equal(then) for now, then in zip(decode.caches[0].values(), before, strict=True))
        prefill.step_until(lambda: "r" in prefill.sent)


@pytest.mark.parametrize(("max_tokens", "computed"), [(1, 20), (2, 21)])
def test_prefill_leaves_the_last_token_to_decode_where_vllm_would_drop_what_it_reads(
    max_tokens: int, computed: int
) -> None:
    """Prompt of 21: with all computed the window starts at token 16, and its last token reads token 15, too.

    A client that asks prefill for more tokens gets them, and nothing is handed off.
    """
    with server("p") as prefill, server("d") as decode:
        asks = request("r", PROMPT[:21], ASK_PREFILL, max_tokens)
        stays, params = prefill.prefill(asks, FULL, kept(computed, 7))
        assert (asks.num_prompt_tokens, stays) == (computed, max_tokens == 1)
        if not params:
            assert prefill.scheduler.take_counts() == {"window_passed": 1}
            assert gone(prefill)
            return
        assert decode.load(request("x", PROMPT[:21], params), OURS, kept(20, 1)) == (20, True)
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        assert same(decode, prefill, [(4, 10), (5, 11)], ("window.0",))


def test_a_prompt_whose_last_token_reads_a_block_that_vllm_drops_is_loaded_but_for_that_token() -> None:
    """As above, with a prefill that has the block still."""
    prompt = PROMPT[:21]
    with server("p") as prefill, server("d") as decode:
        params = prefill.hands_off(request("r", prompt, ASK_PREFILL), FULL, kept(20, 7, 21))
        assert decode.load(request("x", prompt, params), OURS, kept(20, 1)) == (20, True)
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        assert same(decode, prefill, [(4, 10), (5, 11)], ("window.0",))


def test_the_next_token_reads_its_window_or_its_chunk() -> None:
    for at in range(40):
        sliding = [token for token in range(at + 1) if at - token < WINDOW]
        chunk = [token for token in range(at + 1) if token // WINDOW == at // WINDOW]
        assert (Window(WINDOW, 4).first(at), Window(WINDOW, 4, True).first(at)) == (sliding[0], chunk[0])


@pytest.mark.parametrize(("tokens", "block_tokens", "chunked"), [(5, 2, False), (8, 4, False), (6, 3, True)])
def test_every_token_that_is_read_was_loaded(tokens: int, block_tokens: int, chunked: bool) -> None:
    """For all short prompts and answers: vLLM's rules at both ends, and what a load does between them."""
    window = Window(tokens, block_tokens, chunked)

    def blocks(num_computed: int, num_tokens: int) -> array[int]:
        gaps = window.kept_from(num_computed) // block_tokens
        count = -(-num_tokens // block_tokens)
        return array("I", [0] * min(gaps, count) + [1] * (count - gaps))

    loaded = refused = 0
    for prompt, answer in itertools.product(range(1, 40), range(1, 12)):
        end = loadable([window], prompt, prompt)
        ours, theirs = blocks(end, end), blocks(prompt + answer - 1, prompt)
        load = Load("r", None, (ours,), 0, end, needed_from=needed_from([window], prompt, end))
        caches = SimpleNamespace(groups=(CacheGroup(block_tokens, 1),))
        loads = Loads(None, caches, None, None)  # type: ignore[arg-type]
        loading = _Loading(load, 0)
        loading.pulled_to = [0]
        try:
            handoff: Any = SimpleNamespace(block_ids=(theirs,), block_tokens=(block_tokens,))
            first, upto = loads._range(loading, handoff, 0, end)
        except StaleBlocks:
            refused += 1
            continue
        loaded += 1
        reads = range(window.first(prompt - 1), prompt - 1)  # the last token is computed at decode
        assert all(first <= token < upto for token in reads), (prompt, answer)
        assert gap_in(ours, block_tokens, reads.start, reads.stop) is None, (prompt, answer)
    assert min(loaded, refused) > 20


def test_ends_with_blocks_of_other_sizes_need_only_what_is_read() -> None:
    """Decode's blocks of 128 begin at token 384, prefill's of 16 at 480; token 489 is the first that is read."""
    load = Load("r", None, (array("I", [0, 0, 0, 1, 2, 3, 4, 5]),), 0, 1000, needed_from=(489,))
    loading = _Loading(load, 0)
    loading.pulled_to = [0]
    loads = Loads(None, SimpleNamespace(groups=(CacheGroup(128, 1),)), None, None)  # type: ignore[arg-type]
    theirs = array("I", [0] * 30 + [7] * 33)
    handoff: Any = SimpleNamespace(block_ids=(theirs,), block_tokens=(16,))
    assert loads._range(loading, handoff, 0, 1000) == (480, 1000)
    theirs[31] = 0  # tokens 496 to 511
    with pytest.raises(StaleBlocks, match="token 496 of cache group 0"):
        loads._range(loading, handoff, 0, 1000)
