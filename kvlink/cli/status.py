# SPDX-License-Identifier: Apache-2.0
"""Shows what a coordinator knows: its counts, then one row per worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from kvlink.cli.tables import age_text, bytes_text, print_json, show_rows
from kvlink.config import WorkerConfig
from kvlink.control.client import CoordinatorClient
from kvlink.control.overview import WorkerView
from kvlink.control.values import CoordinatorStatus
from kvlink.coordinator.coordinator import DEFAULT_PORT
from kvlink.errors import CoordinatorError, CoordinatorUnavailable
from kvlink.layout.model_identity import model_labels
from kvlink.monitoring.fleet_view import plain, worker_row
from kvlink.types import WorkerCard

Row = dict[str, Any]


def address_of(given: str) -> str:
    """Returns `given`, else KVLINK_COORDINATOR, else the default port on this host."""
    return given or WorkerConfig.from_env().coordinator or f"127.0.0.1:{DEFAULT_PORT}"


def show(address: str, as_json: bool, limit: int = 0) -> None:
    """Asks the coordinator at `address_of(address)`. Raises CoordinatorUnavailable.

    The table has at most `limit` workers; 0 shows all. JSON always has all.
    """
    address = address_of(address)
    status, rows = asyncio.run(_ask(address, as_json, limit))
    if as_json:
        print_json({"coordinator": address, **status._asdict()})
    else:
        print(_sentence(address, status))
    if rows or as_json:
        show_rows(rows, as_json, "workers")
    if len(rows) < status.workers:
        print(
            f"{status.workers - len(rows)} more workers are not shown; --limit 0 or --json shows all of them"
        )


async def _ask(address: str, as_json: bool, limit: int) -> tuple[CoordinatorStatus, list[Row]]:
    async with CoordinatorClient(address) as client:
        status = await client.status()
        if limit and status.workers > limit and not as_json:
            return status, await _first(client, limit)
        cards = await client.workers()
        try:
            overview = await client.overview()
        except CoordinatorUnavailable:
            raise
        except CoordinatorError:  # an older coordinator does not know the call
            stats = {}
        else:
            stats = {row["agent"]: row for row in plain(status, overview)["workers"]}
    cards.sort(key=lambda card: (_model(card), card.worker_id))
    return status, [_row(card, stats.get(card.agent, {}), as_json) for card in cards]


async def _first(client: CoordinatorClient, limit: int) -> list[Row]:
    """Returns the first workers of a large fleet, without their cards: listing ten thousand cards takes seconds."""
    return [
        _shown(view, ",".join(view.transports), view.pool_bytes, stats) | {"worker": stats["worker"]}
        for view in (await client.overview()).workers[:limit]
        for stats in [worker_row(view)]
    ]


def _sentence(address: str, status: CoordinatorStatus) -> str:
    return (
        f"{address}: up {age_text(status.uptime_s)}, {num_workers(status._asdict())}, "
        f"{status.tickets} offers unclaimed, {status.waiting_claims} claims waiting; since the start "
        f"{status.offered} offered, {status.claimed} claimed, {status.expired} expired, "
        f"{status.lost_workers} workers lost"
        f"{_prefixes(status)}"
    )


def _prefixes(status: CoordinatorStatus) -> str:
    if not status.published_prefixes:
        return ""
    return (
        f"; {status.prefixes} prefixes in {bytes_text(status.prefix_bytes)}, found by {status.prefix_hits} of "
        f"{status.prefix_lookups} lookups"
    )


def num_workers(counts: Mapping[str, Any]) -> str:
    """Returns the number of workers in words, and how many of them drain."""
    draining = f" ({counts['draining']} draining)" if counts["draining"] else ""
    return f"{counts['workers']} workers{draining}"


def _row(card: WorkerCard, stats: Mapping[str, Any], as_json: bool) -> Row:
    pool_bytes = sum(card.region_bytes)
    transports = ",".join(way.name for way in card.transports if not way.refused)
    refused = "; ".join(f"{way.name}: {way.refused}" for way in card.transports if way.refused)
    if as_json:
        return {
            "worker": card.worker_id,
            "epoch": card.epoch,
            "agent": card.agent,
            "pid": card.host.pid,
            "model": card.layouts[0].model,
            "draining": card.draining,
            "pool_bytes": pool_bytes,
            "transports": transports,
            "refused": refused,
            "bytes_per_s": stats.get("bytes_per_s"),
            "leases": stats.get("leases") or None,
        }
    shown = _shown(card, transports, pool_bytes, stats)
    return shown | {"model": _model(card), "pid": str(card.host.pid), "refused": refused}


def _model(card: WorkerCard) -> str:
    """Returns the 8 bytes of the model's identity and its name, by which the table is sorted."""
    labels = model_labels(card.layouts[0].model)
    return " ".join(filter(None, (labels["model_id"], labels["name"])))


def _shown(
    worker: WorkerCard | WorkerView, transports: str, pool_bytes: int, stats: Mapping[str, Any]
) -> Row:
    leases = stats.get("leases") or {}
    rate = stats.get("bytes_per_s")
    return {
        "worker": worker.worker_id,
        "state": "draining" if worker.draining else "up",
        "agent": worker.agent,
        "transports": transports,
        "leases": str(leases.get("active_leases", "")),
        "expired": str(leases.get("expired", "")),
        "receives": "" if rate is None else f"{bytes_text(rate)}/s",
        "started": f"{age_text(time.time() - worker.epoch / 1e9)} ago",  # the epoch is the worker's start time in ns
        "pool_bytes": pool_bytes,
    }
