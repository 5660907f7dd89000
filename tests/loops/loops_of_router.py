# SPDX-License-Identifier: Apache-2.0
"""The loops of integrations/router."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from loops.rows import Unexpected, passes, scene
from waiting import closed_port, until

from kvlink.integrations.router.moves import Move
from kvlink.integrations.router.serving import routing
from kvlink.integrations.router.upstream import Upstream


@scene("router probe")
def a_probe_of_a_router() -> None:
    async def probe(side: Upstream, url: str) -> None:
        probed[side.role] += 1
        if probed[side.role] == 1:
            raise Unexpected

    async def route() -> None:
        async with routing([f"http://{address}"], [f"http://{address}"]):
            await until(lambda: min(probed["prefill"], probed["decode"]) >= 2)

    probed: Counter[str] = Counter()
    with closed_port() as address, mock.patch.object(Upstream, "probe", probe):
        asyncio.run(route())


@scene("router move")
async def a_move_of_a_router() -> None:
    class Servers:
        num_asks = 0

        async def leaves(self, url: str) -> None:
            self.num_asks += 1
            if self.num_asks == 1:
                raise Unexpected

    async def copied(move: Move) -> bool:
        move.target = "another"
        return True

    asked = SimpleNamespace(request_id="r", named=lambda name: SimpleNamespace(headers={}))
    with mock.patch.object(Move, "_copied", copied):
        async with Move(
            cast(Any, Servers()), "here", cast(Any, None), cast(Any, asked), cast(Any, Counter())
        ) as move:
            await passes()
            assert move.target == "another"
