# SPDX-License-Identifier: Apache-2.0
"""Measures several coordinators over one etcd: handoffs per second, and the time of a handoff when something dies.

All of it runs on this host: coordinators, etcd members and load share its cores, so rows also give CPU time.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

from kvlink.control import CoordinatorClient
from kvlink.errors import ConfigError

from ..harness.etcd import EtcdCluster
from ..harness.statistics import quantiles_us
from .control import Load, Row, card, loader, stream, throughput, unary

_MEMBERS = 3
_UNARY_HANDOFFS = 3_000
_STREAM_HANDOFFS = 12_000
_LOADERS = 3
_KILLS = 30
_MEMBER_KILLS = 10
_BEFORE_KILL_S = 0.3


class Replica:
    """A process of `kvlink coordinator`, as an operator runs it. It keeps its port over restarts."""

    def __init__(self, store: str, lease_s: float = 600.0) -> None:
        self._store = store
        self._lease_s = lease_s
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Returns once it listens. Raises ConfigError if it does not start."""
        host, _, port = self.address.rpartition(":")
        options = ["--host", host, "--port", port, "--store", self._store]
        options += ["--lease-s", str(self._lease_s)]
        environment = os.environ | {"KVLINK_LOG": "error"}
        command = [sys.executable, "-m", "kvlink", "coordinator", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        output = self.process.stdout.readline() if self.process.stdout else ""
        self.address = output.strip().rpartition(" ")[2]
        if not self.address:
            raise ConfigError("the coordinator did not start")

    def kill(self) -> None:
        """Kills the process without notice. Idempotent."""
        self.process.kill()
        self.process.communicate()

    close = kill


def rows(replicas: Sequence[int]) -> Iterator[Row]:
    """Measures throughput for each number of coordinators, then the cost of losses with the largest number."""
    with closing(EtcdCluster(_MEMBERS)) as etcd:
        for count in replicas:
            yield from _throughput(etcd, count)
        yield from _losses(etcd, max(replicas))


def _throughput(etcd: EtcdCluster, count: int) -> Iterator[Row]:
    with ExitStack() as stack:
        store = f"etcd://{etcd.addresses}/throughput-{count}"
        all_of_them = [stack.enter_context(closing(Replica(store))) for _ in range(count)]
        for what, load, handoffs in (
            ("unary handoffs", unary, _UNARY_HANDOFFS),
            ("batched stream handoffs", stream, _STREAM_HANDOFFS),
        ):
            yield {"what": what, "replicas": count, **_measure(etcd, all_of_them, load, handoffs)}


def _measure(etcd: EtcdCluster, replicas: list[Replica], load: Load, handoffs: int) -> Row:
    addresses = [replica.address for replica in replicas]
    pids = [replica.process.pid for replica in replicas]
    each = handoffs // _LOADERS
    arguments = (addresses, load, _LOADERS, each)
    row = throughput(pids, _LOADERS, each, loader, *arguments, etcd=etcd.pids)
    return {"members": _MEMBERS, **row, "cores": os.cpu_count(), "verified": True}


# Losses.


def _losses(etcd: EtcdCluster, count: int) -> Iterator[Row]:
    with ExitStack() as stack:
        store = f"etcd://{etcd.addresses}/losses"
        replicas = [stack.enter_context(closing(Replica(store))) for _ in range(count)]

        def lose_replica(asked: str) -> Callable[[], None]:
            victim = next(replica for replica in replicas if replica.address == asked)
            victim.kill()
            return victim.start

        def lose_member(number: int) -> Callable[[], None]:
            def bring_back() -> None:
                etcd.start(number)
                etcd.wait()

            etcd.kill(number)
            return bring_back

        addresses = ",".join(replica.address for replica in replicas)
        losses: list[tuple[str, int, Lose]] = [
            ("an etcd follower killed", _MEMBER_KILLS, lambda _: lose_member((etcd.leader() + 1) % _MEMBERS)),
            ("etcd's leader killed", _MEMBER_KILLS, lambda _: lose_member(etcd.leader())),
        ]
        if count > 1:
            losses.insert(0, ("the coordinator in use killed", _KILLS, lose_replica))
        for number, (what, rounds, lose) in enumerate(losses):
            taken_s = asyncio.run(_each_loss(addresses, f"loss{number}", rounds, lose))
            yield {"what": what, "replicas": count, "members": _MEMBERS, **_times(taken_s)}


Lose = Callable[[str], Callable[[], None]]
"""Takes the address in use, kills, and returns a function that restores it."""


async def _each_loss(addresses: str, what: str, rounds: int, lose: Lose) -> list[float]:
    """Returns how long the first handoff takes that begins when something dies."""
    taken_s = []
    async with CoordinatorClient(addresses, timeout_s=30.0) as client:
        await client.join(card(0))
        number = 0

        async def hand_off() -> None:
            nonlocal number
            number += 1
            await unary(client, 0, 0, 1, run=f"{what}-{number}-")

        for _ in range(rounds):
            settled = time.monotonic() + _BEFORE_KILL_S
            while time.monotonic() < settled:
                await hand_off()
            bring_back = lose(client.next_address)
            started = time.monotonic()
            await hand_off()
            taken_s.append(time.monotonic() - started)
            await asyncio.to_thread(bring_back)
            await client.join(card(0), rejoin=True)
    return taken_s


def _times(taken_s: Sequence[float]) -> Row:
    return {"rounds": len(taken_s), **quantiles_us([1e6 * each for each in taken_s]), "verified": True}
