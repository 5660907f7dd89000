# SPDX-License-Identifier: Apache-2.0
"""Drains workers through their agents: those of one name, or all those of a process of this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlink.control import AgentClients, CoordinatorClient
from kvlink.control.values import WorkerEpoch
from kvlink.errors import CoordinatorUnavailable, UnknownRequest
from kvlink.hardware.host_identity import this_host
from kvlink.runtime.background import ControlThread
from kvlink.types import HostIdentity, WorkerCard

Row = dict[str, Any]


async def worker_named(coordinator: str, worker_id: str) -> list[WorkerCard]:
    """Returns the card of a worker. Raises UnknownRequest, CoordinatorUnavailable."""
    async with CoordinatorClient(coordinator) as client:
        return [await client.worker(worker_id)]


async def workers_of(coordinator: str, process: int) -> list[WorkerCard]:
    """Returns the cards of the workers in a process of this host, or container, and in those that it started."""
    async with CoordinatorClient(coordinator) as client:
        cards = await client.workers()
    return [card for card in cards if is_here(card.host, this_host()) and is_within(card.host.pid, process)]


def is_here(host: HostIdentity, here: HostIdentity) -> bool:
    """Returns whether a worker's process number means the same process here."""
    return bool(here.boot_id and here.pid_namespace) and (host.boot_id, host.pid_namespace) == (
        here.boot_id,
        here.pid_namespace,
    )


def parent_of(pid: int) -> int:
    """Returns the number of a process's parent, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def is_within(pid: int, process: int, parent: Callable[[int], int] = parent_of) -> bool:
    """Returns whether `pid` is `process` or was started by it."""
    while pid > 0 and pid != process:
        pid = parent(pid)
    return pid == process


@contextmanager
def draining(cards: list[WorkerCard]) -> Iterator[Callable[[], list[Row]]]:
    """Yields a function that lets the workers drain, and returns a row of each with the offers that are left."""
    control = ControlThread.shared()
    agents = control.run(_made())
    seen: set[str] = set()

    async def look(card: WorkerCard) -> Row:
        row = {"role": "worker", "server": card.worker_id, "state": "draining", "running": 0}
        try:
            row["running"] = await agents[card.agent].drain(WorkerEpoch(card.worker_id, card.epoch))
        except (CoordinatorUnavailable, UnknownRequest):
            if card.worker_id not in seen:
                raise
            row["state"] = "ended"
        seen.add(card.worker_id)
        return row

    async def look_at_all() -> list[Row]:
        return list(await asyncio.gather(*map(look, cards)))

    try:
        yield lambda: control.run(look_at_all())
    finally:
        control.run(agents.close())


async def _made() -> AgentClients:
    return AgentClients()
