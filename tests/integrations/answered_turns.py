# SPDX-License-Identifier: Apache-2.0
"""Chats of two turns: decode offers its answer to the first, and prefill pulls it for the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm_server import ASK_PREFILL, Server, request

from kvlink.integrations.vllm.wire.handoff import KEY

PROMPT = list(range(100, 110))
ANSWER = list(range(200, 207))
"""With the prompt 17 tokens, of which 16 are computed: four full blocks."""
NEXT = [*PROMPT, *ANSWER, 300, 301, 302]
ROUTED = {"do_remote_prefill": False, "do_remote_decode": False}
LAYERS = ("layer.0", "layer.1")


@contextmanager
def bidirectional(**changes: Any) -> Iterator[tuple[Server, Server]]:
    """Yields prefill and decode, whose offers last longer than any test."""
    with Server("p", answer_s=600, **changes) as prefill, Server("d", answer_s=600, **changes) as decode:
        yield prefill, decode


def offered(decode: Server, blocks: list[int], name: str = "t1", **changes: Any) -> dict[str, Any] | None:
    """Returns what the answer to the first turn carries."""
    decode.pool.cache(*blocks)
    turn = request(name, PROMPT, ROUTED)
    turn.__dict__.update(changes)
    return decode.answer(turn, ANSWER, blocks)


def next_turn(params: dict[str, Any] | None, name: str = "t2", tokens: list[int] = NEXT) -> Any:
    assert params
    return request(name, tokens, {**ASK_PREFILL, KEY: params[KEY]})


def pulled(prefill: Server, turn: Any, *blocks: int, computed: int = 0) -> bool:
    """Loads the turn. Returns whether that went well."""
    count, _ = prefill.load(turn, list(blocks), computed=computed)
    assert count
    prefill.step_until(lambda: turn.request_id in prefill.received)
    return turn.request_id not in prefill.failed


def overwrite(server: Server, *blocks: int) -> None:
    """The step gives these blocks to another request, which writes them."""
    server.pool.give_away(*blocks)

    def write() -> None:
        assert all(rank._worker.soft_lease_counts().active == 0 for rank in server.ranks)
        for tensors in server.caches:
            for block in blocks:
                for tensor in tensors.values():
                    tensor[block] = torch.randint_like(tensor[block], 255)

    server.step(compute=write)


def results(server: Server) -> dict[str, int]:
    stats = server.ranks[0].take_stats()
    return server.scheduler.turns.take_counts() | (stats["turns"] if stats else {})
