# SPDX-License-Identifier: Apache-2.0
"""Servers of the models and flags that variants.py makes things for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from connectors import PATIENT_LEASE_S, kv_transfer
from pair import NUM_NEW, Pair, ask, eventually, flags, prompt
from servers import Launch, Server, running, vllm

SETTLE_S = 30.0
_ASK = {"do_remote_decode": True}


@contextmanager
def servers_of(
    model: str, more: Sequence[str], *others: Sequence[str], script: str = ""
) -> Iterator[tuple[Pair, list[Server]]]:
    """Starts a pair with these flags, and one further server with each of `others` in place of them.

    `script` is one of this folder that starts vLLM's API server.
    """
    roles = [("prefill", more), ("decode", more), *(("other", flags) for flags in others)]
    launches = [
        vllm(
            f"{role}-variant-{model}",
            model,
            kv_transfer("KVLinkConnector", lease_s=PATIENT_LEASE_S),
            (*flags("llama"), *own),
        )
        for role, own in roles
    ]
    if script:
        launches = [_by_script(launch, script) for launch in launches]
    with running(launches) as (prefill, decode, *rest):
        yield Pair(model, "KVLinkConnector", prefill, decode, PATIENT_LEASE_S, []), rest


def _by_script(launch: Launch, script: str) -> Launch:
    python, _, _, *flags = launch.command
    return replace(launch, command=(python, str(Path(__file__).with_name(script)), *flags))


def check_lengths(pair: Pair, name: str, lengths: Sequence[int], left_over: int = 0) -> None:
    """Handoffs of prompts of several lengths load, and give what decode computes itself.

    With `left_over`, prefill leaves the last token to decode, and vLLM may compute a prompt and an answer in different
    arithmetic. So the prompt's last token is the first of decode's own answer to the others.
    """
    expected = {}
    for num_tokens in lengths:
        tokens = prompt("variant", num_tokens - left_over)
        answer = ask(pair.decode.url, name, tokens, NUM_NEW + left_over)
        assert answer.tokens is not None, answer.body
        expected[num_tokens] = tokens + answer.tokens[:left_over], answer.tokens[left_over:]
    pair.forget()
    loads = pair.loads()
    for tokens, continued in expected.values():
        asked = ask(pair.prefill.url, name, tokens, 1, kv_transfer_params=_ASK)
        assert asked.handoff, asked.body
        answer = ask(pair.decode.url, name, tokens, kv_transfer_params=asked.handoff)
        assert (answer.status, answer.tokens) == (200, continued), len(tokens)
    assert eventually(lambda: pair.loads() == loads + len(lengths), SETTLE_S)
    assert pair.decode.metric("vllm:kvlink_failed_loads_total") == 0
    assert pair.settles(SETTLE_S)


def refused(server: Server, reason: str) -> float:
    """How many handoffs it has refused, or loads that failed, with this reason."""
    samples = server.samples().items()
    return sum(value for name, value in samples if "_total{" in name and f'reason="{reason}"' in name)
