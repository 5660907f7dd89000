# SPDX-License-Identifier: Apache-2.0
"""The rounds in which servers get a prefix, and what their counters say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvlink.integrations.router.commands.prefix_copies import Counters, in_rounds, outcome


@pytest.mark.parametrize(
    ("failing", "at_once", "rounds"),
    [
        ((), 8, [[0], [1, 2], [3, 4, 5, 6], [7, 8, 9]]),
        ((), 3, [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        ((), 1, [[number] for number in range(10)]),
        ((0, 2), 8, [[0], [1], [2, 3], [4, 5, 6], [7, 8, 9]]),
    ],
)
def test_rounds_double_with_the_servers_that_hold_the_prefix(
    failing: Sequence[int], at_once: int, rounds: list[list[int]]
) -> None:
    asked: list[list[int]] = []

    def ask_all(servers: Sequence[str]) -> list[dict[str, Any]]:
        asked.append([int(server) for server in servers])
        return [{"state": "failed" if int(one) in failing else "copied", "server": one} for one in servers]

    def pause() -> None:
        pauses.append(len(asked))

    pauses: list[int] = []
    servers = [str(number) for number in range(10)]
    assert [row["server"] for row in in_rounds(servers, at_once, ask_all, pause)] == servers
    assert asked == rounds
    assert pauses == list(range(1, len(rounds)))  # none after the last round


def counted(pulled: int, cached: int, computed: int, **results: int) -> Counters:
    tokens = {"external_kv_transfer": pulled, "local_cache_hit": cached, "local_compute": computed}
    return Counters(tokens, results, True)


@pytest.mark.parametrize(
    ("found", "state", "note"),
    [
        (counted(900, 0, 100), "copied", ""),
        (counted(0, 960, 40), "held", ""),
        (counted(500, 460, 40), "copied", ""),
        (counted(256, 0, 744), "computed", ""),
        (counted(0, 0, 1000), "computed", "no peer had more of it, or share_prefixes is off"),
        (counted(0, 0, 1000, shared=1), "computed", "no peer had more of it, or share_prefixes is off"),
        (counted(0, 0, 1000, computed_is_faster=1), "computed", ""),
        (counted(900, 0, 300), "copied", "other requests are counted, too"),
        (counted(0, 0, 999), "answered", "copied or computed is not known: the server has not counted the prompt yet"),
        (None, "answered", "copied or computed is not known: the server has no such counters"),
    ],
)  # fmt: skip
def test_a_copy_differs_from_a_computation(found: Counters | None, state: str, note: str) -> None:
    row = outcome(found, 1000)
    assert (row["state"], row["note"]) == (state, note)


def test_what_is_no_sample_is_left_out() -> None:
    text = (
        '# HELP vllm:kvlink_turns_total Turns{result="found"} 3\n'
        'vllm:prompt_tokens_by_source_created{source="local_compute"} 1.7e+09\n'
        'vllm:prompt_tokens_by_source_total{model_name="a{1}",source="local_compute"} 1.5e+06\n'
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} NaN\n'
        'vllm:kvlink_turns_total{result="found",engine="0"} 2.0\n'
    )
    assert Counters.of(text) == Counters({"local_compute": 1_500_000}, {"found": 2}, True)


@pytest.mark.parametrize("value", ["1e999", "1.2.3", "1e99999999", "9" * 999, "-1", ""])
def test_what_is_no_count_is_left_out(value: str) -> None:
    assert Counters.of(f'vllm:kvlink_turns_total{{result="found"}} {value}\n').results == {}


def test_a_long_line_takes_no_longer_than_it_is() -> None:
    """In a process that may use 10 s of a CPU: a search from each of its commas took half a minute."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (10, 10)); "
        "from kvlink.integrations.router.commands.prefix_copies import Counters; "
        "line = 'vllm:kvlink_turns_total{' + ',result=\"a\"' * 50_000; "
        "print(Counters.of(line * 2))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
