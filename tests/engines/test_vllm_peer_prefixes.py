# SPDX-License-Identifier: Apache-2.0
"""Two real servers that share their prefixes: the second pulls what the first has computed, and answers the same.

`kvlink replicate` lets it pull before a request needs the prefix.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import BLOCK_TOKENS, MODEL, counted, pool_flags
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


def computed(pair: Pair, server: Server) -> float:
    """Returns the tokens of prompts that a server has computed."""
    return counted(
        Pair(MODEL, pair.connector, server, server, 0, []),
        "vllm:prompt_tokens_by_source_total",
        'source="local_compute"',
    )


def published(directory: Server) -> int:
    """Returns how many prefixes the coordinator knows."""

    async def ask() -> int:
        async with CoordinatorClient(f"127.0.0.1:{directory.launch.port}") as client:
            return (await client.status()).prefixes

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def sharing() -> Iterator[Pair]:
    """Yields two servers that know the time of their prefills."""
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
            for server in (one, other):
                for length in _LENGTHS:
                    assert pair.ask(server, prompt(f"{server.url} {length}", length), 1).status == 200
            # A prefix is published by the step after its request.
            assert eventually(lambda: published(directory) == 2 * len(_LENGTHS), _WITHIN_S)
            yield pair


def forget(pair: Pair) -> None:
    """Empties both prefix caches. What is published has ended then."""
    for server in (pair.prefill, pair.decode):
        assert post(f"{server.url}/reset_prefix_cache", {}) == (200, {"success": True})
    assert eventually(lambda: published(pair.coordinators[0]) == 0, _WITHIN_S)


def replicate(pair: Pair, tokens: Sequence[int], path: Path) -> list[dict[str, Any]]:
    """Runs the command for both servers, and returns its rows."""
    path.write_text(json.dumps(tokens))
    servers = [pair.prefill.url, pair.decode.url]
    command = ["kvlink", "replicate", *servers, "--model", MODEL, "--tokens-file", str(path), "--json"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_prompt_is_computed_once_by_two_servers(sharing: Pair) -> None:
    one, other, directory = sharing.prefill, sharing.decode, sharing.coordinators[0]
    forget(sharing)
    loaded, before = results(sharing, other, "loaded"), computed(sharing, other)
    tokens = [*prompt("document", 1536), *prompt("question", 40)]
    first = sharing.ask(one, tokens)
    assert first.status == 200, first.body
    # The second server would compute, and have, what it asks for before it is published.
    assert eventually(lambda: published(directory) == 1, _WITHIN_S)
    answer = sharing.ask(other, tokens)
    assert answer.tokens == first.tokens
    assert eventually(lambda: results(sharing, other, "loaded") == loaded + 1, _WITHIN_S)
    print("computed by the second server:", computed(sharing, other) - before, "of", len(tokens))
    assert computed(sharing, other) - before == len(tokens) - 1536

    forget(sharing)
    assert sharing.ask(other, tokens).tokens == first.tokens
    assert results(sharing, other, "loaded") == loaded + 1


def test_a_prefix_is_copied_ahead(sharing: Pair, tmp_path: Path) -> None:
    forget(sharing)
    tokens = [*prompt("system prompt", 1536), *prompt("its end", 40)]
    first, second = replicate(sharing, tokens, tmp_path / "tokens.json")
    assert (first["state"], first["computed"]) == ("computed", len(tokens))
    assert (second["state"], second["pulled"], second["computed"]) == ("copied", 1536, 40)
    before = computed(sharing, sharing.decode)
    answer = sharing.ask(sharing.decode, [*tokens, *prompt("question", 20)])
    assert computed(sharing, sharing.decode) - before <= BLOCK_TOKENS  # it had all full blocks
    assert answer.tokens == sharing.ask(sharing.prefill, [*tokens, *prompt("question", 20)]).tokens
    assert [row["state"] for row in replicate(sharing, tokens, tmp_path / "tokens.json")] == ["held", "held"]
