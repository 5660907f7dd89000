# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers, a router, greedy tokens: those of one plain server, whatever happens on the way."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from connectors import PATIENT_LEASE_S
from faults import SCENARIOS, Outcome, play
from pair import CHUNK_TOKENS, NUM_NEW, Pair, ask, eventually, flags, prompt, stream
from reading import cache_of
from references import References
from servers import STEADY_MALLOC, Server, post, running, vllm, vllms_router

pytestmark = pytest.mark.timeout(900)  # a session's first test starts two or three servers

BLOCK_TOKENS = 128
LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 300, CHUNK_TOKENS + 200, 4000)
ALL_MODELS = pytest.mark.pairs(*({"model": model} for model in ("llama", "qwen3", "gemma3")))
LATENT = {"model": "deepseek", "lease_s": PATIENT_LEASE_S}
LATENT_LENGTHS = (1, 15, 16, 17, 300, CHUNK_TOKENS + 200)
SETTLE_S = 30.0
_STREAMS = 5
MOST_GROWTH_MIB = 4.0
"""By 100 requests, beyond a plain server's: 40 KiB a request."""
MOST_STEPS_MIB = 32.0
"""By 500 requests; 17.5 is the most that was seen, of a plain server."""


@ALL_MODELS
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_any_length(pair: Pair, references: References, routed: Server, num_tokens: int) -> None:
    tokens, loads = prompt("any length", num_tokens), pair.loads()
    answer = ask(routed.url, pair.model, tokens)
    assert (answer.status, answer.tokens) == (200, references(tokens))
    assert routed.metric("kvlink_router_handed_off_total") == 1
    assert eventually(lambda: pair.loads() == loads + 1, SETTLE_S)


@pytest.mark.pairs(LATENT)
@pytest.mark.parametrize("num_tokens", LATENT_LENGTHS)
def test_latent_caches(pair: Pair, references: References, num_tokens: int) -> None:
    """MLA: the tokens are those that the same bytes give after another connector has moved them.

    Decode would compute others by itself, so no lease may end on a busy machine.
    """
    references.learn(prompt("latent", length) for length in LATENT_LENGTHS)
    tokens = prompt("latent", num_tokens)
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)


@pytest.mark.pairs({**LATENT, "connector": "KVLinkConnector"}, {"model": "llama"})
def test_the_same_bytes_lie_at_both_servers(pair: Pair) -> None:
    tokens, whole, loads = prompt("the same bytes", 4 * BLOCK_TOKENS + 5), 4 * BLOCK_TOKENS, pair.loads()
    assert pair.continued(tokens, pair.hand_off(tokens)).status == 200
    assert eventually(lambda: pair.loads() == loads + 1, SETTLE_S)
    # What decode has loaded is in its prefix cache by now, and it hands that on.
    ours, theirs = (
        cache_of(functools.partial(pair.hand_off, tokens, at), whole) for at in (pair.decode, pair.prefill)
    )
    assert np.count_nonzero(ours) > ours.size / 1000
    assert np.array_equal(ours, theirs)
    assert pair.settles(SETTLE_S)


@ALL_MODELS
def test_many_at_once(pair: Pair, references: References, routed: Server) -> None:
    prompts = [prompt(f"one of many: {i}", 40 + 97 * i) for i in range(8)]
    expected = [references(tokens) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: ask(routed.url, pair.model, tokens), prompts))
    assert [answer.tokens for answer in answers] == expected


@ALL_MODELS
def test_shared_prefixes(pair: Pair, references: References, routed: Server) -> None:
    """Tokens that decode has cached already are not moved again; others are."""
    shared = prompt("shared", 5 * BLOCK_TOKENS)
    prompts = [shared + prompt(f"tail {i}", 30 + 60 * i) for i in range(3)]
    prompts += [prompts[0], prompts[2] + prompt("longer", 200)]
    for tokens in prompts:
        assert ask(routed.url, pair.model, tokens).tokens == references(tokens)


def test_a_stream(pair: Pair, references: References, routed: Server) -> None:
    """In several events, unless vLLM's API server was so late that it had them all: then it says them in one."""
    tokens = prompt("a stream", 333)
    seen: list[int] = []
    while not seen or (seen[-1] == 1 and len(seen) < _STREAMS):
        events = stream(routed.url, pair.model, tokens)
        assert [token for event in events for token in event] == references(tokens)
        seen.append(len(events))
    assert seen[-1] > 1, f"every one of {_STREAMS} came at once"


def test_a_chat(pair: Pair, routed: Server) -> None:
    """The same text straight to decode, which then computes it itself."""
    body = {
        "model": pair.model,
        "messages": [{"role": "user", "content": " ".join(f"t{token}" for token in prompt("chat", 200))}],
        "max_completion_tokens": NUM_NEW,
        "temperature": 0,
    }
    answers = [post(f"{url}/v1/chat/completions", body) for url in (routed.url, pair.decode.url)]
    assert [status for status, _ in answers] == [200, 200]
    texts = {answer["choices"][0]["message"]["content"] for _, answer in answers}
    assert len(texts) == 1


def test_another_router(pair: Pair, references: References) -> None:
    """One that was written for NIXL's handoffs and knows nothing of these."""
    loads = pair.loads()
    with running([vllms_router(pair.prefill, pair.decode)]) as (server,):
        for num_tokens in (1, 300, 4000):
            tokens = prompt(f"another router {num_tokens}", num_tokens)
            assert ask(server.url, pair.model, tokens).tokens == references(tokens)
        tokens = prompt("another router, in a stream", 333)
        events = stream(server.url, pair.model, tokens)
        assert [token for event in events for token in event] == references(tokens)
    assert eventually(lambda: pair.loads() == loads + 4, SETTLE_S)


