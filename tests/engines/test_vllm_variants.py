# SPDX-License-Identifier: Apache-2.0
"""Servers with adapters, quantized caches and draft models: greedy tokens of a server that computes all itself.

Decode itself is that server, asked without a handoff and with an empty prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from pair import CHUNK_TOKENS, Pair, Tokens, ask, eventually, prompt
from servers import ENGINES, MODELS, Server, post
from variant_servers import SETTLE_S, check_lengths, refused, servers_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("variants"),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

LENGTHS = (1, 127, 128, 300, CHUNK_TOKENS + 200)
_STATES = ["--num-gpu-blocks-override", "700", "--no-enable-prefix-caching"]
_ASK = {"do_remote_decode": True}
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def check_refused(pair: Pair, other: Server) -> None:
    """The other server refuses prefill's cache by its layout, and computes the prompt itself."""
    check_refused_at(other, pair, prompt("refused", 300), pair.prefill)


def check_refused_at(server: Server, pair: Pair, tokens: Tokens, source: Server) -> None:
    """`server` refuses what `source` hands off, by its layout, and computes the prompt itself."""
    expected = pair.ask(server, tokens).tokens
    assert post(f"{server.url}/reset_prefix_cache", {})[0] == 200
    before = refused(server, "LayoutMismatch")
    handoff = pair.hand_off(tokens, source)
    assert pair.ask(server, tokens, kv_transfer_params=handoff).tokens == expected
    assert eventually(lambda: refused(server, "LayoutMismatch") == before + 1, SETTLE_S)


@pytest.fixture(scope="module")
def adapters() -> Iterator[Pair]:
    known = [f"{name}={MODELS / f'adapter-{name}'}" for name in "ab"]
    more = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *known]
    with servers_of("llama", more) as (pair, _):
        yield pair


@pytest.mark.parametrize("adapter", ["a", "b", "llama"])
def test_an_adapter(adapters: Pair, adapter: str) -> None:
    check_lengths(adapters, adapter, LENGTHS)


def test_the_cache_of_another_adapter_is_refused(adapters: Pair) -> None:
    """The tokens of the prompt are the same."""
    pair, tokens = adapters, prompt("adapters", 300)
    expected = {name: ask(pair.decode.url, name, tokens).tokens for name in ("a", "b", "llama")}
    assert len({tuple(answer or ()) for answer in expected.values()}) == 3
    for computed, asks in (("a", "b"), ("llama", "a"), ("b", "llama")):
        pair.forget()
        before = refused(pair.decode, "another_prompt")
        handoff = ask(pair.prefill.url, computed, tokens, 1, kv_transfer_params=_ASK).handoff
        answer = ask(pair.decode.url, asks, tokens, kv_transfer_params=handoff)
        assert answer.tokens == expected[asks]
        assert eventually(
            lambda before=before: refused(pair.decode, "another_prompt") == before + 1, SETTLE_S
        )
        # Its blocks wait for their own reader.
        again = ask(pair.decode.url, computed, tokens, kv_transfer_params=handoff)
        assert again.tokens == expected[computed]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt-oss", ["--num-gpu-blocks-override", "192"]),
        ("llama4", ["--num-gpu-blocks-override", "192"]),
        ("nemotron-h", _STATES),
        ("falcon-h1", _STATES),
        ("lfm2", _STATES),
    ],
)
def test_other_kinds_of_caches(model: str, more: Sequence[str]) -> None:
    """Prefill leaves the last token to decode if the model has states, which then computes prompts of one token."""
    left_over = int(more is _STATES)
    with servers_of(model, more) as (pair, _):
        check_lengths(pair, model, LENGTHS[left_over:], left_over)


def test_quantized_caches() -> None:
    """Both kinds of fp8 are bytes of the same shape. A server of the other kind computes the prompt itself."""
    fp8, another = (["--kv-cache-dtype", cache] for cache in ("fp8", "fp8_e5m2"))
    with servers_of("llama", fp8, another) as (pair, (other,)):
        check_lengths(pair, "llama", LENGTHS)
        check_refused(pair, other)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_draft_models(method: str) -> None:
    """The caches of the draft model come along. A server without one computes the prompt itself."""
    folder = MODELS / f"llama-{method.removesuffix('_model')}"
    config = f'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": 3}}'
    with servers_of("llama", ["--speculative-config", config], []) as (pair, (other,)):
        check_lengths(pair, "llama", LENGTHS)
        check_refused(pair, other)


def test_multi_token_prediction() -> None:
    """The cache of the model's draft layer comes along, and so decode accepts as many drafts as without a handoff.

    From a prefill server that spoils this cache alone, decode gives the same tokens and accepts fewer drafts. Servers
    without drafts, and those with them, refuse each other's caches.
    """
    drafts = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
    spoils = ["--model", str(MODELS / "mimo-spoilt"), *drafts]
    with servers_of("mimo", drafts, [], spoils) as (pair, (without, spoilt)):
        check_lengths(pair, "mimo", LENGTHS)
        accepted = dict.fromkeys(("by itself", "handed over", "spoilt"), 0.0)
        for num_tokens in (16, *LENGTHS[1:]):
            tokens = prompt("drafts", num_tokens)
            answers = []
            for kind, source in (("by itself", None), ("handed over", pair.prefill), ("spoilt", spoilt)):
                pair.forget()
                params = {} if source is None else {"kv_transfer_params": pair.hand_off(tokens, source)}
                before, loads = pair.decode.metric(_ACCEPTED), pair.loads()
                answers.append(pair.ask(pair.decode, tokens, **params).tokens)
                accepted[kind] += pair.decode.metric(_ACCEPTED) - before
                assert pair.loads() == loads + len(params)
            assert answers[0] is not None
            assert answers[1:] == answers[:1] * 2
        assert accepted["handed over"] == accepted["by itself"]
        assert accepted["spoilt"] < accepted["by itself"] / 2
        check_refused_at(without, pair, prompt("refused", 300), pair.prefill)
        check_refused_at(pair.decode, pair, prompt("refused", 300), without)
