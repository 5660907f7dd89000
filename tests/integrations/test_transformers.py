# SPDX-License-Identifier: Apache-2.0
"""Requests handed off between two processes of transformers' continuous batching give the tokens of one."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from batching_peer import NUM_NEW, BatchingProcess, end_all
from transports.processes import eventually

from kvlink import Ticket

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(300),
]  # several processes import torch, on a machine that may be busy

BLOCK = 16
SLOW_PULLS = {"transports": "fault+tcp", "fault": "delay-data=1s@every:1"}
LEASE_S = 10.0  # of `small`
MAX_GROWTH_BYTES = 4 << 20

_numbers = iter(range(10**6))


class Peers:
    """`plain` knows nothing of kvlink and says what the tokens are.

    `small` has few blocks, of half the size, and pulls slowly.
    """

    def __init__(self) -> None:
        self.plain = BatchingProcess()
        self.prefill = BatchingProcess("prefill")
        self.decode = BatchingProcess("decode")
        self.small = BatchingProcess(
            "small", page_size=BLOCK // 2, num_blocks=16, config=SLOW_PULLS | {"lease_s": LEASE_S}
        )

    def expected(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = self.plain.call("generate", prompt=prompt, request_id=f"plain-{next(_numbers)}")
        assert len(tokens) == NUM_NEW
        return tokens

    def decoded(self, handoff: str, **options: Any) -> list[int]:
        request_id = self.decode.call("submit", handoff=handoff, **options)
        tokens: list[int] = self.decode.call("tokens", request_id=request_id)
        return tokens

    def close(self) -> None:
        end_all(*vars(self).values())


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture(autouse=True)
def all_blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody holds a block after a test, whatever happened in it."""
    yield
    if "peers" not in request.fixturenames:
        return
    peers = request.getfixturevalue("peers")
    for peer in (peers.prefill, peers.decode, peers.small):
        eventually(lambda peer=peer: peer.call("used") == 0)
        assert peer.call("stats")["held_tables"] == 0


def prompt_of(num_tokens: int) -> list[int]:
    """Another one each time: nobody has it cached."""
    return random.Random(next(_numbers)).choices(range(256), k=num_tokens)


def blocks_of(handoff: str) -> list[int]:
    return list(Ticket.from_text(json.loads(handoff)["ticket"]).block_ids)


def gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 2 * BLOCK + 5, 300])
def test_tokens_are_those_of_a_single_process(peers: Peers, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    before = peers.decode.call("stats")
    handoff = peers.prefill.call("prefill", prompt=prompt)
    assert peers.decoded(handoff) == peers.expected(prompt)
    change = gained(before, peers.decode.call("stats"))
    assert change["pulled"] == 1
    assert (
        change["pulled_bytes"] == num_tokens * 4 * 2 * 4 * 64 * 4
    )  # layers, K and V, heads, dimension, float32
    assert "recomputed" not in change


def test_a_cache_on_the_cpu_can_be_mapped(peers: Peers) -> None:
    peers.decoded(peers.prefill.call("prefill", prompt=prompt_of(40)), request_id="mapped")
    assert peers.decode.call("newest") == {"request_id": "mapped", "transports": ["shm"], "error": "NoneType"}


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 2 * BLOCK + 5])
def test_wrong_blocks_change_the_tokens(peers: Peers, num_tokens: int) -> None:
    """So that equal tokens prove right blocks."""
    prompt = prompt_of(num_tokens)
    handoff = peers.prefill.call("prefill", prompt=prompt)
    peers.prefill.call("spoil", handoff=handoff)
    assert peers.decoded(handoff) != peers.expected(prompt)


def test_an_aborted_offer_is_recomputed(peers: Peers) -> None:
    prompt = prompt_of(40)
    before = peers.decode.call("stats")
    handoff = peers.prefill.call("prefill", prompt=prompt)
    peers.prefill.call("abort", handoff=handoff)
    eventually(lambda: peers.prefill.call("used") == 0)
    assert peers.decoded(handoff) == peers.expected(prompt)
    assert gained(before, peers.decode.call("stats")) == {"recomputed": 1}