@pytest.mark.parametrize("hang_up_after", [0, 1])
def test_clients_that_hang_up(pair: Pair, references: References, hang_up_after: int) -> None:
    """While decode pulls, and while it answers. All blocks come back; who follows is served."""
    tokens = prompt(f"hangs up {hang_up_after}", 4000)
    for _ in range(3):
        stream(pair.decode.url, pair.model, tokens, hang_up_after, kv_transfer_params=pair.hand_off(tokens))
    assert pair.settles(SETTLE_S)
    after = prompt("after those who hung up", 500)
    assert pair.continued(after, pair.hand_off(after)).tokens == references(after)


def test_nobody_comes_for_a_handoff(pair: Pair) -> None:
    """Its blocks come back when the lease ends."""
    pair.hand_off(prompt("nobody comes", 2000))
    assert pair.usage(pair.prefill) > 0
    assert pair.settles(SETTLE_S)


def test_beam_search_computes_the_prompt(pair: Pair) -> None:
    """vLLM drops the parameters of such requests. Nothing is lost but time: prefill's blocks come back by the lease."""
    tokens, loads = prompt("beams", 500), pair.loads()
    beams = {"use_beam_search": True, "n": 2}
    handoff = pair.hand_off(tokens)
    answers = [
        pair.ask(pair.decode, tokens, **beams, **params) for params in ({"kv_transfer_params": handoff}, {})
    ]
    assert [answer.status for answer in answers] == [200, 200]
    texts = [[choice["text"] for choice in answer.body["choices"]] for answer in answers]
    assert texts[0] == texts[1]
    assert pair.loads() == loads
    assert pair.settles(pair.lease_s + SETTLE_S)


@pytest.mark.pairs({"model": "llama", "connector": "KVLinkConnector"})
def test_what_is_not_used_is_counted(pair: Pair, references: References) -> None:
    """Without a handoff decode computes the prompt, and says so."""
    tokens = prompt("any length", BLOCK_TOKENS - 1)

    def counted() -> float:
        return pair.decode.metric("vllm:kvlink_unused_handovers_total")

    before = counted()
    assert pair.continued(tokens, {"do_remote_prefill": True}).tokens == references(tokens)
    assert eventually(lambda: counted() == before + 1, SETTLE_S)
    assert any('reason="not_offered"' in sample for sample in pair.decode.samples())


@pytest.mark.parametrize("name", SCENARIOS)
def test_faults_never_give_wrong_tokens(pair: Pair, references: References, name: str) -> None:
    outcome: Outcome = play(SCENARIOS[name], pair, references)
    if pair.connector == "NixlConnector" and not outcome.safe:
        pytest.xfail(f"{name}: {outcome}; noticed by {outcome.noticed or 'nobody'}")
    assert outcome.safe, outcome
    tokens = prompt(f"after {name}", 300)
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)
    assert pair.settles(SETTLE_S)


def test_decode_dies(pair: Pair, references: References) -> None:
    """In the middle of an answer. Prefill's blocks come back, and the next decode server is served."""
    tokens = prompt("decode dies", 2000)
    stream(pair.decode.url, pair.model, tokens, hang_up_after=1, kv_transfer_params=pair.hand_off(tokens))
    waiting = pair.hand_off(prompt("decode is dead", 2000))
    pair.decode.kill()
    assert waiting
    pair.decode = pair.decode.restarted().wait()
    assert pair.settles(SETTLE_S)
    assert pair.continued(tokens, pair.hand_off(tokens)).tokens == references(tokens)


def test_nothing_is_left_of_500_requests(pair: Pair, references: References, routed: Server) -> None:
    """No block, no lease, no memory beyond what a plain server takes for the same requests, asked in turn.

    That one grows, too, in steps which malloc takes sooner or later. What leaks grows in every round, so the median
    one counts; what is lost once must show beyond all steps.
    """
    prompts = [prompt(f"one of many: {i}", 40 + 97 * i) for i in range(8)]
    expected = [references(tokens) for tokens in prompts]

    def wrong(server: Server, count: int) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            asked = [prompts[i % 8] for i in range(count)]
            answers = list(pool.map(lambda tokens: ask(server.url, pair.model, tokens), asked))
        return [i for i, answer in enumerate(answers) if answer.tokens != expected[i % 8]]

    with running([vllm("plain", pair.model, flags=flags(pair.model), env=STEADY_MALLOC)]) as (plain,):
        servers = (plain, pair.prefill, pair.decode)

        def memory_mib() -> list[float]:
            assert pair.settles(SETTLE_S)
            return [server.memory_mib() for server in servers]

        assert not wrong(plain, 100) + wrong(routed, 100)
        taken = [memory_mib()]
        for _ in range(5):
            assert not wrong(plain, 100) + wrong(routed, 100)
            taken.append(memory_mib())
    grown = [[round(end - start, 1) for start, end in pairwise(one)] for one in zip(*taken, strict=True)]
    print(f"MiB more by each 100 requests at a plain server, prefill and decode: {grown}")
    of_plain, *ours = map(median, grown)
    assert max(ours) < of_plain + MOST_GROWTH_MIB, grown
    assert max(map(sum, grown[1:])) < MOST_STEPS_MIB, grown
    if pair.connector == "KVLinkConnector":
        assert eventually(lambda: pair.prefill.metric("vllm:kvlink_active_leases") == 0, 5)
