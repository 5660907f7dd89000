# SPDX-License-Identifier: Apache-2.0
"""What a coordinator knows: counts, then a row a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from kvlink.cli.asking import address_of
from kvlink.cli.numbers import age_text, bytes_text
from kvlink.cli.tables import print_json, show_rows
from kvlink.control.client import CoordinatorClient
from kvlink.control.values import CoordinatorStatus
from kvlink.errors import CoordinatorError, CoordinatorUnavailable
from kvlink.overview import plain
from kvlink.types import WorkerCard

Row = dict[str, Any]


def show(address: str, as_json: bool) -> None:
    """Asks `address`, else KVLINK_COORDINATOR, else the default port here. Raises CoordinatorUnavailable."""
    address = address_of(address)
    status, cards, figures = asyncio.run(_ask(address))
    rows = [
        _row(card, figures.get(card.agent, {}), as_json)
        for card in sorted(cards, key=lambda card: card.worker_id)
    ]
    if as_json:
        print_json({"coordinator": address, **status._asdict()})
    else:
        print(_sentence(address, status))
    if rows or as_json:
        show_rows(rows, as_json, "workers")


async def _ask(address: str) -> tuple[CoordinatorStatus, list[WorkerCard], dict[str, Row]]:
    async with CoordinatorClient(address) as client:
        status, cards = await client.status(), await client.workers()
        try:
            overview = await client.overview()
        except CoordinatorUnavailable:
            raise
        except CoordinatorError:  # an older coordinator
            return status, cards, {}
        return status, cards, {row["agent"]: row for row in plain(status, overview)["workers"]}


def _sentence(address: str, status: CoordinatorStatus) -> str:
    return (
        f"{address}: up {age_text(status.uptime_s)}, {status.workers} workers, "
        f"{status.tickets} offers unclaimed, "
        f"{status.waiting_claims} claims waiting; since the start {status.offered} offered, "
        f"{status.claimed} claimed, {status.expired} expired, {status.lost_workers} workers lost"
    )


def _row(card: WorkerCard, figures: Mapping[str, Any], as_json: bool) -> Row:
    pool_bytes = sum(card.region_bytes)
    transports = ",".join(way.name for way in card.transports if not way.refused)
    refused = "; ".join(f"{way.name}: {way.refused}" for way in card.transports if way.refused)
    leases = figures.get("leases") or {}
    rate = figures.get("bytes_per_s")
    if as_json:
        return {
            "worker": card.worker_id,
            "epoch": card.epoch,
            "agent": card.agent,
            "pid": card.host.pid,
            "pool_bytes": pool_bytes,
            "transports": transports,
            "refused": refused,
            "bytes_per_s": rate,
            "leases": leases or None,
        }
    return {
        "worker": card.worker_id,
        "agent": card.agent,
        "transports": transports,
        "leases": str(leases.get("active_leases", "")),
        "expired": str(leases.get("expired", "")),
        "receives": "" if rate is None else f"{bytes_text(rate)}/s",
        "started": f"{age_text(time.time() - card.epoch / 1e9)} ago",  # an epoch is when the worker started, in ns
        "pool_bytes": pool_bytes,
        "pid": str(card.host.pid),
        "refused": refused,
    }
