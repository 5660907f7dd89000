# SPDX-License-Identifier: Apache-2.0
"""Hybrid models between real servers: layers with attention, and layers with states of a fixed size."""

from __future__ import annotations

import pytest
from connectors import PATIENT_LEASE_S
from faults import SCENARIOS, Outcome, play
from pair import CHUNK_TOKENS, Pair, eventually, prompt
from references import References, references_for
from servers import Server, post

pytestmark = pytest.mark.timeout(900)

LENGTHS = (1, 2, 3, 127, 128, 129, 300, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2100, 4000)
SETTLE_S = 30.0
_KVLINK = {"connector": "KVLinkConnector", "lease_s": PATIENT_LEASE_S}
_HYBRIDS = pytest.mark.pairs({"model": "granite-hybrid", **_KVLINK}, {"model": "qwen3-next", **_KVLINK})


def check_lengths(pair: Pair, references: References) -> None:
    """Decode continues from prefill's attention and states. It computes a prompt of one token itself."""
    command = pair.decode.launch.command
    loads_each = int(
        command[command.index("--tensor-parallel-size") + 1]
    )  # every rank of decode counts its own
    loads = pair.loads()
    for num_tokens in LENGTHS:
        tokens = prompt("hybrid", num_tokens)
        expected = references(tokens)
        if num_tokens == 1:
            assert pair.ask(pair.decode, tokens).tokens == expected
            continue
        answer = pair.continued(tokens, pair.hand_off(tokens))
        assert (answer.status, answer.tokens) == (200, expected), num_tokens
    assert eventually(lambda: pair.loads() == loads + loads_each * (len(LENGTHS) - 1), SETTLE_S)
    assert pair.decode.metric("vllm:kvlink_failed_loads_total") == 0


@_HYBRIDS
def test_any_length(pair: Pair, references: References) -> None:
    check_lengths(pair, references)
    assert pair.settles(SETTLE_S)


@pytest.mark.pairs(
    {"model": "granite-hybrid", "tp": (2, 1), **_KVLINK}, {"model": "granite-hybrid", "tp": (1, 2), **_KVLINK}
)
def test_other_degrees(pair: Pair, references: References) -> None:
    check_lengths(pair, references)


def forget(server: Server) -> None:
    """Empties the server's prefix cache."""
    assert eventually(lambda: post(f"{server.url}/reset_prefix_cache", {})[0] == 200, SETTLE_S)


def hits(server: Server) -> float:
    return server.metric("vllm:prefix_cache_hits_total")


@pytest.mark.pairs({"model": "qwen3-next", "prefix_caching": True, **_KVLINK})
def test_prefix_caching(pair: Pair) -> None:
    """Blocks have 640 tokens. Prefill caches the states at their ends, and hands off the one after the prompt."""
    shared = prompt("cached", 1400)
    prompts = [shared + prompt(f"cached {i}", 30 + 300 * i) for i in range(3)]
    prompts += [shared[:num_tokens] for num_tokens in (2, 640, 641, 1280, 1281)]
    expected = references_for(pair.model, prefix_caching=True)
    expected.learn(prompts)
    pair.forget()
    loads, cached = pair.loads(), hits(pair.decode)
    for tokens in prompts * 2:
        forget(pair.prefill)  # from a cached state vLLM computes the rest in other arithmetic
        answer = pair.continued(tokens, pair.hand_off(tokens))
        assert (answer.status, answer.tokens) == (200, expected(tokens)), len(tokens)
    # Decode has loaded the states at the ends of blocks of 641 and 1,281 tokens. It loads those prompts once.
    assert hits(pair.decode) > cached
    assert eventually(lambda: pair.loads() == loads + 2 * len(prompts) - 2, SETTLE_S)
    # Prefill continues from a state that it has cached, whatever decode has.
    assert pair.ask(pair.prefill, [*shared, 1], 1).status == 200
    loads, cached, answers = pair.loads(), hits(pair.prefill), []
    for _ in range(2):
        answers.append(pair.continued(prompts[1], pair.hand_off(prompts[1])).tokens)
        forget(pair.decode)
    assert answers[0] == answers[1]
    assert hits(pair.prefill) == cached + 2 * 1280
    assert eventually(lambda: pair.loads() == loads + 2, SETTLE_S)
    # A refused load leaves what decode has: it computes the prompt itself.
    alone = pair.ask(pair.decode, prompts[2]).tokens
    assert pair.continued(prompts[2], pair.hand_off(prompts[1])).tokens is not None
    forget(pair.decode)
    assert pair.continued(prompts[2], pair.hand_off(prompts[1])).tokens == alone


@pytest.mark.pairs({"model": "granite-hybrid", "connector": "KVLinkConnector"})
@pytest.mark.parametrize("name", SCENARIOS)
def test_faults_never_give_wrong_tokens(pair: Pair, references: References, name: str) -> None:
    outcome: Outcome = play(SCENARIOS[name], pair, references)
    assert outcome.safe, outcome
    tokens = prompt(f"after {name}", 300)
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)
    assert pair.settles(SETTLE_S)
