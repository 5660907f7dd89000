# SPDX-License-Identifier: Apache-2.0
"""Readers of any tensor-parallel degree pull from owners of any other; every rank is a Worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transports.pools import PoolSpec, Source, expected, poison, random_contents, same, snapshot
from transports.processes import RemoteWorker

from kvlink import Worker
from kvlink.layout import num_seats

_DEGREES = (1, 2, 4, 8)
_TOKENS = 75  # the last block is partial, for either block size
_OWNER_BLOCKS = [9, 2, 17, 4, 11]
_READER_BLOCKS = [3, 12, 7, 1, 15, 0, 8, 19, 5, 2]


def _ranks(spec: PoolSpec) -> list[list[PoolSpec]]:
    return [[replace(spec, tp_rank=rank, tp_size=size) for rank in range(size)] for size in _DEGREES]


@pytest.mark.parametrize(
    ("total_heads", "planes"), [(8, 2), (2, 2), (1, 1)], ids=["heads", "replicas", "mla"]
)
def test_every_degree_reads_every_other(
    transport: str,
    total_heads: int,
    planes: int,
    new_owner: Callable[..., RemoteWorker],
    new_reader: Callable[..., Worker],
) -> None:
    model = PoolSpec(
        num_blocks=20, num_layers=3, total_heads=total_heads, planes_per_layer=planes, row_bytes=48
    )
    whole = Source(model.layout(), random_contents(model.layout(), 5), _OWNER_BLOCKS)
    config = {"transports": transport, "lease_slots": 64}
    owners = [[new_owner(spec, **config) for spec in ranks] for ranks in _ranks(replace(model, order="HND"))]
    reader_spec = replace(model, order="PAIRED_NHD", block_tokens=8)
    readers = [[new_reader(spec, **config) for spec in ranks] for ranks in _ranks(reader_spec)]
    for owner in (owner for ranks in owners for owner in ranks):
        owner.do("fill_share", seed=5)

    for owner_ranks in owners:
        for reader_ranks in readers:
            offers = {
                owner: owner.offer(
                    _OWNER_BLOCKS,
                    f"from {len(owner_ranks)} to {len(reader_ranks)}",
                    num_tokens=_TOKENS,
                    readers=seats,
                )
                for owner in owner_ranks
                if (seats := num_seats(owner.pool.layout(), len(reader_ranks)))
            }
            for reader in reader_ranks:
                before = poison(reader.pool, len(offers))
                assert reader.pull(list(offers.values()), _READER_BLOCKS).wait(20)
                layers = range(model.num_layers)
                tokens = range(_TOKENS)
                after = expected(before, reader.pool.layout, _READER_BLOCKS, [whole], tokens, layers)
                assert same(snapshot(reader.pool), after)
            for owner, ticket in offers.items():
                assert owner.fate_of(ticket.request_id) == "settled"
