# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector over the backend: a prefill and a decode server give the tokens that one server gives.

KVLINK_NIXL_REQUESTS says for how many requests, KVLINK_NIXL_KILLS how often prefill is killed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import PLUGINS
from connectors import PATIENT_LEASE_S, pair_of
from pair import Answer, Pair, Tokens, ask, eventually, flags, prompt
from servers import ENGINES, MODELS, running, vllm

REQUESTS = int(os.environ.get("KVLINK_NIXL_REQUESTS", "40"))
KILLS = int(os.environ.get("KVLINK_NIXL_KILLS", "1"))

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(1800 + 5 * REQUESTS + 600 * KILLS),
    pytest.mark.skipif(
        not (ENGINES / "vllm" / ".made").exists(),
        reason="no vLLM in build/engines; .ci/engines vllm makes it",
    ),
]

MODEL = "llama"
NUM_NEW = 12
_LOG_OF_LONGEST = 11.5  # 2,896 tokens
_AT_ONCE = 4
_COUNTED_S = 30.0


def prompts(name: str, count: int) -> list[Tokens]:
    """Prompts of mixed lengths: as many have from 1 to 2 tokens as have from 1,024 to 2,048."""
    chosen = random.Random(name)
    return [
        prompt(f"{name} {number}", int(2 ** chosen.uniform(0, _LOG_OF_LONGEST))) for number in range(count)
    ]


MANY = prompts("many", REQUESTS)
WAITING, FLYING, AFTER = (
    [prompts(f"{when} {n}", 8) for n in range(KILLS)] for when in ["waiting", "flying", "after"]
)


@pytest.fixture(scope="module")
def single() -> dict[tuple[int, ...], Tokens | None]:
    """The tokens of one server, by prompt."""
    script = Path(__file__).parents[1] / "engines" / "models.py"
    subprocess.run([str(ENGINES / "vllm" / "bin" / "python"), str(script), str(MODELS)], check=True)
    asked = [*MANY, *(tokens for each in (*WAITING, *FLYING, *AFTER) for tokens in each)]
    with (
        running([vllm("plain", MODEL, flags=flags(MODEL))]) as (server,),
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        answers = list(pool.map(lambda tokens: ask(server.url, MODEL, tokens, NUM_NEW), asked))
    assert {answer.status for answer in answers} == {200}
    return {tuple(tokens): answer.tokens for tokens, answer in zip(asked, answers, strict=True)}


@pytest.fixture(scope="module")
def pair(single: object) -> Iterator[Pair]:
    """Decode computes the cache that it cannot load, so loads are counted, too. The one server has ended."""
    with pair_of(
        "NixlConnector",
        MODEL,
        lease_s=PATIENT_LEASE_S,
        env={"NIXL_PLUGIN_DIR": str(PLUGINS)},
        backends=["KVLINK"],
    ) as pair:
        for server in (pair.prefill, pair.decode):
            assert server.num_logged("Backend KVLINK was instantiated") > 0, server.tail()
        yield pair


def handed_off(pair: Pair, tokens: Tokens) -> Answer | None:
    """The answer of decode, or None if prefill did not give its."""
    try:
        handoff = pair.hand_off(tokens)
    except OSError:
        return None
    return pair.continued(tokens, handoff, NUM_NEW)


def wrong(
    single: dict[tuple[int, ...], Tokens | None], asked: Sequence[Tokens], answers: Sequence[Answer | None]
) -> list[tuple[int, Answer]]:
    """Returns answers that are not those of one server, by their place."""
    return [
        (place, answer)
        for place, (tokens, answer) in enumerate(zip(asked, answers, strict=True))
        if answer and (answer.status != 200 or answer.tokens != single[tuple(tokens)])
    ]


def loaded(pair: Pair, single: dict[tuple[int, ...], Tokens | None], asked: Sequence[Tokens]) -> None:
    """Asks, with several at once. Each answer is right, and each prompt's cache was loaded."""
    before = pair.loads()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda tokens: handed_off(pair, tokens), asked))
    assert None not in answers
    assert not wrong(single, asked, answers)
    assert eventually(lambda: pair.loads() == before + len(asked), _COUNTED_S), (before, pair.loads())


def test_tokens_are_those_of_one_server(pair: Pair, single: dict[tuple[int, ...], Tokens | None]) -> None:
    loaded(pair, single, MANY)


@pytest.mark.parametrize("number", range(KILLS))
def test_a_prefill_server_that_is_killed(
    pair: Pair, single: dict[tuple[int, ...], Tokens | None], number: int
) -> None:
    """Handoffs wait for decode, others are under way. None gives wrong tokens, and the next prefill server serves."""
    waiting = [pair.hand_off(tokens) for tokens in WAITING[number]]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        flying = [pool.submit(handed_off, pair, tokens) for tokens in FLYING[number]]
        wait(flying, return_when=FIRST_COMPLETED)
        pair.prefill.kill()
    answers = [each.result() for each in flying]
    late = [
        pair.continued(tokens, handoff, NUM_NEW)
        for tokens, handoff in zip(WAITING[number], waiting, strict=True)
    ]
    assert not wrong(single, WAITING[number], late)
    assert not wrong(single, FLYING[number], answers)
    pair.prefill = pair.prefill.restarted().wait()
    loaded(pair, single, AFTER[number])
