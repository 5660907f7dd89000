# SPDX-License-Identifier: Apache-2.0
"""Which blocks can be offered softly, and which calls of `revoke` end such offers."""

from __future__ import annotations

from array import array
from contextlib import ExitStack

import numpy as np
import pytest
from transports.mixed_pools import MixedSpec
from worker.soft_server import LAYOUT, TURN, Server

from kvlink import BlockPool, Context, Geometry, Worker, dense
from kvlink.errors import ConfigError


@pytest.mark.parametrize(
    "ids", [TURN[:1], (TURN[0],), array("I", TURN), np.array(TURN), np.array(TURN, np.uint32), range(9, 10)]
)
def test_a_revoke_takes_block_ids_of_any_kind(server: Server, ids: object) -> None:
    server.owner.offer_soft("turn", TURN)
    assert server.owner.revoke([]) == 0
    assert server.owner.revoke(ids) == 1  # type: ignore[arg-type]


def test_a_revoke_of_other_blocks_ends_nothing(server: Server) -> None:
    server.owner.offer_soft("turn", TURN)
    assert server.owner.revoke([block for block in range(64) if block not in TURN]) == 0
    assert server.owner.revoke([2**32 - 1]) == 0
    for wrong in ("9", [-1], [1.5], None):
        with pytest.raises(ConfigError, match="revoke"):
            server.owner.revoke(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocks", "options", "says"),
    [
        (TURN, {"num_tokens": 15}, "15 tokens do not fill 4 blocks of 4, and a soft offer has full blocks"),
        (TURN, {"num_tokens": 17}, "17 tokens"),
        ([], {}, "empty"),
        ([1, 64], {}, "64"),
        (TURN, {"ttl_s": 0}, "ttl_s"),
        (TURN, {"ttl_s": 1e9}, "ttl_s"),
        (TURN, {"digests": [b"short"]}, "8 to 64 bytes"),
        (TURN, {"digests": [bytes(8)] * 3}, "16 tokens cannot have 3 digests"),
    ],
)
def test_what_cannot_be_offered(
    server: Server, blocks: list[int], options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        server.owner.offer_soft("turn", blocks, **options)  # type: ignore[arg-type]
    assert server.owner.soft_lease_counts().granted == 0


def test_states_are_not_offered(opened: ExitStack) -> None:
    spec = MixedSpec()
    worker = opened.enter_context(Worker(spec.make(), "hybrid", transports="loopback"))
    with pytest.raises(ConfigError, match="each step overwrites its states"):
        worker.offer_soft("turn", [[1], [2], [2]])


def test_cache_groups_are_revoked_by_either_list(opened: ExitStack) -> None:
    pool = BlockPool.allocate((LAYOUT, LAYOUT))
    worker = opened.enter_context(Worker(pool, "groups", transports="loopback"))
    for revoked in ([5], [[], [5]], [[5], []]):
        worker.offer_soft("turn", [[1, 2], [5, 6]])
        assert worker.revoke([3, 4]) == 0
        assert worker.revoke(revoked) == 1


def test_ranks_that_share_tokens_offer_full_blocks(opened: ExitStack) -> None:
    geometry = Geometry(
        num_layers=1, total_heads=1, row_bytes=16, num_blocks=8, block_tokens=4, context=Context(0, 2)
    )
    worker = opened.enter_context(Worker(BlockPool.allocate(dense(geometry)), "part", transports="loopback"))
    assert worker.offer_soft("turn", [1, 2]).num_tokens == 16
    with pytest.raises(ConfigError, match=r"14 tokens do not fi(ll|t)"):
        worker.offer_soft("turn", [1, 2], num_tokens=14)
