# SPDX-License-Identifier: Apache-2.0
"""Simulated prefill workers whose caches share prefixes: every token is served once, and hand-made cases come out."""

from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.simulation.prefix_cache import PrefixCache
from kvlink.benchmarks.simulation.prefix_sharing import PrefillFleet, PrefixSharing, Served
from kvlink.benchmarks.workloads.traces import HASH_TOKENS, Request
from kvlink.errors import ConfigError
from kvlink.worker.prefix_choice import PrefillRate

RATE = PrefillRate(1000.0)  # a block takes 0.512 s
BLOCK_S = HASH_TOKENS / 1000


def asks(at_s: float, *prefixes: int, more: int = 100) -> Request:
    return Request(at_s, len(prefixes) * HASH_TOKENS + more, 1, prefixes)


def fleet(workers: int = 2, blocks: int = 100, pull_s: float = 0.01) -> PrefillFleet:
    return PrefillFleet(workers, blocks * HASH_TOKENS, RATE, lambda tokens: pull_s * tokens / HASH_TOKENS)


def run(of: PrefillFleet, *requests: Request, by_prefix: bool = False, peers: bool = True) -> list[Served]:
    return PrefixSharing(of, by_prefix, peers).run(requests)


def test_a_prefix_is_pulled_from_the_worker_that_computed_it() -> None:
    first, long, second = asks(0, 1, 2, 3), asks(5, 9, more=60_000), asks(5.5, 1, 2, 4)
    served = run(fleet(), first, long, second)
    assert [(each.computed, each.pulled, each.moved) for each in served] == [
        (1636, 0, 0), (60_512, 0, 0), (612, 1024, 1024)
    ]  # fmt: skip
    assert served[2].ttft_s == pytest.approx(2 * 0.01 + 0.612)
    without = run(fleet(), first, long, second, peers=False)
    assert without[2].computed == 1636
    assert without[2].ttft_s == pytest.approx(1.636)


def test_a_router_that_knows_the_caches_needs_no_pull() -> None:
    """The second prompt is computed by the second worker, and both have nothing to do when the third comes."""
    requests = asks(0, 1, 2, 3), asks(0.1, 7, 8, 9), asks(5, 7, 8, 6)
    by_prefix, by_load = (run(fleet(), *requests, by_prefix=known)[2] for known in (True, False))
    assert (by_prefix.computed, by_prefix.moved) == (612, 0)
    assert (by_load.computed, by_load.moved) == (612, 1024)


def test_a_pull_that_is_slower_is_declined() -> None:
    requests = asks(0, 1, 2, 3), asks(5, 9, more=60_000), asks(5.5, 1, 2, 4)
    served = run(fleet(pull_s=0.4), *requests)
    assert (served[2].computed, served[2].moved, served[2].declined) == (1636, 0, True)


def test_a_pull_of_what_is_evicted_meanwhile_is_stale() -> None:
    """The owner has room for three blocks, and computes another prompt while the pull runs."""
    served = run(
        fleet(blocks=3, pull_s=0.3),
        asks(0, 1, 2, 3),
        asks(2, 7, 8, 9),
        asks(3.3, 1, 2, 4, more=10),
        asks(2.1, 5, 6),
    )
    assert [each.stale for each in served] == [False, False, False, True]
    assert served[3].moved == 1024
    assert (served[3].computed, served[3].pulled) == (3 * HASH_TOKENS + 10, 0)


def test_pulls_share_the_links_of_their_owner() -> None:
    warm = [asks(0, 1, 2, more=1)]
    at_once = [asks(10, 1, 2, 5 + number, more=1) for number in range(3)]
    served = run(fleet(workers=4, pull_s=0.2), *warm, *at_once)
    pulled = sorted(each.ttft_s for each in served[1:] if each.pulled)
    assert len(pulled) == 2
    assert pulled[1] - pulled[0] == pytest.approx(0.4)