def test_a_second_use_of_a_handoff_is_recomputed(peers: Peers) -> None:
    """By then the owner's blocks are another request's, and the lease says so."""
    prompt = prompt_of(40)
    handoff = peers.prefill.call("prefill", prompt=prompt)
    expected = peers.expected(prompt)
    assert peers.decoded(handoff) == expected
    eventually(lambda: peers.prefill.call("used") == 0)
    usurper = peers.prefill.call("prefill", prompt=prompt_of(40))
    assert set(blocks_of(usurper)) & set(blocks_of(handoff))
    peers.decode.call("used")  # forgets the prompt's blocks
    before = peers.decode.call("stats")
    assert peers.decoded(handoff) == expected
    assert gained(before, peers.decode.call("stats")) == {"recomputed": 1}
    peers.prefill.call("abort", handoff=usurper)


def test_an_owner_that_died_is_recomputed(peers: Peers) -> None:
    prompt = prompt_of(40)
    doomed = BatchingProcess("doomed")
    handoff = doomed.call("prefill", prompt=prompt)
    doomed.kill()
    before = peers.decode.call("stats")
    assert peers.decoded(handoff) == peers.expected(prompt)
    assert gained(before, peers.decode.call("stats")) == {"recomputed": 1}


def test_a_decode_that_dies_costs_no_more_than_a_lease(peers: Peers) -> None:
    before = peers.small.call("stats")
    doomed = BatchingProcess("doomed decode", config=SLOW_PULLS | {"fault": "delay-data=20s@1"})
    assert doomed.call("stats")["pulled"] == 0  # it is up: the lease need not last for its start
    doomed.call("submit", handoff=peers.small.call("prefill", prompt=prompt_of(40)))
    eventually(lambda: doomed.call("stats")["held_tables"] == 1)
    doomed.kill()
    eventually(lambda: peers.small.call("used") == 0, within_s=3 * LEASE_S)
    assert gained(before, peers.small.call("stats")) == {"offered": 1, "expired": 1}


def test_a_swapped_ticket_is_refused(peers: Peers) -> None:
    prompts = [prompt_of(40), prompt_of(40)]
    texts = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts]
    ours, theirs = map(json.loads, texts)
    before = peers.decode.call("stats")
    mixed = [{**ours, "ticket": theirs["ticket"]}, {**ours, "first_token": (ours["first_token"] + 1) % 256}]
    for handoff in mixed:
        with pytest.raises(RuntimeError, match=r"ConfigError: .* made for other tokens"):
            peers.decode.call("submit", handoff=json.dumps(handoff))
    assert gained(before, peers.decode.call("stats")) == {"refused": 2}
    for prompt, text in zip(prompts, texts, strict=True):
        assert peers.decoded(text) == peers.expected(prompt)


def test_what_decode_has_cached_is_not_pulled(peers: Peers) -> None:
    start = prompt_of(3 * BLOCK)
    prompts = [start + prompt_of(10), start + prompt_of(21)]
    pulled = []
    for prompt in prompts:
        before = peers.decode.call("stats")
        assert peers.decoded(peers.prefill.call("prefill", prompt=prompt)) == peers.expected(prompt)
        pulled.append(gained(before, peers.decode.call("stats"))["pulled_bytes"])
    assert pulled[0] == pulled[1] // 21 * len(prompts[0])


def test_the_first_token_may_be_the_last(peers: Peers) -> None:
    prompt = prompt_of(20)
    first, second, *_ = peers.expected(prompt)
    assert peers.decoded(peers.prefill.call("prefill", prompt=prompt), max_new_tokens=1) == [first]
    assert peers.decoded(peers.prefill.call("prefill", prompt=prompt), eos_token_id=first) == [first]
    handoff = peers.prefill.call("prefill", prompt=prompt)
    assert peers.decoded(handoff, eos_token_id=second) == [first, second]


