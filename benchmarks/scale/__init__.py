# SPDX-License-Identifier: Apache-2.0
"""What one coordinator pays for a large fleet, and how that grows with the fleet.

`parts(…)` runs `kvlink coordinator` and load processes on this host. fleet.py: workers that are joined and idle;
losses.py: and come back; watchers.py: who hears of a change; crowd.py: the simulated workers; growth.py: the exponents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from ..harness.etcd import EtcdCluster
from ..measurements.control import Row
from ..measurements.coordinator_replicas import Replica
from .crowds import crowds
from .fleet import fleet, joining
from .growth import exponents
from .load import Load
from .losses import lost_replica
from .usage import keep_to_last_core
from .watchers import fan_out, watch_each_other

MEMORY, ETCD = "memory", "etcd"
_WATCH_EACH_OTHER = 128
"""Workers at most: n of them take n² deliveries."""
_COSTS = {
    "join": ("cpu_s", "store_cpu_s"),
    "memory": ("private_mib",),
    "idle": ("core_percent", "store_core_percent"),
    "tickets": ("private_mib",),
    "restart": ("cpu_s", "all_joined_s", "store_cpu_s"),
    "lost replica": ("cpu_s", "all_joined_s", "store_cpu_s"),
    "first list": ("cpu_ms", "list_bytes"),
    "fan-out": ("cpu_ms_per_event", "last_p50_ms"),
    "watch each other": ("cpu_s", "deliveries"),
}
"""What must grow no faster than the number of workers (of watchers for the fan-out), by phase."""

_JOINING_LEASE_S = 600.0
"""Who has joined beats three times a lease: what joining costs would depend on how long it takes."""

Phase = Callable[[Load, int], Iterator[Row]]


def parts(
    workers: Sequence[int],
    tickets: int = 10,
    store: str = MEMORY,
    processes: int = 1,
    lease_s: float = 10.0,
    idle_s: float = 10.0,
    changes: int = 20,
    joinings: int = 3,
) -> list[Iterator[Row]]:
    """Rows of all phases for each number of workers, then of the growth of each cost: in that order, each when it is
    iterated. `tickets` are a worker's; joining is measured so many times, each with a coordinator of its own.

    They raise BenchError when a load process failed.
    """

    def joined(load: Load, count: int) -> Iterator[Row]:
        return fleet(load, count, tickets, idle_s)

    def watched(load: Load, count: int) -> Iterator[Row]:
        return fan_out(load, count, changes)

    def lost(load: Load, count: int) -> Iterator[Row]:
        return lost_replica(load, count, tickets)

    seen: list[Row] = []

    def of(count: int) -> Iterator[Row]:
        phases: list[tuple[Phase, int, float]] = [(joining, 1, _JOINING_LEASE_S)] * joinings
        phases += [(joined, 1, lease_s), (watched, 1, lease_s)]
        phases += [(watch_each_other, 1, lease_s)] if count <= _WATCH_EACH_OTHER else []
        phases += [(lost, 2, lease_s)] if store != MEMORY else []
        for phase, replicas, lasting_s in phases:
            with _load(store, replicas, processes, lasting_s) as load:
                for row in phase(load, count):
                    seen.append(row)
                    yield row

    return [*map(of, workers), growth(seen)]


def growth(seen: Sequence[Row]) -> Iterator[Row]:
    """The exponent of every cost of which two sizes or more are known, with the range over repetitions."""
    for phase, costs in _COSTS.items():
        for cost in costs:
            curve: dict[int, list[float]] = {}
            for row in seen:
                if row["what"] == phase and row[cost] > 0:
                    curve.setdefault(row["workers"], []).append(row[cost])
            if len(curve) > 1:
                least, middle, most = (round(of, 2) for of in exponents(curve))
                grown = {"exponent": middle, "least": least, "most": most}
                yield {
                    "what": "growth",
                    "phase": phase,
                    "of": cost,
                    **grown,
                    "from": min(curve),
                    "to": max(curve),
                }


@contextmanager
def _load(store: str, replicas: int, processes: int, lease_s: float) -> Iterator[Load]:
    """The coordinators share the last core."""
    store_pids: list[int] = []
    with ExitStack() as stack:
        if store == ETCD:
            etcd = stack.enter_context(closing(EtcdCluster()))
            store, store_pids = f"etcd://{etcd.addresses}/scale", etcd.pids
        all_of_them = [stack.enter_context(closing(Replica(store, lease_s))) for _ in range(replicas)]
        for replica in all_of_them:
            keep_to_last_core(replica.process.pid)
        load = crowds(",".join(replica.address for replica in all_of_them), processes)
        yield Load(all_of_them[0], all_of_them[-1], stack.enter_context(load), store_pids)
