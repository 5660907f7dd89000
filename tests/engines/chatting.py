# SPDX-License-Identifier: Apache-2.0
"""Chats between vLLM's own schedulers, whose pools evict all the time, without a model: `chatting.py MODEL [ROUNDS]`.

Runs in vLLM's environment. Before each step computes a token, all tokens before it must have the cache that belongs to
them, wherever it came from. Prints one JSON object: the results of later turns, and what is left.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import vllm.distributed.parallel_state as parallel_state
from stepping import Side, sampled_after, until
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

NUM_BLOCKS, NUM_CHATS, NUM_TURNS, NUM_ANSWER = 26, 5, 4, 25


class Checking(Side):
    """Checks what a step's attention would read."""

    def _compute(self, name: str, positions: range) -> None:
        tokens = self.scheduler.requests[name].all_token_ids
        self.right(self.blocks(name), range(positions.start), tokens)
        super()._compute(name, positions)


def chat(prefill: Side, decode: Side, name: str) -> Iterator[None]:
    """Has a chat. Yields while it waits for a server."""
    tokens, ticket = [hash_of(name, index) for index in range(40)], {}
    for turn in range(NUM_TURNS):
        request = f"{name}-{turn}"
        prefill.add(f"p{request}", {**ticket, "do_remote_decode": True}, tokens)
        while f"p{request}" not in prefill.answers:
            yield
        handoff = prefill.answers[f"p{request}"].kv_transfer_params
        asked = decode.add(f"d{request}", handoff or {"do_remote_prefill": False}, tokens, NUM_ANSWER)
        while f"d{request}" not in decode.answers:
            yield
        ticket = decode.answers[f"d{request}"].kv_transfer_params or {}
        for token in list(asked.all_token_ids)[len(tokens) :]:
            assert token == sampled_after(tokens), "a wrong token"
            tokens.append(token)
        tokens += [hash_of(request, index) for index in range(9)]


def hash_of(name: str, index: int) -> int:
    return sampled_after([*name.encode(), index])


def main(model: str, rounds: str = "4") -> dict[str, Any]:
    parallel_state.get_tensor_model_parallel_rank = lambda: 0  # nothing of torch.distributed is started
    init_none_hash(sha256)
    prefill, decode = (Checking(model, "", "full", NUM_BLOCKS, bidirectional=True) for _ in range(2))
    for number in range(int(rounds)):
        active = [chat(prefill, decode, f"{number}-{one}") for one in range(NUM_CHATS)]
        while active:
            active = [one for one in active if next(one, active) is None]
            for side in (decode, prefill):  # a ticket is granted before prefill uses it
                side.step()
    until(lambda: not (prefill.scheduler.requests or decode.scheduler.requests), prefill, decode)
    return {"turns": dict(prefill.turns), "left": [prefill.left(), decode.left()]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
