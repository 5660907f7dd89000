# SPDX-License-Identifier: Apache-2.0
"""Two real servers that share their prefixes: the second pulls what the first has computed, and answers the same."""

from __future__ import annotations

import asyncio

import pytest
from chats import MODEL, counted, pool_flags
from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Pair, eventually, prompt
from servers import ENGINES, STEADY_MALLOC, Server, coordinator, post, running, vllm

from kvlink.control import CoordinatorClient

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

_WITHIN_S = 20.0
_LENGTHS = (300, 350, 800, 400, 900, 500, 1000)
"""A server learns its rate from prompts of these lengths. The first ones are slow."""


def results(pair: Pair, server: Server, result: str) -> float:
    return counted(
        Pair(MODEL, pair.connector, server, server, 0, []), "vllm:kvlink_turns_total", f'result="{result}"'
    )


def published(directory: Server) -> int:
    """Returns how many prefixes the coordinator knows."""

    async def ask() -> int:
        async with CoordinatorClient(f"127.0.0.1:{directory.launch.port}") as client:
            return (await client.status()).prefixes

    return asyncio.run(ask())


def test_a_prompt_is_computed_once_by_two_servers() -> None:
    with running([coordinator()]) as (directory,):
        config = kv_transfer(
            "KVLinkConnector",
            lease_s=PATIENT_LEASE_S,
            share_prefixes=True,
            coordinator=f"127.0.0.1:{directory.launch.port}",
        )
        launches = [
            vllm(f"{name}-shares", MODEL, config, pool_flags(64), STEADY_MALLOC) for name in ("one", "other")
        ]
        with running(launches) as (one, other):
            pair = Pair(MODEL, "KVLinkConnector", one, other, PATIENT_LEASE_S, [directory])
            for server in (one, other):  # each learns the time of its prefills
                for length in _LENGTHS:
                    assert pair.ask(server, prompt(f"{server.url} {length}", length), 1).status == 200
            tokens = [*prompt("document", 1536), *prompt("question", 40)]
            first = pair.ask(one, tokens)
            assert first.status == 200, first.body
            # The second server would compute, and have, what it asks for before it is published.
            assert eventually(lambda: published(directory) == 2 * len(_LENGTHS) + 1, _WITHIN_S)
            answer = pair.ask(other, tokens)
            assert answer.tokens == first.tokens
            assert eventually(lambda: results(pair, other, "loaded") == 1, _WITHIN_S)
            computed = counted(
                Pair(MODEL, pair.connector, other, one, 0, []),
                "vllm:prompt_tokens_by_source_total",
                'source="local_compute"',
            )
            print("computed by the second server:", computed, "of", sum(_LENGTHS) + len(tokens))
            assert computed == sum(_LENGTHS) + len(tokens) - 1536

            for server in (one, other):  # what is published has ended, and both compute
                assert post(f"{server.url}/reset_prefix_cache", {}) == (200, {"success": True})
            assert eventually(lambda: published(directory) == 0, _WITHIN_S)
            assert pair.ask(other, tokens).tokens == first.tokens
            assert results(pair, other, "loaded") == 1
