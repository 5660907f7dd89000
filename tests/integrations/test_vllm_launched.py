# SPDX-License-Identifier: Apache-2.0
"""With asynchronous scheduling a step still runs when its blocks are given to a load."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_server import ASK_PREFILL, Server, request

PROMPT = list(range(100, 110))  # two whole blocks and a half
OURS, THEIRS = [5, 6, 7], [3, 9, 1]


def test_nothing_is_loaded_into_blocks_that_a_launched_step_uses() -> None:
    with Server("p") as prefill, Server("d") as decode:
        step = SimpleNamespace(has_ended=False)
        step.query = lambda: step.has_ended
        decode.launched = step
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), THEIRS)
        before = [decode.block("layer.0", block).clone() for block in OURS]
        decode.load(request("x", PROMPT, params), OURS)
        for _ in range(20):
            decode.step()
        assert "x" not in decode.received
        assert all(decode.block("layer.0", at).equal(was) for at, was in zip(OURS, before, strict=True))
        step.has_ended = True
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        for ours, theirs in zip(OURS, THEIRS, strict=True):
            assert decode.block("layer.0", ours).equal(prefill.block("layer.0", theirs))
