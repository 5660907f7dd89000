# SPDX-License-Identifier: Apache-2.0
"""Caches whose bytes mean different things although dtype and shape are the same: quantized, or of other CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from vllm_server import ASK_PREFILL, Server, request

from kvlink.integrations.vllm.model.caches import page_format

PROMPT = list(range(10))
_E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("cache_dtype", "fp8", "kernels", "words"),
    [
        ("auto", "", (), []),
        ("bfloat16", "", (), []),
        ("fp8", _E4M3, (), ["cache=float8_e4m3fn"]),
        ("fp8_e4m3", "float8_e4m3fnuz", (), ["cache=float8_e4m3fnuz"]),
        ("fp8_e5m2", _E4M3, ("vec",), ["cache=fp8_e5m2", "pages=vec"]),
        ("int8_per_token_head", _E4M3, (), ["cache=int8_per_token_head"]),
        ("auto", "", ("vec16", "vec", "vec"), ["pages=vec+vec16"]),
    ],
)
def test_words_say_what_dtype_and_shape_do_not(
    cache_dtype: str, fp8: str, kernels: Sequence[str], words: list[str]
) -> None:
    assert page_format(cache_dtype, fp8, kernels) == words


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (page_format("fp8", _E4M3, ["vec"]), page_format("fp8_e5m2", _E4M3, ["vec"])),
        (page_format("auto", "", ["amx"]), page_format("auto", "", ["vec"])),
    ],
    ids=["two kinds of fp8", "two kinds of CPU"],
)
def test_servers_that_differ_are_refused_by_name(
    theirs: list[str], ours: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Server("p", model=" ".join(["tiny", *theirs])) as prefill,
        Server("d", model=" ".join(["tiny", *ours])) as decode,
    ):
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        decode.load(request("x", PROMPT, params), [5, 6, 7])
        decode.step_until(lambda: "x" in decode.received)
        assert decode.failed == {"x"}
    assert f"model differs: '{' '.join(['tiny', *ours])}' here" in caplog.text
