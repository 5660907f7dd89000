# SPDX-License-Identifier: Apache-2.0
"""Servers of a model of DeepSeek-V4's kind: windows, rows of 4 and of 128 tokens, an indexer, and states of begun rows.

vLLM's kernels are in torch here, see torch_kernels.py.
"""

from __future__ import annotations

import pytest
from servers import ENGINES
from variant_servers import check_lengths, servers_of

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("variants"),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

_MODEL = "deepseek-v4"
_MORE = ("--num-gpu-blocks-override", "3000", "--max-model-len", "4096")
LENGTHS = (1, 3, 4, 5, 128, 129, 250, 256, 257, 300, 1015)
"""Decode ends rows of 4 that prefill has begun, and rows of 128 after 250 and 1,015 tokens."""
LEFT_OVER = (11, 127, 191, 303)
"""vLLM would drop a block of states, or of the window, before decode's first step. So prefill leaves the last token to
decode."""
MORE_THAN_CHOSEN = 2500
"""The indexer chooses 512 of its 625 rows."""


def test_any_length() -> None:
    with servers_of(_MODEL, _MORE, script="torch_kernels.py") as (pair, _):
        check_lengths(pair, _MODEL, (*LENGTHS, MORE_THAN_CHOSEN))
        check_lengths(pair, _MODEL, LEFT_OVER, left_over=1)
