# SPDX-License-Identifier: Apache-2.0
"""What lies in a server's blocks: read by a kvlink worker of the test itself, with a hand-off as its ticket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.control import AgentClient, ControlThread
from kvlink.integrations.vllm.handover import Handover
from kvlink.types import WorkerCard


def cache_of(hand_off: Callable[[], Mapping[str, Any]], num_tokens: int) -> npt.NDArray[np.uint8]:
    """The cache of the first tokens: all layers of a server of one rank with one cache group, in a fixed order.

    num_tokens: of whole blocks. Takes two hand-offs: the first one's lease may end while a pool like the server's is
    made, on a machine that does much else.
    """
    [owner] = Handover.from_params(hand_off()).owners
    card = ControlThread.shared().run(_card(owner.agent))
    pool = BlockPool.allocate(card.layout)
    with Worker(pool, "reader", config=WorkerConfig(transports="cma,tcp")) as reader:
        handover = Handover.from_params(hand_off())
        unit = handover.block_tokens // card.layout.block_tokens
        [ticket] = handover.tickets(0, unit)
        into = range(1, len(ticket.block_ids) + 1)
        assert reader.pull(ticket, into, tokens=(0, num_tokens // unit)).wait(60)
    return np.concatenate([pool.numpy(region) for region in range(len(pool.regions))])


async def _card(agent: str) -> WorkerCard:
    async with AgentClient(agent) as client:
        return await client.card()
