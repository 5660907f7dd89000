# SPDX-License-Identifier: Apache-2.0
"""Hybrid models between real servers: layers with attention, and layers with states of a fixed size."""

from __future__ import annotations

import pytest
from connectors import PATIENT_LEASE_S
from faults import SCENARIOS, Outcome, play
from pair import CHUNK_TOKENS, Pair, eventually, prompt
from references import References

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


@pytest.mark.pairs({"model": "granite-hybrid", "connector": "KVLinkConnector"})
@pytest.mark.parametrize("name", SCENARIOS)
def test_faults_never_give_wrong_tokens(pair: Pair, references: References, name: str) -> None:
    outcome: Outcome = play(SCENARIOS[name], pair, references)
    assert outcome.safe, outcome
    tokens = prompt(f"after {name}", 300)
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)
    assert pair.settles(SETTLE_S)
