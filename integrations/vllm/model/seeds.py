# SPDX-License-Identifier: Apache-2.0
"""Continues the random numbers of a request with a seed whose first tokens another server has sampled.

vLLM's runner V1 makes a generator for each such request. This module advances it. The runner V2 needs no help, because
it derives the numbers from the seed and the token's position in the request.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

DRAWN = "kvlink_drawn"
"""In `vllm_xargs`, the number of tokens that were sampled with the seed before. They are part of the prompt."""
_HOOK = "_kvlink_continues_seeds"


def continue_seeds(runner_class: Any) -> None:
    """Lets all runners of this class, which is vLLM's GPUModelRunner, continue seeds. Idempotent."""
    update_states = runner_class._update_states
    if getattr(update_states, _HOOK, False):
        return

    @functools.wraps(update_states)
    def with_seeds(self: Any, scheduler_output: Any) -> Any:
        corrections = update_states(self, scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            num_drawn = _num_drawn(new)
            if num_drawn:
                advance(self.requests[new.req_id].generator, num_drawn, self.input_batch.vocab_size)
        return corrections

    setattr(with_seeds, _HOOK, True)
    runner_class._update_states = with_seeds


def advance(generator: torch.Generator | None, num_tokens: int, vocab_size: int) -> None:
    """Advances a request's generator by so many tokens. Does nothing for a request without a seed.

    vLLM's sampler for CPUs draws one number a token, and that for CUDA a row of the vocabulary's size.
    """
    if generator is None:
        return
    if generator.device.type == "cuda":
        generator.set_offset(
            generator.get_offset() + _offset_a_token(generator.device, vocab_size) * num_tokens
        )
    elif generator.device.type == "cpu":
        for _ in range(num_tokens):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)


@functools.cache
def _offset_a_token(device: torch.device, vocab_size: int) -> int:
    """Returns how far one row advances a generator, which depends on the GPU."""
    generator = torch.Generator(device=device)
    torch.empty(vocab_size, device=device).exponential_(generator=generator)
    return generator.get_offset()


def _num_drawn(request: Any) -> int:
    """Returns the number that a new request tells, or 0 if it tells none or an impossible one."""
    params = request.sampling_params
    given = (params.extra_args or {}).get(DRAWN, 0) if params is not None else 0
    return given if type(given) is int and 0 < given < len(request.prompt_token_ids or ()) else 0
