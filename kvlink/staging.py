# SPDX-License-Identifier: Apache-2.0
"""The staging buffer: GPU memory in which reads land that would go into the pool in many tiny pieces."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvlink import _core
from kvlink.config import WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.pool import BlockPool

_log = logging.getLogger("kvlink.staging")


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
