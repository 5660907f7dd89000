# SPDX-License-Identifier: Apache-2.0
"""Other tensor-parallel degrees at either end, and the other path: greedy tokens of one plain server."""

from __future__ import annotations

import pytest
from connectors import PATIENT_LEASE_S
from pair import Pair, Tokens, eventually, prompt
from references import References

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.pairs(
        {"model": "llama", "tp": (2, 1), "lease_s": PATIENT_LEASE_S},
        {
            "model": "llama",
            "tp": (1, 2),
            "lease_s": PATIENT_LEASE_S,
            "connector": "KVLinkConnector",
            "transports": "tcp",
        },
    ),
]
_TRIES = 3
_COUNTED_S = 10.0


def test_heads_find_their_ranks(pair: Pair, references: References) -> None:
    for num_tokens in (1, 128, 129, 1500):
        tokens = prompt("any length", num_tokens)
        expected = references(tokens)
        assert any(_loaded(pair, tokens, expected) for _ in range(_TRIES)), f"{num_tokens} tokens"
    assert pair.settles(30.0)  # no lease has ended by itself by then


def _loaded(pair: Pair, tokens: Tokens, expected: Tokens) -> bool:
    """The answer is right in any case. False: a rank of decode has heard nothing for long and computed; the ranks
    spin, and on two CPUs some thread may wait that long for one."""
    pair.forget()
    loads, failed = pair.loads(), _failed(pair)
    answer = pair.continued(tokens, pair.hand_off(tokens))
    assert (answer.status, answer.tokens) == (200, expected)
    return eventually(lambda: pair.loads() > loads, _COUNTED_S) and _failed(pair) == failed


def _failed(pair: Pair) -> float:
    """Loads that ranks gave up because the owner said nothing; for any other reason is a mistake."""
    failed = {
        name: count
        for name, count in pair.decode.samples().items()
        if name.startswith("vllm:kvlink_failed_loads_total{") and count
    }
    assert all('reason="unreachable"' in name for name in failed), failed
    return sum(failed.values())
