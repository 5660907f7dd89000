# SPDX-License-Identifier: Apache-2.0
"""Traces: read, refused, and made."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlink.benchmarks.workloads.traces import (
    SYNTHETIC,
    Request,
    read_trace,
    requests_of,
    synthetic,
)
from kvlink.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}

"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_both_formats_are_known_by_their_first_line(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, AZURE)) == [
        Request(0, 374, 44),
        Request(pytest.approx(4.314579), 396, 109),
    ]
    mooncake = read_trace(written(tmp_path, MOONCAKE))
    assert mooncake == [Request(0, 6758, 500), Request(27, 7322, 490)]
    assert [request.prefixes for request in mooncake] == [(0, 1), (0, 14)]


def test_a_byte_order_mark_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n")))) == 2


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    broken_later = MOONCAKE.splitlines()[0] + "\nnothing"
    assert len(read_trace(written(tmp_path, broken_later), 1)) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("TIMESTAMP,Tokens\n2023-11-16 18:15:46,3\n", "has no 'ContextTokens'"),
        (AZURE + "2023-11-16 18:15:50,many,1\n", "line 4"),
        (AZURE + "yesterday,1,1\n", "line 4"),
        (AZURE + "2023-11-16 18:15:50\n", "line 4"),
        (MOONCAKE + "{", "line 4"),
        (MOONCAKE + "[]", "line 4"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}', "line 4 has no 'output_length'"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1}', "not a number of tokens"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "not a number of tokens"),
        ('{"timestamp": 1, "input_length": 1e9, "output_length": 1}', "not a number of tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 7}', "not a list of numbers"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}',
            "not a list of numbers",
        ),
        (
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            "2 hash_ids are too many",
        ),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "not a time"),
        ("[" * 100_000, "not a readable trace"),
        (" " * (2 << 20), "characters or more"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([b"", AZURE.encode(), MOONCAKE.encode()]))
def test_any_file_is_a_trace_or_an_error(tmp_path: Path, more: bytes, start: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(start + more)
    try:
        requests = read_trace(path)
    except ConfigError:
        return
    assert requests[0].at_s == 0


# Of the traces themselves: (mean, p50, p90, p99, max) of prompts, mean and p99 of outputs, requests a second.
PUBLISHED = {
    "azure-2023-conv": ((1155, 1020, 2735, 4142, 14_050), (211, 601), 5.53),
    "mooncake-conversation": ((12_035, 6909, 27_367, 85_401, 126_195), (343, 1120), 3.40),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_made_requests_have_the_published_statistics(name: str) -> None:
    prompts, outputs, per_s = PUBLISHED[name]
    made = synthetic(name, 40_000, seed=1)
    tokens = [request.prompt_tokens for request in made]
    assert [np.mean(tokens), *np.percentile(tokens, [50, 90, 99, 100])] == pytest.approx(prompts, rel=0.05)
    tokens = [request.output_tokens for request in made]
    assert (np.mean(tokens), np.percentile(tokens, 99)) == pytest.approx(outputs, rel=0.05)
    assert len(made) / made[-1].at_s == pytest.approx(per_s, rel=0.03)
    assert all(early.at_s <= late.at_s for early, late in pairwise(made))


def test_the_same_seed_makes_the_same_requests() -> None:
    assert synthetic("azure-2023-conv", 5, 1) == synthetic("azure-2023-conv", 5, 1)
    assert synthetic("azure-2023-conv", 5, 1) != synthetic("azure-2023-conv", 5, 2)


def test_a_trace_is_a_file_or_a_name(tmp_path: Path) -> None:
    assert requests_of(str(written(tmp_path, AZURE)), 1) == [Request(0, 374, 44)]
    assert len(requests_of("azure-2023-conv", 7)) == 7


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose from azure"):
        synthetic("nothing", 1, 1)
