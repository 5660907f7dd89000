# SPDX-License-Identifier: Apache-2.0
"""Other tensor-parallel degrees at either end, and the other path: greedy tokens of one plain server."""

from __future__ import annotations

import pytest
from connectors import PATIENT_LEASE_S
from pair import Pair, prompt
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


def test_heads_find_their_ranks(pair: Pair, references: References) -> None:
    pair.forget()
    for num_tokens in (1, 128, 129, 1500):
        tokens = prompt("any length", num_tokens)
        answer = pair.continued(tokens, pair.hand_off(tokens))
        assert (answer.status, answer.tokens) == (200, references(tokens))
    if pair.connector == "KVLinkConnector":
        assert pair.decode.metric("vllm:kvlink_failed_loads_total") == 0
        assert pair.decode.metric("vllm:kvlink_transfers_total") > 0
    assert pair.settles(30.0)  # no lease has ended by itself by then
