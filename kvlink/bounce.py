# SPDX-License-Identifier: Apache-2.0
"""What is said of GPU memory that is staged in host memory on its way: never silently, once for each path."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from kvlink.errors import TransportUnavailable
from kvlink.pool import BlockPool
from kvlink.types import TransportCard

_log = logging.getLogger("kvlink.bounce")


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
