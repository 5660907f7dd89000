# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench gpu` where there is no GPU: it says so and measures nothing. On one: tests/gpu/test_cuda_bench.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.gpu import pair_of
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
