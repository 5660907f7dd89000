# SPDX-License-Identifier: Apache-2.0
"""What a coordinator knows: counts, then a row a worker."""

from __future__ import annotations

import asyncio
from typing import Any

from kvlink.cli.tables import print_json, show_rows
from kvlink.config import WorkerConfig
from kvlink.control.client import CoordinatorClient
from kvlink.control.coordinator import DEFAULT_PORT
from kvlink.control.values import CoordinatorStatus
from kvlink.types import WorkerCard


def show(address: str, as_json: bool) -> None:
    """Asks `address`, else KVLINK_COORDINATOR, else the default port here. Raises CoordinatorUnavailable."""
    address = address or WorkerConfig.from_env().coordinator or f"127.0.0.1:{DEFAULT_PORT}"
    status, cards = asyncio.run(_ask(address))
    rows = [_row(card) for card in sorted(cards, key=lambda card: card.worker_id)]
    if as_json:
        print_json({"coordinator": address, **status._asdict()})
    else:
        print(_sentence(address, status))
    if rows or as_json:
        show_rows(rows, as_json, "workers")


async def _ask(address: str) -> tuple[CoordinatorStatus, list[WorkerCard]]:
    async with CoordinatorClient(address) as client:
        return await client.status(), await client.workers()


def _sentence(address: str, status: CoordinatorStatus) -> str:
    return (
        f"{address}: up {status.uptime_s:.0f} s, {status.workers} workers, "
        f"{status.tickets} offers unclaimed, "
        f"{status.waiting_claims} claims waiting; since the start {status.offered} offered, "
        f"{status.claimed} claimed, {status.expired} expired, {status.lost_workers} workers lost"
    )


def _row(card: WorkerCard) -> dict[str, Any]:
    return {
        "worker": card.worker_id,
        "epoch": card.epoch,
        "agent": card.agent,
        "pid": card.host.pid,
        "pool_bytes": sum(card.region_bytes),
        "transports": ",".join(way.name for way in card.transports if not way.refused),
        "refused": "; ".join(f"{way.name}: {way.refused}" for way in card.transports if way.refused),
    }