def test_one_token_is_always_computed() -> None:
    served = run(fleet(workers=1), asks(0, 1, 2, more=0), asks(5, 1, 2, more=0))
    assert [each.computed for each in served] == [1024, 512]


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=25)


@given(PROMPTS, st.integers(1, 8), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_token_is_served_once(
    prompts: list[list[int]], blocks: int, workers: int, by_prefix: bool, peers: bool
) -> None:
    requests = [
        asks(0.3 * number, *_chained(prompt), more=number % 3 + 1) for number, prompt in enumerate(prompts)
    ]
    served = run(fleet(workers, blocks), *requests, by_prefix=by_prefix, peers=peers)
    assert [each.prompt for each in served] == [request.prompt_tokens for request in requests]
    for each in served:
        assert 0 < each.computed <= each.prompt
        assert each.pulled in (0, each.moved)
        assert each.pulled + each.computed <= each.prompt
        assert each.ttft_s >= RATE.predict_s(each.computed) - 1e-9
    assert served == run(fleet(workers, blocks), *requests, by_prefix=by_prefix, peers=peers), "deterministic"


def _chained(prompt: list[int]) -> list[int]:
    """A number for each prefix."""
    return [*itertools.accumulate(prompt, lambda before, each: 2 * before + each + 1, initial=1)]


@given(PROMPTS, st.integers(1, 12))
def test_the_cache_keeps_the_last_used_blocks(prompts: list[list[int]], most: int) -> None:
    cache, known = PrefixCache(most), OrderedDict[int, None]()
    for at, prompt in enumerate(prompts):
        blocks = _chained(prompt)
        expected = 0
        while expected < len(blocks) and blocks[expected] in known:
            expected += 1
        assert cache.hit(blocks) == cache.seems_to_hit(blocks, at) == expected
        cache.use(blocks, at)
        for block in reversed(blocks):
            known.pop(block, None)
            known[block] = None
        while len(known) > most:
            known.popitem(last=False)
        assert len(cache) == len(known)


def test_what_was_evicted_is_seen_for_a_while() -> None:
    cache = PrefixCache(3, lag_s=2.0)
    cache.use([1, 2, 3], 0.0)
    cache.use([7, 8], 1.0)
    assert cache.hit([1, 2, 3]) == 1
    assert cache.seems_to_hit([1, 2, 3], 2.9) == 3
    assert cache.seems_to_hit([1, 2, 3], 3.0) == 1


def trace(folder: Path, *requests: Request) -> str:
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": each.at_s * 1000,
            "input_length": each.prompt_tokens,
            "output_length": 1,
            "hash_ids": list(each.prefixes),
        }
        for each in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_compares_with_and_without(tmp_path: Path) -> None:
    draw = random.Random(7)
    requests = [
        asks(0.2 * number, *range(4), 100 + draw.randrange(20), 1000 + number) for number in range(300)
    ]
    command = ["prefixes", "--trace", trace(tmp_path, *requests), "--path", "gpudirect", "--json"]
    done = CliRunner().invoke(app, [*command, "--workers", "4", "--prefill-tokens-per-s", "5000"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [(row["routed_by"], row["pulls"]) for row in rows] == [
        ("load", False), ("load", True), ("prefix", False), ("prefix", True)
    ]  # fmt: skip
    without, with_pulls = rows[:2]
    assert without["moved_gib"] == 0
    assert with_pulls["computed"] < without["computed"]
    assert with_pulls["pulled"] > 0
    assert with_pulls["requests"] == 300
    assert with_pulls["computed_of_without"] == pytest.approx(with_pulls["computed"] / without["computed"])


def test_a_trace_without_prefixes_is_refused(tmp_path: Path) -> None:
    command = ["prefixes", "--trace", trace(tmp_path, asks(0), asks(1))]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ConfigError)
    assert "does not say which prompts have prefixes in common" in str(done.exception)
