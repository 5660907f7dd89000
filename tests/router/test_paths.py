# SPDX-License-Identifier: Apache-2.0
"""Paths beside completions and chats: what goes by a handoff, and what decode does alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from fake_engine import HANDOFF
from test_router import Place

GENERATE = "/inference/v1/generate"
TOKENS = {
    "model": "m",
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 9, "min_tokens": 4, "seed": 1},
}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(streaming_from=1000)


async def test_tokens_go_by_a_hand_off(place: Place) -> None:
    """Prefill is asked for one token where this path takes that."""
    status, _ = await place.post(TOKENS, GENERATE)
    assert status == 200
    (asked,) = place.prefill[0].asked
    assert asked["sampling_params"] == {"max_tokens": 1, "seed": 1}
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_tokens" not in asked
    assert place.decode[0].asked == [TOKENS | {"kv_transfer_params": HANDOFF}]
    assert await place.counts() == {"handed_off": 1}


@pytest.mark.parametrize("sampling", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_tokens_that_one_hand_off_does_not_serve(place: Place, sampling: dict[str, Any]) -> None:
    body = TOKENS | {"sampling_params": sampling}
    assert (await place.post(body, GENERATE))[0] == 200
    assert place.decode[0].asked == [body]
    assert await place.counts() == {"not_suited": 1}
