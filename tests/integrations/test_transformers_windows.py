# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows, whose caches are rings, give the tokens of one process when they are handed off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from batching_peer import NUM_NEW, BatchingProcess
from transports.processes import eventually

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]

WINDOW, BLOCK = 40, 16  # the last block of a ring is not full
MODELS = ["mixed", "sliding"]

_numbers = iter(range(10**6))


class Peers:
    """`plain` knows nothing of kvlink. `other` has blocks of half the size, and few of them."""

    def __init__(self, model: str) -> None:
        self.model = model
        window = (model, WINDOW)
        self.plain = BatchingProcess(window=window)
        self.prefill = BatchingProcess("prefill", window=window)
        self.decode = BatchingProcess("decode", window=window)
        self.other = BatchingProcess("other", window=window, page_size=BLOCK // 2, num_blocks=56)

    def expected(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = self.plain.call("generate", prompt=prompt, request_id=f"plain-{next(_numbers)}")
        assert len(tokens) == NUM_NEW
        return tokens

    def close(self) -> None:
        with ExitStack() as each:
            for peer in (self.plain, self.prefill, self.decode, self.other):
                each.callback(peer.close)
                peer.end()


@pytest.fixture(scope="module", params=MODELS)
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    peers = Peers(request.param)
    yield peers
    peers.close()


@pytest.fixture(autouse=True)
def all_blocks_come_back(peers: Peers) -> Iterator[None]:
    """Nobody holds a block after a test, whatever happened in it."""
    yield
    for peer in (peers.prefill, peers.decode, peers.other):
        eventually(lambda peer=peer: peer.call("used") == 0)
        assert peer.call("stats")["held_tables"] == 0


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(next(_numbers)).choices(range(256), k=num_tokens)


def tokens_of(peer: BatchingProcess, handoff: str, **options: Any) -> list[int]:
    tokens: list[int] = peer.call("tokens", request_id=peer.call("submit", handoff=handoff, **options))
    return tokens


LENGTHS = [
    1,
    BLOCK,
    WINDOW - NUM_NEW // 2,  # the ring is full while the answer is generated
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    3 * BLOCK,
    3 * BLOCK + 1,
    5 * WINDOW,
    5 * WINDOW + 19,
]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tokens_are_those_of_a_single_process(peers: Peers, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    expected = peers.expected(prompt)
    before = peers.decode.call("stats")
    assert tokens_of(peers.decode, peers.prefill.call("prefill", prompt=prompt)) == expected
    after = peers.decode.call("stats")
    assert (after["pulled"], after["recomputed"]) == (before["pulled"] + 1, before["recomputed"])


@pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW + 3, 5 * WINDOW + 19])
def test_blocks_may_have_other_sizes(peers: Peers, num_tokens: int) -> None:
    """In both directions."""
    for ends in ((peers.prefill, peers.other), (peers.other, peers.decode)):
        prompt = prompt_of(num_tokens)
        pulled = ends[1].call("stats")["pulled"]
        assert tokens_of(ends[1], ends[0].call("prefill", prompt=prompt)) == peers.expected(prompt)
        assert ends[1].call("stats")["pulled"] == pulled + 1


@pytest.mark.parametrize("num_tokens", [BLOCK, 5 * WINDOW + 19])
def test_a_wrong_ring_changes_the_tokens(peers: Peers, num_tokens: int) -> None:
    """So that equal tokens prove the right ring."""
    prompt = prompt_of(num_tokens)
    handoff = peers.prefill.call("prefill", prompt=prompt)
    peers.prefill.call("spoil", handoff=handoff, attention="sliding_attention")
    assert tokens_of(peers.decode, handoff) != peers.expected(prompt)


def test_a_ring_that_was_given_to_another_request_is_not_used(peers: Peers) -> None:
    """Its blocks are overwritten before the handoff is submitted, and the lease says so."""
    prompt = prompt_of(3 * WINDOW)
    handoff = peers.prefill.call("prefill", prompt=prompt)
    peers.prefill.call("abort", handoff=handoff)
    eventually(lambda: peers.prefill.call("used") == 0)
    usurper = peers.prefill.call("prefill", prompt=prompt_of(3 * WINDOW))
    recomputed = peers.decode.call("stats")["recomputed"]
    assert tokens_of(peers.decode, handoff) == peers.expected(prompt)
    assert peers.decode.call("stats")["recomputed"] == recomputed + 1
    peers.prefill.call("abort", handoff=usurper)


def test_prefill_computes_others_while_a_ring_is_held(peers: Peers) -> None:
    """Their rings wrap over their own blocks, and never over those of the handoff."""
    prompts = [prompt_of(2 * WINDOW + 5 * number) for number in range(4)]
    handoffs = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts]
    own = prompt_of(4 * WINDOW)
    assert peers.prefill.call("generate", prompt=own, request_id="own") == peers.expected(own)
    request_ids = [peers.decode.call("submit", handoff=handoff) for handoff in handoffs]
    for prompt, request_id in zip(prompts, request_ids, strict=True):
        assert peers.decode.call("tokens", request_id=request_id) == peers.expected(prompt)


def test_more_handoffs_than_blocks_wait_for_each_other(peers: Peers) -> None:
    prompts = [prompt_of(100 + number) for number in range(8)]
    handoffs = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts[:4]]
    handoffs += [peers.decode.call("prefill", prompt=prompt) for prompt in prompts[4:]]
    pulled = peers.other.call("stats")["pulled"]
    request_ids = [peers.other.call("submit", handoff=handoff) for handoff in handoffs]
    for prompt, request_id in zip(prompts, request_ids, strict=True):
        assert peers.other.call("tokens", request_id=request_id) == peers.expected(prompt)
    assert peers.other.call("stats")["pulled"] == pulled + 8


@pytest.mark.parametrize("other", [False, True], ids=["window", "model"])
def test_another_window_or_model_is_refused(peers: Peers, other: bool) -> None:
    """No token is given, because the first one is another model's."""
    model, reasons = peers.model, "in a ring of 40 tokens|same sliding window"
    if other:
        model, reasons = MODELS[1 - MODELS.index(model)], "the number of cache groups differs"
    with ExitStack() as ended:
        stranger = BatchingProcess("stranger", window=(model, WINDOW if other else WINDOW - 8))
        ended.callback(stranger.kill)
        for num_tokens in (BLOCK, 3 * WINDOW):
            handoff = stranger.call("prefill", prompt=prompt_of(num_tokens))
            before = peers.decode.call("stats")
            with pytest.raises(
                RuntimeError, match=f"{reasons}|cache groups, and this model has|this model's cache keeps"
            ):
                tokens_of(peers.decode, handoff)
            after = peers.decode.call("stats")
            assert after["refused"] == before["refused"] + 1
            assert after["recomputed"] == before["recomputed"]
