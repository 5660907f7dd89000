# SPDX-License-Identifier: Apache-2.0
"""Routers and clients do more than one request with one handoff: refused, multiplied, retried, answered too long.

The policy is "fail", so that a load that fails shows, and no lease ends by itself while a test runs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from connectors import PATIENT_LEASE_S
from pair import NUM_NEW, Answer, Pair, eventually, prompt
from references import References
from servers import post

AT_ONCE_S = 15.0
_SAMPLED_GREEDILY = {"temperature": 1, "top_k": 1}
"""Equal to temperature 0, with which vLLM refuses `n` above 1."""
_FAILING = {"connector": "KVLinkConnector", "policy": "fail", "lease_s": PATIENT_LEASE_S}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.pairs({"model": "llama", "module_path": "kvlink.integrations.vllm", **_FAILING}),
]


def unused(pair: Pair, reason: str) -> float:
    samples = pair.decode.samples() | {
        f"prefill {name}": value for name, value in pair.prefill.samples().items()
    }
    return sum(
        value
        for name, value in samples.items()
        if "vllm:kvlink_unused_handovers_total" in name and f'reason="{reason}"' in name
    )


def several(pair: Pair, body: dict[str, Any]) -> tuple[int, list[list[int]]]:
    """Status, and the tokens of each choice."""
    asked = {"model": pair.model, "max_tokens": NUM_NEW, "temperature": 0, "return_token_ids": True}
    status, answer = post(f"{pair.decode.url}/v1/completions", asked | body)
    return status, [choice["token_ids"] for choice in answer.get("choices", ())]


def test_the_connector_is_found_by_the_packages_path(pair: Pair, references: References) -> None:
    """`kv_connector_module_path` of this file's servers."""
    tokens, loads = prompt("module path", 300), pair.loads()
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)
    assert eventually(lambda: pair.loads() == loads + 1, AT_ONCE_S)


@pytest.mark.pairs({"model": "gemma3", **_FAILING})
@pytest.mark.parametrize(
    ("num_tokens", "answered"), [(1024, 130), (1300, 600), (1000, 1), (1023, 1), (639, 1)]
)
def test_windows_that_prefill_has_moved(
    pair: Pair, references: References, num_tokens: int, answered: int
) -> None:
    """Windows have 512 tokens, blocks 128. The last token of 639 and 1,023 reads a block that vLLM would drop."""
    tokens = prompt("windows", num_tokens)
    asked = pair.ask(
        pair.prefill, tokens, answered, kv_transfer_params={"do_remote_decode": True}, ignore_eos=True
    )
    assert asked.status == 200
    answer = pair.continued(tokens, asked.handoff or {"do_remote_prefill": True})
    assert (answer.status, answer.tokens) == (200, references(tokens))
    assert bool(asked.handoff) == (answered == 1)
    if answered > 1:
        assert unused(pair, "window_passed") > 0
    assert pair.settles(AT_ONCE_S)


@pytest.mark.parametrize("spoilt", [{"temperature": -1}, {"model": "unknown"}, {"max_tokens": 100_000}])
def test_a_request_that_decode_refuses(pair: Pair, spoilt: dict[str, Any]) -> None:
    handoff = pair.hand_off(prompt("refused", 2000))
    before, mixed_up = unused(pair, "released"), unused(pair, "another_prompt")
    status, _ = several(pair, {"prompt": prompt("refused", 2000), "kv_transfer_params": handoff} | spoilt)
    assert 400 <= status < 500
    assert pair.settles(AT_ONCE_S)
    assert unused(pair, "released") == before + 1
    assert unused(pair, "another_prompt") == mixed_up


def test_several_answers_to_one_prompt(pair: Pair, references: References) -> None:
    for turn in range(4):
        tokens = prompt(f"several answers {turn}", 700)
        body = {"prompt": tokens, "n": 3, "kv_transfer_params": pair.hand_off(tokens)} | _SAMPLED_GREEDILY
        assert several(pair, body) == (200, [references(tokens)] * 3)
    assert pair.settles(AT_ONCE_S)


def test_several_prompts_with_the_hand_off_of_one(pair: Pair, references: References) -> None:
    """The other prompt's request is refused by its digest; the client learns of it, and gets no wrong token."""
    tokens, others = prompt("of several", 500), prompt("another of several", 500)
    status, answers = several(pair, {"prompt": [tokens, others], "kv_transfer_params": pair.hand_off(tokens)})
    assert status >= 500 or answers == [references(tokens), references(others)]
    assert pair.settles(AT_ONCE_S)


def test_a_hand_off_that_is_retried(pair: Pair, references: References) -> None:
    """By a gateway, at once and after the first was answered."""
    tokens = prompt("retried", 700)
    handoff = pair.hand_off(tokens)

    def asked(_: int) -> Answer:
        return pair.continued(tokens, handoff)

    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(asked, range(3)), asked(0)]
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, references(tokens))] * 4
    assert unused(pair, "used_already") > 0
    assert pair.settles(AT_ONCE_S)


def test_several_answers_of_prefill(pair: Pair, references: References) -> None:
    tokens = prompt("several of prefill", 700)
    asks = {"n": 2, "kv_transfer_params": {"do_remote_decode": True}} | _SAMPLED_GREEDILY
    asked, loads = pair.ask(pair.prefill, tokens, 1, **asks), pair.loads()
    assert asked.handoff, asked.body
    answer = pair.continued(tokens, asked.handoff)
    assert (answer.status, answer.tokens) == (200, references(tokens))
    assert eventually(lambda: pair.loads() == loads + 1, AT_ONCE_S)
    assert pair.settles(AT_ONCE_S), "one lease was stranded"


def test_the_cache_is_reset_while_leases_are_open(pair: Pair, references: References) -> None:
    tokens = prompt("reset", 700)
    handoff = pair.hand_off(tokens)
    reset = f"{pair.prefill.url}/reset_prefix_cache"
    post(f"{reset}?reset_external=true", {})
    assert eventually(
        lambda: post(f"{reset}?reset_running_requests=true", {}) == (200, {"success": True}), AT_ONCE_S
    )
    answer = pair.continued(tokens, handoff)
    assert answer.status >= 500 or answer.tokens == references(tokens)
    assert pair.settles(AT_ONCE_S)
