# SPDX-License-Identifier: Apache-2.0
"""Measures workers that join, offer and are idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

from kvlink.control import Security
from kvlink.control.codec import Codec, CoordinatorCalls, Method
from kvlink.control.rpc.channel import Channel
from kvlink.control.values import Nothing, Watch

from ..measurements.control import Row
from .load import Load
from .losses import restart

_WATCH = CoordinatorCalls.WATCH_WORKERS
_HANDOFFS = 2_000
_REPORTS_KEPT = 2
"""The number of each worker's reports that the coordinator keeps."""
_UNREAD: Method[Watch, bytes] = Method(_WATCH.service, _WATCH.name, _WATCH.request, Codec(bytes, bytes))


def joining(load: Load, workers: int) -> Iterator[Row]:
    """Lets all workers join and send one heartbeat.

    `verified` means that none sent two, or idle workers would count as joining ones.
    """
    load.status()
    busy_s, store_s, began = load.cpu_s(), load.store_cpu_s(), time.monotonic()
    load.crowds.shared_out("join", workers)
    took_s, busy_s = time.monotonic() - began, load.cpu_s_when_done() - busy_s
    store_s = load.store_cpu_s() - store_s
    beats, _ = _beats(load)
    yield {
        "what": "join",
        "workers": workers,
        "seconds": round(took_s, 2),
        "cpu_s": round(busy_s, 3),
        "store_cpu_s": round(store_s, 3),
        "cpu_ms_per_worker": round(1e3 * busy_s / workers, 2),
        "beats": beats,
        "verified": (load.status().workers, beats) == (workers, workers),
    }


def fleet(load: Load, workers: int, tickets: int, idle_s: float) -> Iterator[Row]:
    """Measures a fleet with `tickets` per worker. `verified` means that no worker and no offer was lost."""
    yield {"what": "memory", "workers": workers, **_join(load, workers)}
    yield {"what": "tickets", "workers": workers, **_offer(load, workers, tickets)}
    yield {"what": "idle", "workers": workers, **_idle(load, workers, idle_s)}
    for what, count, batched in (("handoffs", _HANDOFFS, False), ("streamed handoffs", 4 * _HANDOFFS, True)):
        yield {
            "what": what,
            "workers": workers,
            **_hand_offs(load, max(count, 0 if batched else workers), batched),
        }
    yield {"what": "first list", "workers": workers, **asyncio.run(_first_lists(load, workers))}
    yield {"what": "restart", "workers": workers, **restart(load, workers, tickets)}


def _join(load: Load, workers: int) -> Row:
    load.status()
    before_mib = load.private_mib()
    load.crowds.shared_out("join", workers)
    beaten = load.crowds.each("all_beaten", _REPORTS_KEPT)
    grown_mib = load.private_mib() - before_mib
    return {
        "private_mib": round(grown_mib, 1),
        "before_mib": round(before_mib, 1),
        "kib_per_worker": round(grown_mib * 1024 / workers, 1),
        "verified": load.status().workers == workers and all(beaten),
    }


def _offer(load: Load, workers: int, tickets: int) -> Row:
    before_mib = load.private_mib()
    load.crowds.each("offer", tickets)
    grown_mib = load.private_mib() - before_mib
    return {
        "tickets": workers * tickets,
        "private_mib": round(grown_mib, 1),
        "kib_per_ticket": round(grown_mib * 1024 / (workers * tickets), 2),
        "verified": load.status().tickets == workers * tickets,
    }


def _idle(load: Load, workers: int, idle_s: float) -> Row:
    beats, busy_s, store_s = _beats(load)[0], load.cpu_s(), load.store_cpu_s()
    began = time.monotonic()
    time.sleep(idle_s)
    took_s, busy_s = time.monotonic() - began, load.cpu_s() - busy_s
    store_s = load.store_cpu_s() - store_s
    beats_now, rejoins = _beats(load)
    status = load.status()
    percent = 100 * busy_s / took_s
    return {
        "beats": beats_now - beats,
        "core_percent": round(percent, 2),
        "core_percent_per_1000": round(percent * 1000 / workers, 2),
        "store_core_percent": round(100 * store_s / took_s, 2),
        "verified": beats_now > beats and (status.workers, status.lost_workers, rejoins) == (workers, 0, 0),
    }


def _hand_offs(load: Load, count: int, batched: bool) -> Row:
    """Hands requests off from worker to worker, over their own connections: one call each, or in 8 streams."""
    busy_s, store_s, began = load.cpu_s(), load.store_cpu_s(), time.monotonic()
    right = load.crowds.shared_out("hand_off_in_streams" if batched else "hand_off", count)
    took_s, busy_s = time.monotonic() - began, load.cpu_s() - busy_s
    return {
        "handoffs": count,
        "per_s": round(count / took_s),
        "cpu_us": round(1e6 * busy_s / count),
        "store_cpu_us": round(1e6 * (load.store_cpu_s() - store_s) / count),
        "verified": all(right),
    }


def _beats(load: Load) -> tuple[int, int]:
    """Returns the number of heartbeats, and how often workers joined again."""
    sent, rejoins = zip(*load.crowds.each("beats"), strict=True)
    return sum(sent), sum(rejoins)


async def _first_lists(load: Load, workers: int) -> Row:
    """Measures what a new watcher gets before anything changes: the first watcher, and the next."""
    trust = Security.from_env().coordinators()
    channel = Channel(load.coordinator.address, "coordinator", "", trust=trust)
    try:
        await channel.call(CoordinatorCalls.STATUS, Nothing(), 60.0)  # connects
        first_s, listed = await _first_list(load, channel)
        again_s, again = await _first_list(load, channel)
    finally:
        await channel.close()
    changes = _WATCH.reply.decode(listed)
    return {
        "cpu_ms": round(1e3 * first_s, 1),
        "again_cpu_ms": round(1e3 * again_s, 1),
        "list_bytes": len(listed),
        "verified": len({change.card.worker_id for change in changes}) == workers and listed == again,
    }


async def _first_list(load: Load, channel: Channel) -> tuple[float, bytes]:
    """Returns the coordinator's CPU time and the message, which is parsed later: meanwhile workers send heartbeats."""
    busy_s = load.cpu_s()
    async with aclosing(channel.receive(_UNREAD, Watch())) as replies:
        listed = await anext(replies)
    return load.cpu_s() - busy_s, listed
