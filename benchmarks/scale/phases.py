# SPDX-License-Identifier: Apache-2.0
"""Measures workers that join, offer, are idle, watch each other, and lose their coordinator and come back."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

from kvlink.control import CoordinatorClient, Security
from kvlink.control.codec import Codec, CoordinatorCalls, Method
from kvlink.control.rpc.channel import Channel
from kvlink.control.values import Nothing, Watch
from kvlink.types import Joined, WorkerChange

from ..harness.processes import BenchError
from ..measurements.control import Row
from .crowd import make_card
from .load import Load, peak_share

_ASK_EVERY_S = 0.02


def restart(load: Load, workers: int, tickets: int) -> Row:
    """Measures a restart. Times count from when the next coordinator listens. `tickets` a worker come back with it."""
    load.crowds.each("brace")
    load.lose_coordinator()
    return _came_back(load, workers, workers, tickets)


def lost_replica(load: Load, workers: int, tickets: int) -> Iterator[Row]:
    """Kills another replica, which about half of the workers used: they come to this one."""
    load.crowds.shared_out("join", workers)
    load.crowds.each("offer", tickets)
    moving = sum(load.crowds.each("brace", load.other.address))
    row = _came_back(load, moving, workers, tickets, load.other.process.kill)
    yield {"what": "lost replica", "workers": workers, "moved": moving, **row}


def _came_back(
    load: Load, moving: int, workers: int, tickets: int, lose: Callable[[], None] = lambda: None
) -> Row:
    busy_s, store_s = load.cpu_s(), load.store_cpu_s()
    lost_at, rejoined, stall_s, peak = asyncio.run(_come_back(load, lose))
    busy_s, store_s = load.cpu_s() - busy_s, load.store_cpu_s() - store_s
    after_s = sorted(max(0.0, at - lost_at) for at in rejoined)
    if not after_s:
        raise BenchError(f"none of {moving} workers came back within a minute")
    status = load.status()
    complete = (status.workers, status.tickets) == (workers, workers * tickets)
    return {
        "half_joined_s": round(statistics.median(after_s), 2),
        "all_joined_s": round(after_s[-1], 2),
        "cpu_s": round(busy_s, 2),
        "store_cpu_s": round(store_s, 2),
        "peak_core": round(peak, 2),
        "longest_stall_ms": round(1e3 * stall_s),
        "verified": len(rejoined) == moving and complete and all(load.crowds.each("claim")),
    }


async def _come_back(load: Load, lose: Callable[[], None]) -> tuple[float, list[float], float, float]:
    """Returns when it was lost, when each worker had rejoined, the slowest other call and the busiest moment."""
    asking = asyncio.create_task(_longest_stall_s(load.coordinator.address))
    busy = asyncio.create_task(peak_share(load.coordinator.process.pid))
    await asyncio.sleep(_ASK_EVERY_S)
    lost_at = time.monotonic()
    lose()
    rejoined = await asyncio.to_thread(load.crowds.each, "rejoined")
    for task in (asking, busy):
        task.cancel()
    return lost_at, [at for each in rejoined for at in each], await asking, await busy


async def _longest_stall_s(address: str) -> float:
    """Returns the longest of consecutive calls until cancelled."""
    longest_s = 0.0
    async with CoordinatorClient(address, timeout_s=60.0) as client:
        asked = time.monotonic()
        try:
            while True:
                asked = time.monotonic()
                await client.status()
                longest_s = max(longest_s, time.monotonic() - asked)
                await asyncio.sleep(_ASK_EVERY_S)
        except asyncio.CancelledError:
            return max(longest_s, time.monotonic() - asked)


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


_FIRST_MARK = 1 << 20


def fan_out(load: Load, watchers: int, changes: int) -> Iterator[Row]:
    """Lets one worker change its card `changes` times, while others watch."""
    load.crowds.shared_out("watch", watchers)
    delivered_ms, last_ms, busy_s = asyncio.run(_change(load, changes))
    yield {
        "what": "fan-out",
        "workers": watchers,
        "events": changes,
        "event_bytes": _event_bytes(),
        "p50_ms": round(statistics.median(delivered_ms), 1),
        "p99_ms": round(delivered_ms[len(delivered_ms) * 99 // 100], 1),
        "last_p50_ms": round(statistics.median(last_ms), 1),
        "cpu_ms_per_event": round(1e3 * busy_s / changes, 2),
        "cpu_us_per_delivery": round(1e6 * busy_s / len(delivered_ms), 1),
        "verified": len(delivered_ms) == watchers * changes,
    }


async def _change(load: Load, changes: int) -> tuple[list[float], list[float], float]:
    """Returns milliseconds from the call that changes the card: each delivery, each event's last; then CPU time."""
    delivered_ms: list[float] = []
    last_ms: list[float] = []

    async with CoordinatorClient(load.coordinator.address, timeout_s=60.0) as client:

        async def change(mark: int) -> list[float]:
            began = time.monotonic()
            await client.join(make_card("changes", mark))
            seen = await asyncio.to_thread(load.crowds.each, "seen", mark)
            return [1e3 * (at - began) for each in seen for at in each]

        await change(_FIRST_MARK)  # and every watcher starts from here
        busy_s = load.cpu_s()
        for number in range(1, changes + 1):
            taken_ms = await change(_FIRST_MARK + number)
            delivered_ms += taken_ms
            last_ms.append(max(taken_ms))
        busy_s = load.cpu_s() - busy_s
    return sorted(delivered_ms), last_ms, busy_s


def _event_bytes() -> int:
    event = [WorkerChange(Joined.UP, make_card("changes", _FIRST_MARK))]
    return len(CoordinatorCalls.WATCH_WORKERS.reply.encode(event))
