# SPDX-License-Identifier: Apache-2.0
"""Handoffs in parts between real servers: decode pulls while prefill computes the rest of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from connectors import PATIENT_LEASE_S
from pair import CHUNK_TOKENS, Pair, ask, eventually, prompt, stream
from references import References
from servers import Server, router, running

FROM_TOKENS = 256
SETTLE_S = 30.0
_IN_PARTS = {
    "connector": "KVLinkConnector",
    "coordinated": True,
    "lease_s": PATIENT_LEASE_S,  # blocks that come back do so before it ends
    "streaming_from_tokens": FROM_TOKENS,
    "streaming": "always",  # on one host nothing has to come early
}
BOTH_KINDS = pytest.mark.pairs({"model": "llama", **_IN_PARTS}, {"model": "gemma3", **_IN_PARTS})

pytestmark = [pytest.mark.timeout(900), pytest.mark.pairs({"model": "llama", **_IN_PARTS})]


@pytest.fixture
def following(pair: Pair) -> Iterator[Server]:
    """A router that sends prompts to both sides at once, and with caches that are empty."""
    pair.forget()
    with running([router([pair.prefill], [pair.decode], "--streaming-from", str(FROM_TOKENS))]) as (server,):
        yield server


def followed(server: Server) -> float:
    return server.metric("kvlink_router_followed_total")


@BOTH_KINDS
@pytest.mark.parametrize("num_tokens", [CHUNK_TOKENS + 200, 4000])
def test_it_comes_while_prefill_computes(
    pair: Pair, references: References, following: Server, num_tokens: int
) -> None:
    """Early bytes are those that were at decode before prefill began the prompt's last chunk."""
    tokens, loads = prompt("any length", num_tokens), pair.loads()
    early = pair.decode.metric("vllm:kvlink_early_bytes_total")
    answer = ask(following.url, pair.model, tokens)
    assert (answer.status, answer.tokens) == (200, references(tokens))
    assert eventually(lambda: pair.loads() > loads, SETTLE_S)
    came = pair.decode.metric("vllm:kvlink_early_bytes_total") - early
    print(f"{num_tokens} tokens: {came / 2**20:.1f} MiB came early")
    # Two chunks may be over before the coordinator has taken what it was told first: then the answer hands off, though
    # decode may have followed already, and loads what its prefix cache has not kept of that.
    if num_tokens > 2 * CHUNK_TOKENS:
        assert followed(following) == 1
        assert came > 0
    assert pair.loads() <= loads + (1 if followed(following) else 2)
    assert pair.settles(SETTLE_S)


def test_short_prompts_go_one_after_the_other(pair: Pair, references: References, following: Server) -> None:
    tokens, loads = prompt("any length", 129), pair.loads()
    assert ask(following.url, pair.model, tokens).tokens == references(tokens)
    assert followed(following) == 0
    assert eventually(lambda: pair.loads() == loads + 1, SETTLE_S)


def test_many_at_once(pair: Pair, references: References, following: Server) -> None:
    """Their chunks share steps, and end in the middle of blocks."""
    prompts = [prompt("any length", num_tokens) for num_tokens in (300, CHUNK_TOKENS + 200, 4000)]
    prompts += [prompt(f"one of many: {i}", 40 + 97 * i) for i in range(8)]
    expected = [references(tokens) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: ask(following.url, pair.model, tokens), prompts))
    assert [answer.tokens for answer in answers] == expected
    assert followed(following) > 0
    assert pair.settles(SETTLE_S)


def test_a_client_that_hangs_up(pair: Pair, references: References, following: Server) -> None:
    for turn in range(3):
        stream(following.url, pair.model, prompt(f"hangs up {turn}", 4000), hang_up_after=0)
    assert pair.settles(SETTLE_S)
    after = prompt("after those who hung up", 500)
    assert ask(following.url, pair.model, after).tokens == references(after)


def test_the_coordinator_dies(pair: Pair, references: References, following: Server) -> None:
    """Tickets ride on the router's message all the same; when it is back, decode follows again."""
    tokens = prompt("any length", CHUNK_TOKENS + 200)
    expected = references(tokens)
    pair.coordinators[0].kill()
    answer = ask(following.url, pair.model, tokens)
    assert (answer.status, answer.tokens) == (200, expected)
    assert followed(following) == 0
    pair.coordinators[0] = pair.coordinators[0].restarted().wait()

    def follows() -> bool:
        pair.forget()
        assert ask(following.url, pair.model, tokens).tokens == expected
        return followed(following) > 0

    assert eventually(follows, 60)
    assert pair.settles(SETTLE_S)


def test_prefill_dies_in_the_middle(pair: Pair, references: References, following: Server) -> None:
    """Decode computes the prompt itself, and follows the restarted server."""
    tokens = prompt("any length", 4000)
    expected = references(tokens)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, following.url, pair.model, tokens)
        assert eventually(lambda: pair.prefill.metric("vllm:kvlink_active_leases") > 0, 60)
        pair.prefill.kill()
        assert asking.result().tokens == expected
    pair.prefill = pair.prefill.restarted().wait()
    pair.forget()
    assert eventually(lambda: ask(following.url, pair.model, tokens).tokens == expected, 1)