def test_more_handoffs_than_blocks_wait_for_each_other(peers: Peers) -> None:
    """Each takes 5 to 7 of 16 blocks, of another size than the owner's; none may starve those that generate."""
    prompts = [prompt_of(40) for _ in range(6)]
    handoffs = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts]
    before = peers.small.call("stats")
    request_ids = [peers.small.call("submit", handoff=handoff) for handoff in handoffs]
    found = [peers.small.call("tokens", request_id=request_id) for request_id in request_ids]
    assert found == [peers.expected(prompt) for prompt in prompts]
    assert gained(before, peers.small.call("stats"))["pulled"] == 6


def test_nothing_is_left_of_200_requests(peers: Peers) -> None:
    """Eight at a time, of eight lengths. What a process takes at first it keeps."""

    def hand_off(number: int) -> None:
        prompts = [prompt_of(1 + 19 * length) for length in range(8)]
        handoffs = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts]
        request_ids = [peers.decode.call("submit", handoff=handoff, max_new_tokens=2) for handoff in handoffs]
        for handoff, request_id in zip(handoffs, request_ids, strict=True):
            tokens = peers.decode.call("tokens", request_id=request_id)
            assert tokens[0] == json.loads(handoff)["first_token"], number

    before = peers.decode.call("stats")
    for number in range(10):
        hand_off(number)
    settled = [peer.call("resident_bytes") for peer in (peers.prefill, peers.decode)]
    for number in range(15):
        hand_off(number)
    left = [peer.call("resident_bytes") for peer in (peers.prefill, peers.decode)]
    assert gained(before, peers.decode.call("stats"))["pulled"] == 200
    assert max(after - first for first, after in zip(settled, left, strict=True)) < MAX_GROWTH_BYTES


def test_a_prefill_that_finds_no_blocks_waits_for_a_lease_to_end(peers: Peers) -> None:
    prompts = [prompt_of(50) for _ in range(4)]
    peers.small.call("begin", prompts=prompts)
    eventually(lambda: len(peers.small.call("ready")) == 2)
    time.sleep(0.3)  # for a third, were it to come, or for transformers to give up
    for index, prompt in enumerate(prompts):
        eventually(lambda index=index: len(peers.small.call("ready")) > index)
        assert peers.decoded(peers.small.call("ready")[index]) == peers.expected(prompt)


def test_a_request_can_be_cancelled_while_its_blocks_are_pulled(peers: Peers) -> None:
    before = peers.small.call("stats")
    handoff = peers.prefill.call("prefill", prompt=prompt_of(40))
    request_id = peers.small.call("submit", handoff=handoff)
    eventually(lambda: peers.small.call("stats")["held_tables"] == 1)
    peers.small.call("cancel", request_id=request_id)
    eventually(lambda: peers.small.call("stats")["held_tables"] == 0)
    assert gained(before, peers.small.call("stats")) == {}
    peers.prefill.call("abort", handoff=handoff)


def test_a_manager_that_stops_first_ends_what_it_was_given(peers: Peers) -> None:
    prompt = prompt_of(40)
    request_id = peers.small.call("submit", handoff=peers.prefill.call("prefill", prompt=prompt))
    eventually(lambda: peers.small.call("stats")["held_tables"] == 1)
    peers.small.call("restart")
    assert peers.small.call("tokens", request_id=request_id) == peers.expected(prompt)


def test_closing_recomputes_what_is_on_its_way(peers: Peers) -> None:
    """And leaves a manager that goes on, and that another handoff may take over."""
    prompts = [prompt_of(40), prompt_of(40)]
    handoffs = [peers.prefill.call("prefill", prompt=prompt) for prompt in prompts]
    request_id = peers.small.call("submit", handoff=handoffs[0], request_id="on its way")
    eventually(lambda: peers.small.call("stats")["held_tables"] == 1)
    peers.small.call("reopen")
    assert peers.small.call("tokens", request_id=request_id) == peers.expected(prompts[0])
    request_id = peers.small.call("submit", handoff=handoffs[1])
    assert peers.small.call("tokens", request_id=request_id) == peers.expected(prompts[1])
    assert peers.small.call("stats")["pulled"] == 1
    peers.prefill.call("abort", handoff=handoffs[0])
