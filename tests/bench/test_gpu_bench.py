# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench gpu` where there is no GPU: it says so and measures nothing. On one: tests/gpu/test_cuda_bench.py."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.measurements import gpudirect_paths, pull
from kvlink.benchmarks.measurements.gpu import driver_version, pair_of
from kvlink.errors import ConfigError


def test_without_a_gpu_it_says_what_it_needs() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU; tests/gpu measures on it")
    result = CliRunner().invoke(app, ["gpu", "--json"])
    assert isinstance(result.exception, ConfigError)
    assert "torch sees no GPU here" in str(result.exception)


@pytest.mark.parametrize("text", ["", "0", "0,1,2", "a,b", "-1,0"])
def test_gpus_are_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 0,1"):
        pair_of(text)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
            "535.183.01",
        ),
        ("", "unknown"),
    ],
)
def test_the_drivers_version_is_found_in_what_its_module_says(text: str, version: str) -> None:
    assert driver_version(text) == version


def test_paths_to_a_gpu_are_modelled_where_there_is_none_and_said_to_be() -> None:
    if gpudirect_paths._can_measure():
        pytest.skip("there are a GPU and a NIC: they are measured")
    result = CliRunner().invoke(app, ["pull", "--path", "gpudirect,bounce", "--gbps", "200", "--json"])
    assert result.exit_code == 0, result.output
    rows = [row for row in map(json.loads, result.stdout.splitlines()) if "path" in row]
    assert [(row["path"], row["piece_bytes"], row["pieces"]) for row in rows] == [
        (name, *shape) for shape in pull.SHAPES for name in gpudirect_paths.PATHS
    ]
    assert {row["how"] for row in rows} == {"modelled, 200 Gb/s"}
    for direct, bounced in zip(rows[::2], rows[1::2], strict=True):
        assert (direct["host_copies"], bounced["host_copies"]) == (0, 2)
        assert direct["over_gpudirect"] == 1 < bounced["over_gpudirect"]


@pytest.mark.parametrize("text", ["", "gpudirect,", "nvlink"])
def test_paths_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="gpudirect or bounce"):
        gpudirect_paths.paths_of(text)
