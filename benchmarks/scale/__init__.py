# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a large fleet for one coordinator, and how that grows with the fleet.

`parts(…)` runs `kvlink coordinator` and load processes on this host. phases.py has what is measured, crowd.py the
simulated workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from ..harness.etcd import EtcdCluster
from ..harness.statistics import exponents
from ..measurements.control import Row
from ..measurements.coordinator_replicas import Replica
from .crowd import crowds
from .load import Load, keep_to_last_core
from .phases import fan_out, fleet, joining, lost_replica

MEMORY, ETCD = "memory", "etcd"
_WATCHERS = 4_000
"""The largest number of watchers: each gets the cards of as many workers first."""
_COSTS = {
    "join": ("cpu_s", "store_cpu_s"),
    "memory": ("private_mib",),
    "idle": ("core_percent", "store_core_percent"),
    "tickets": ("private_mib",),
    "handoffs": ("cpu_us", "store_cpu_us"),
    "streamed handoffs": ("cpu_us", "store_cpu_us"),
    "restart": ("cpu_s", "all_joined_s", "store_cpu_s"),
    "lost replica": ("cpu_s", "all_joined_s", "store_cpu_s"),
    "first list": ("cpu_ms", "list_bytes"),
    "fan-out": ("cpu_ms_per_event", "last_p50_ms"),
}
"""By phase, the costs that must grow at most linearly with the number of workers (of watchers for the fan-out).

Those of a handoff must not grow."""

_JOINING_LEASE_S = 600.0
"""The lease while workers join. They send four heartbeats per lease, so a short one would add to joining."""

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
    """Returns rows of all phases for each number of workers, then of each cost's growth, computed when they are
    iterated.

    `tickets` is the number per worker. Joining is measured `joinings` times, each with a new coordinator. The rows
    raise BenchError if a load process failed.
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
        phases += [(joined, 1, lease_s)]
        phases += [(watched, 1, lease_s)] if count <= _WATCHERS else []
        phases += [(lost, 2, lease_s)] if store != MEMORY else []
        for phase, replicas, lasting_s in phases:
            with _load(store, replicas, processes, lasting_s) as load:
                for row in phase(load, count):
                    seen.append(row)
                    yield row

    return [*map(of, workers), growth(seen)]


def growth(seen: Sequence[Row]) -> Iterator[Row]:
    """Yields the exponent of every cost with two sizes or more, with the range over repetitions."""
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
    """Starts the load. The coordinators share the last core."""
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
