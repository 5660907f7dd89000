# SPDX-License-Identifier: Apache-2.0
"""A request with a seed goes on with the random numbers that come after those of another server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch

from kvlink.integrations.vllm.model.seeds import DRAWN, advance, continue_seeds


def generator() -> Any:
    made = torch.Generator()
    made.manual_seed(17)
    return made


def drawn(of: Any, num: int = 1) -> list[int]:
    return [int(torch.randint(0, 2**31, (1,), generator=of, dtype=torch.long)) for _ in range(num)]


def runner_class() -> Any:
    """A runner as vLLM's, which makes a generator for each new request that has a seed."""

    class Runner:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.input_batch = SimpleNamespace(vocab_size=100)

        def _update_states(self, output: Any) -> str:
            for new in output.scheduled_new_reqs:
                self.requests[new.req_id] = SimpleNamespace(generator=generator() if new.seeded else None)
            return "corrections"

    return Runner


def new(tells: object, *, seeded: bool = True, prompt: int = 10, params: bool = True) -> Any:
    given = SimpleNamespace(extra_args=None if tells is None else {DRAWN: tells}) if params else None
    return SimpleNamespace(
        req_id="r", sampling_params=given, prompt_token_ids=[1] * prompt if prompt else None, seeded=seeded
    )


def next_number(request: Any, times: int = 1) -> int:
    kind = runner_class()
    for _ in range(times):
        continue_seeds(kind)
    runner = kind()
    assert runner._update_states(SimpleNamespace(scheduled_new_reqs=[request])) == "corrections"
    (number,) = drawn(runner.requests["r"].generator)
    return number


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("num", [1, 4, 9])
def test_it_goes_on_behind_what_was_sampled(num: int, times: int) -> None:
    assert next_number(new(num), times) == drawn(generator(), num + 1)[-1]


@pytest.mark.parametrize(
    "request_",
    [
        new(None), new(0), new(-1), new(10), new(11), new(True), new("3"), new(2.0), new(3, prompt=0),
        new(3, params=False),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_changes_nothing(request_: Any) -> None:
    assert next_number(request_) == drawn(generator())[0]


def test_a_request_without_a_seed_has_nothing_to_continue() -> None:
    kind = runner_class()
    continue_seeds(kind)
    runner = kind()
    runner._update_states(SimpleNamespace(scheduled_new_reqs=[new(3, seeded=False)]))
    assert runner.requests["r"].generator is None


def test_a_row_of_the_vocabulary_is_drawn_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device, offset = SimpleNamespace(type="cuda"), 8

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

    monkeypatch.setattr(
        "kvlink.integrations.vllm.model.seeds._offset_a_token", lambda _, vocab_size: vocab_size // 25
    )
    there = OnGpu()
    advance(there, 3, 100)
    assert there.offset == 8 + 3 * 4
