# SPDX-License-Identifier: Apache-2.0
"""`kvlink demo --device cuda`: prefill and decode on the GPU, tokens equal to those of one process."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", minversion="5.19", reason="pip install 'kvlink[demo]'")


@pytest.mark.timeout(600)
def test_tokens_are_equal_over_cuda_and_staged_over_tcp(capfd: pytest.CaptureFixture[str]) -> None:
    from kvlink.demo import run

    assert run(["cuda", "tcp"], json=True, device="cuda") == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [(row["transport"], row["path"]) for row in rows] == [("cuda", "cuda"), ("tcp", "tcp")]
    assert all(row["tokens_equal"] for row in rows)
