# SPDX-License-Identifier: Apache-2.0
"""A request that another server began goes on with the random numbers that its seed would have given there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvlink.integrations.router import continuation
from kvlink.integrations.vllm.model import seeds
from kvlink.integrations.vllm.model.seeds import DRAWN, advance, continue_seeds

PROMPT = [1, 2, 3, 4, 5, 6]


def draws(generator: torch.Generator, number: int) -> list[int]:
    """As vLLM's sampler for CPUs draws, once for each token."""
    return [
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item() for _ in range(number)
    ]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Runner:
    """Makes generators as vLLM's runner does."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(vocab_size=32)

    def _update_states(self, scheduler_output: Any) -> str:
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(generator=seeded() if new.seeded else None)
        return "corrections"


def step(extra_args: Any, *, is_seeded: bool = True, has_params: bool = True) -> Any:
    params = SimpleNamespace(extra_args=extra_args) if has_params else None
    new = SimpleNamespace(req_id="r", seeded=is_seeded, sampling_params=params, prompt_token_ids=PROMPT)
    return SimpleNamespace(scheduled_new_reqs=[new])


@pytest.fixture
def runner() -> Any:
    class OfThisTest(Runner):
        pass

    OfThisTest._update_states = lambda self, output: Runner._update_states(self, output)  # type: ignore[method-assign]
    continue_seeds(OfThisTest)
    continue_seeds(OfThisTest)
    return OfThisTest()


def test_the_numbers_go_on(runner: Any) -> None:
    assert runner._update_states(step({DRAWN: 3})) == "corrections"
    assert draws(runner.requests["r"].generator, 4) == draws(seeded(), 7)[3:]


@pytest.mark.parametrize(
    "given", [None, {}, {DRAWN: 0}, {DRAWN: -1}, {DRAWN: "3"}, {DRAWN: True}, {DRAWN: 6}]
)
def test_other_requests_begin_at_the_seed(runner: Any, given: Any) -> None:
    """Also one that tells more tokens than its prompt can contain."""
    runner._update_states(step(given))
    assert draws(runner.requests["r"].generator, 4) == draws(seeded(), 4)


def test_requests_without_a_seed_or_parameters(runner: Any) -> None:
    runner._update_states(step({DRAWN: 3}, is_seeded=False))
    runner._update_states(step(None, has_params=False))
    assert draws(runner.requests["r"].generator, 1) == draws(seeded(), 1)


def test_a_gpus_generator_advances_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_offset_a_token", lambda device, size: size // 8)
    offsets = [8]
    generator = SimpleNamespace(
        device=torch.device("cuda"), get_offset=lambda: offsets[-1], set_offset=offsets.append
    )
    advance(generator, 3, 32)  # type: ignore[arg-type]
    assert offsets == [8, 20]


def test_other_devices_are_left_alone() -> None:
    advance(SimpleNamespace(device=torch.device("xpu")), 3, 32)  # type: ignore[arg-type]


def test_the_router_names_the_same_parameter() -> None:
    assert continuation.DRAWN == DRAWN
