# SPDX-License-Identifier: Apache-2.0
"""Two managers of transformers whose models have the same shape: only a handoff of the same model gives tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import recent_transformers  # noqa: F401
import torch
from stepped_batching import Stepped, expected, reference, small_llama

PROMPT = tuple(range(3, 20))


@pytest.fixture(scope="module", autouse=True)
def _reference() -> Iterator[None]:
    with reference():
        yield


def changed(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "same": (small_llama, ""),
    "a-fine-tune": (lambda: changed(small_llama()), "weights is loaded:"),
    "another-theta": (lambda: small_llama(rope_theta=5e5), "rope is"),
    "another-scaling": (
        lambda: small_llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        "rope is",
    ),
    "another-norm": (lambda: small_llama(rms_norm_eps=0.1), "rms_norm_eps is"),
}


def pair(opened: ExitStack, model: Any = None) -> tuple[Stepped, Stepped]:
    prefill, decode = Stepped("prefill", model), Stepped("decode")
    for one in (prefill, decode):
        opened.callback(one.close)
    return prefill, decode


def answer(prefill: Stepped, decode: Stepped, name: str) -> Any:
    future = prefill.handoff.prefill(PROMPT, name)
    prefill.until(future.done)
    decode.handoff.submit(future.result(), name)
    decode.until(lambda: decode.outputs)
    return decode.outputs.pop()


@pytest.mark.parametrize(("model", "refused"), MODELS.values(), ids=MODELS)
def test_a_handoff_of_another_model(model: Callable[[], Any], refused: str) -> None:
    with ExitStack() as opened:
        prefill, decode = pair(opened, model())
        for name in ("first", "later"):
            output = answer(prefill, decode, name)
            if refused:
                assert refused in str(output.error)
                assert not output.generated_tokens
            else:
                assert list(output.generated_tokens) == expected(PROMPT)
        assert decode.handoff.stats().pulled == (0 if refused else 2)


def test_weights_that_the_program_changes_while_both_run() -> None:
    with ExitStack() as opened:
        prefill, decode = pair(opened)
        assert list(answer(prefill, decode, "before").generated_tokens) == expected(PROMPT)
        changed(prefill.manager.model)
        assert "weights were changed" in str(answer(prefill, decode, "one").error)
        changed(decode.manager.model)
        assert answer(prefill, decode, "both").error is None
