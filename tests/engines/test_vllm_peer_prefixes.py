# SPDX-License-Identifier: Apache-2.0
"""Two real servers that share their prefixes: the second pulls what the first has computed, and answers the same.

`kvlink replicate` lets it pull before a request needs the prefix.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import BLOCK_TOKENS, MODEL
from pair import Pair, eventually, prompt
from servers import ENGINES
from sharing import WITHIN_S, computed, forget, published, results, sharing

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]


@pytest.fixture(scope="module")
def peers() -> Iterator[Pair]:
    with sharing(64) as pair:
        yield pair


def replicate(pair: Pair, tokens: Sequence[int], path: Path) -> list[dict[str, Any]]:
    """Runs the command for both servers, and returns its rows."""
    path.write_text(json.dumps(tokens))
    servers = [pair.prefill.url, pair.decode.url]
    command = ["kvlink", "replicate", *servers, "--model", MODEL, "--tokens-file", str(path), "--json"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_prompt_is_computed_once_by_two_servers(peers: Pair) -> None:
    one, other, directory = peers.prefill, peers.decode, peers.coordinators[0]
    forget(peers)
    loaded, before = results(other, "loaded"), computed(other)
    tokens = [*prompt("document", 1536), *prompt("question", 40)]
    first = peers.ask(one, tokens)
    assert first.status == 200, first.body
    # The second server would compute, and have, what it asks for before it is published.
    assert eventually(lambda: published(directory) == 1, WITHIN_S)
    answer = peers.ask(other, tokens)
    assert answer.tokens == first.tokens
    assert eventually(lambda: results(other, "loaded") == loaded + 1, WITHIN_S)
    print("computed by the second server:", computed(other) - before, "of", len(tokens))
    assert computed(other) - before == len(tokens) - 1536

    forget(peers)
    assert peers.ask(other, tokens).tokens == first.tokens
    assert results(other, "loaded") == loaded + 1


def test_a_prefix_is_copied_ahead(peers: Pair, tmp_path: Path) -> None:
    forget(peers)
    tokens = [*prompt("system prompt", 1536), *prompt("its end", 40)]
    first, second = replicate(peers, tokens, tmp_path / "tokens.json")
    assert (first["state"], first["computed"]) == ("computed", len(tokens))
    assert (second["state"], second["pulled"], second["computed"]) == ("copied", 1536, 40)
    before = computed(peers.decode)
    answer = peers.ask(peers.decode, [*tokens, *prompt("question", 20)])
    assert computed(peers.decode) - before <= BLOCK_TOKENS  # it had all full blocks
    assert answer.tokens == peers.ask(peers.prefill, [*tokens, *prompt("question", 20)]).tokens
    assert [row["state"] for row in replicate(peers, tokens, tmp_path / "tokens.json")] == ["held", "held"]
