# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench gpu` where there is no GPU: it says so and measures nothing. On one: tests/gpu/test_cuda_bench.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.measurements import gpudirect_paths
from kvlink.benchmarks.measurements.gpu import driver_version, pair_of
from kvlink.errors import ConfigError
from kvlink.transfer.engine import transports_here


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


def test_without_a_nic_paths_to_a_gpu_are_not_measured() -> None:
    if not transports_here()["verbs"]:
        pytest.skip("there is a NIC: they are measured")
    result = CliRunner().invoke(app, ["pull", "--path", "gpudirect,bounce", "--json"])
    assert isinstance(result.exception, ConfigError)
    assert "`kvlink predict` models both paths" in str(result.exception)


@pytest.mark.parametrize("text", ["", "gpudirect,", "nvlink"])
def test_paths_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="gpudirect or bounce"):
        gpudirect_paths.paths_of(text)
