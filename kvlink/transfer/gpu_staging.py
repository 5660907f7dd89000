# SPDX-License-Identifier: Apache-2.0
"""Buffers that stage reads and responses of GPU memory, and the log lines that name them.

A bounce buffer is host memory: bytes pass through it where a transport cannot reach the GPU. A staging buffer is GPU
memory: reads that would enter the pool in many tiny pieces arrive there first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress

from kvlink import _core
from kvlink.config import WorkerConfig
from kvlink.errors import KVLinkError, TransportUnavailable
from kvlink.transfer.pool import BlockPool
from kvlink.types import TransportCard

_log = logging.getLogger("kvlink.staging")


def bouncing_ends(reader: bool, owner: bool) -> tuple[str, ...]:
    """Names those of the two ends that stage."""
    return tuple(end for end, bounces in (("reader", reader), ("owner", owner)) if bounces)


def record_placement(pool: BlockPool) -> None:
    """At a worker's start: where its GPU memory is, as far as CUDA says."""
    with suppress(TransportUnavailable):  # who needs cuda-python says so
        for region, placement in enumerate(pool.placements()):
            _log.info("pool region=%d %s", region, placement)


def warn_of_pool(pool: BlockPool, cards: Sequence[TransportCard]) -> None:
    """At a worker's start: as a warning where peers have no other way to its GPU."""
    bouncing = ",".join(card.name for card in cards if card.bounces)
    if not bouncing:
        return
    direct = any(not card.refused and not card.bounces for card in cards)
    refused = "".join(f"; {card.name} does not lend it: {card.refused}" for card in cards if card.refused)
    level = logging.INFO if direct else logging.WARNING
    _log.log(level, "staged in host memory (bounce) device=cuda:%s over=%s%s", pool.gpu, bouncing, refused)


def warn_of_path(worker_id: str, transport: str, ends: Sequence[str], not_taken: Sequence[str]) -> None:
    """When a connection is opened: which ends stage, and why no better path was taken."""
    _log.warning(
        "GPU memory is staged in host memory (bounce) owner=%s transport=%s at=%s%s",
        worker_id,
        transport,
        ",".join(ends),
        "".join(f"; {reason}" for reason in not_taken),
    )


def staging_for(
    pool: BlockPool, config: WorkerConfig, transports: Collection[str]
) -> _core.CudaMemory | None:
    """Allocates it on the pool's GPU where it is of use. None: there is none, and a warning says why when there should.

    `transports` are those that may reach the GPU here. Of copies by the GPU itself (cuda) small pieces are no burden:
    only NICs have it, unless KVLINK_STAGING says always.
    """
    useful = bool(transports) if config.staging == "always" else "verbs" in transports
    if pool.gpu is None or config.staging == "never" or not useful:
        return None
    try:
        return _core.CudaMemory(config.staging_bytes, pool.gpu)
    except KVLinkError as error:
        _warn(pool, error)
        return None


def warn_of_staging(pool: BlockPool, refused: str) -> None:
    """At a worker's start: `refused` says why a transport goes without it."""
    if refused:
        _warn(pool, refused)


def _warn(pool: BlockPool, why: object) -> None:
    _log.warning(
        "no staging buffer: reads from owners with another layout stay in small pieces device=cuda:%s reason=%s",
        pool.gpu,
        str(why),
    )
