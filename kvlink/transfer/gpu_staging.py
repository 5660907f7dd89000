# SPDX-License-Identifier: Apache-2.0
"""Buffers that stage reads and responses of GPU memory, and the log lines that name them.

A bounce buffer is host memory: bytes pass through it where a transport cannot reach the GPU. A staging buffer is GPU
memory: reads that would enter the pool in many tiny pieces arrive there first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress

from kvlink import _core
from kvlink.config import WorkerConfig
from kvlink.errors import KVLinkError, TransportUnavailable
from kvlink.transfer.pool import BlockPool
from kvlink.types import TransportCard

_log = logging.getLogger("kvlink.staging")


def bouncing_ends(reader: bool, owner: bool) -> tuple[str, ...]:
    """Returns the names of the ends that stage."""
    return tuple(end for end, bounces in (("reader", reader), ("owner", owner)) if bounces)


def log_placement(pool: BlockPool) -> None:
    """Logs at the start of a worker where CUDA placed its GPU memory."""
    with suppress(TransportUnavailable):  # transports that need cuda-python report that it is missing
        for region, placement in enumerate(pool.placements()):
            _log.info("pool region=%d %s", region, placement)


def warn_of_pool(pool: BlockPool, cards: Sequence[TransportCard]) -> None:
    """Logs at the start of a worker which transports stage its pool, as a warning if no transport reaches its GPU."""
    bouncing = ",".join(card.name for card in cards if card.bounces)
    if not bouncing:
        return
    direct = any(not card.refused and not card.bounces for card in cards)
    refused = "".join(f"; {card.name} does not export it: {card.refused}" for card in cards if card.refused)
    level = logging.INFO if direct else logging.WARNING
    _log.log(level, "staged in host memory (bounce) device=cuda:%s over=%s%s", pool.gpu, bouncing, refused)


def warn_if_unserved(pool: BlockPool, cards: Sequence[TransportCard]) -> None:
    """Warns at the start of a worker that no other worker can read from, with the name of its accelerator."""
    if any(not card.refused for card in cards):
        return
    device = "cpu" if pool.gpu is None else f"cuda:{pool.gpu}"
    reasons = "; ".join(f"{card.name}: {card.refused}" for card in cards)
    _log.warning("no transport serves this worker device=%s%s reason=%s", device, _accelerator(pool), reasons)


def _accelerator(pool: BlockPool) -> str:
    """Returns what torch's name of a device does not tell: it calls AMD's GPUs cuda, too."""
    version = getattr(sys.modules.get("torch"), "version", None)
    if pool.gpu is None or not getattr(version, "hip", None):
        return ""
    return " (an AMD GPU with ROCm, which no transport reaches: keep the pool in host memory)"


def warn_of_path(worker_id: str, transport: str, ends: Sequence[str], not_taken: Sequence[str]) -> None:
    """Warns when a connection is opened which ends stage, and why no better path was used."""
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
    """Allocates a staging buffer on the pool's GPU if it is useful, else returns None.

    Logs a warning if the allocation fails. `transports` are those that may reach the GPU on this machine. Small pieces
    do not slow copies by the GPU itself (cuda), so only NICs use the buffer unless KVLINK_STAGING is "always".
    """
    useful = bool(transports) if config.staging == "always" else "verbs" in transports
    if pool.gpu is None or config.staging == "never" or not useful:
        return None
    try:
        return _core.CudaMemory(config.staging_bytes, pool.gpu)
    except KVLinkError as error:
        warn_of_staging(pool, error)
        return None


def warn_of_staging(pool: BlockPool, refused: object) -> None:
    """Warns at the start of a worker if reads do not use the buffer. `refused` gives the reason, or is ""."""
    if not refused:
        return
    _log.warning(
        "no staging buffer: reads from owners with another layout stay in small pieces device=cuda:%s reason=%s",
        pool.gpu,
        str(refused),
    )
