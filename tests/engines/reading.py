# SPDX-License-Identifier: Apache-2.0
"""Reads a server's blocks with a kvlink worker of the test itself, with a handoff as its ticket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.control import AgentClient
from kvlink.errors import StaleBlocks
from kvlink.integrations.vllm.model.caches import CacheGroup, TokenUnit
from kvlink.integrations.vllm.wire.handoff import Handoff
from kvlink.runtime.background import ControlThread
from kvlink.types import WorkerCard


def cache_of(hand_off: Callable[[], Mapping[str, Any]], num_tokens: int) -> npt.NDArray[np.uint8]:
    """The cache of the first tokens: all layers of a server of one rank with one cache group, in a fixed order.

    num_tokens: of whole blocks. Takes two handoffs: the first one's lease may end while a pool like the server's is
    made, on a machine that does much else. Both are settled.
    """
    first = Handoff.from_params(hand_off())
    [owner] = first.owners
    card = ControlThread.shared().run(_card(owner.agent))
    pool = BlockPool.allocate(card.layouts)
    with Worker(pool, "reader", config=WorkerConfig(transports="cma,tcp")) as reader:
        with suppress(StaleBlocks):
            _read(reader, first, num_tokens)
        _read(reader, Handoff.from_params(hand_off()), num_tokens)
    return np.concatenate([pool.numpy(region) for region in range(len(pool.regions))])


def _read(reader: Worker, handoff: Handoff, num_tokens: int) -> None:
    [block_tokens], layout = handoff.block_tokens, reader.pool.layout
    unit = block_tokens // layout.block_tokens
    [ticket] = handoff.tickets([CacheGroup(block_tokens, 1, (TokenUnit(unit, is_block=unit > 1),))])
    into = range(1, len(ticket.block_ids) + 1)
    assert reader.pull(ticket, into, tokens=(0, num_tokens // unit)).wait(60)


async def _card(agent: str) -> WorkerCard:
    async with AgentClient(agent) as client:
        return await client.card()
