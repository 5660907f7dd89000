# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: real coordinators, sessions and agents on a simulated network, driven by one seed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from functools import partial

from control_simulation.etcd import SimulatedEtcd
from control_simulation.invariants import MOST_PER_S, Ledger, Lines
from control_simulation.network import Network
from control_simulation.processes import Process, State
from control_simulation.serving import SimulatedSecurity
from control_simulation.workers import TTL_S, Watcher, Worker

from kvlink.control.now import now
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore

LEASE_S = 10.0
_PORT = 7400
_NUM_WORKERS = 4
_STALE_S = 5.0
_KEPT_S = TTL_S + 25.0
"""Tickets that are over are deleted a little later, and again when that failed."""
_FEW = 8


class CoordinatorSeat:
    """Where one coordinator runs, and runs again."""

    def __init__(self, world: World, number: int) -> None:
        self.host = f"10.0.0.{number + 1}"
        self.address = f"{self.host}:{_PORT}"
        self._world = world
        self._number = number
        self.one_at_a_time = asyncio.Lock()
        """For what happens to the process."""
        self.store: Store
        self.coordinator: Coordinator
        self.start()

    def start(self) -> None:
        self.is_serving = False
        self.process = Process(f"c{self._number}", self.host)
        self.process.start(self._serve())

    async def _serve(self) -> None:
        security = SimulatedSecurity(network=self._world.network, process=self.process)
        self.store = self._world.make_store(security)
        self.coordinator = Coordinator(self.store, LEASE_S, security=security)
        await self.coordinator.start(self.host, _PORT)
        self.is_serving = True

    def kill(self) -> None:
        self._world.network.kill(self.process)

    async def terminate(self) -> None:
        """As SIGTERM does."""
        ending = self.process.start(self._end())
        await asyncio.wait([ending], timeout=2.0)
        self.kill()

    async def _end(self) -> None:
        await self.coordinator.drain()
        await self.coordinator.close()


class World:
    """Everything of one run. Make it on a SimulatedLoop."""

    def __init__(self, chance: random.Random, num_members: int = 0) -> None:
        """`num_members` of an etcd, for two coordinators; 0: one that has all in its memory."""
        self.chance = chance
        self.network = Network(random.Random(chance.random()))
        self.ledger = Ledger()
        self.lines = Lines(self.ledger)
        self.victim = 0
        """The coordinator that something happens to."""
        self.store_victim = 0
        """Likewise, of etcd's members."""
        self.spares_members = self.failures_count = False
        """No worker may lose its lease; no handoff may be in vain."""
        self.under_way: dict[str, list[Worker]] = {}
        """Handoffs, with who waits for the tickets."""
        self._requests = itertools.count()
        self._hosts = itertools.count(1)
        self._workers: list[Worker] = []
        self._begun: deque[float] = deque()
        """When handoffs began whose tickets may still be kept."""
        self._counts = Counter[str]()
        self._since = 0.0
        self.etcd = SimulatedEtcd(self.network, num_members) if num_members else None
        if self.etcd is not None:
            self.etcd.on_expired = self._note_expired
        self.seats = [CoordinatorSeat(self, number) for number in range(2 if num_members else 1)]
        self.coordinators = ",".join(seat.address for seat in self.seats)
        self.names = [f"w{number}" for number in range(_NUM_WORKERS)]
        for name in self.names:
            self.start_worker(name)
        self.watchers = [
            Watcher(self.network, f"watcher{pause_s:g}", f"10.0.2.{number}", self.coordinators, pause_s)
            for number, pause_s in enumerate((0.0, 0.5))
        ]

    def make_store(self, security: SimulatedSecurity) -> Store:
        """For a coordinator that starts."""
        if self.etcd is None:
            self.ledger.era += 1
            return MemoryStore(LEASE_S)
        return EtcdStore(f"etcd://{self.etcd.addresses}/fleet", LEASE_S, trust=security.services())

    @property
    def store(self) -> SimulatedEtcd:
        """The etcd."""
        assert self.etcd is not None
        return self.etcd

    def _note_expired(self, keys: list[bytes]) -> None:
        lost = [key for key in keys if b"/workers/" in key]
        if lost and self.spares_members:
            self.ledger.violated(f"the lease of {lost} ran out")

    def start_worker(self, worker_id: str) -> Worker:
        """One more process of the name, at a host of its own."""
        host = f"10.0.1.{next(self._hosts)}"
        worker = Worker(self.network, self.ledger, worker_id, host, self.coordinators)
        self._workers.append(worker)
        return worker

    def workers(self) -> list[Worker]:
        """Those that were not killed."""
        return [worker for worker in self._workers if worker.process.state is not State.DEAD]

    def running(self) -> list[Worker]:
        """Returns the workers that can hand off."""
        return [
            worker
            for worker in self.workers()
            if worker.process.runs and worker.session is not None and not worker.is_replaced
        ]

    def bury(self) -> None:
        """Kills the processes that have lost their worker_id to another one, or never got it."""
        for worker in self.workers():
            if not worker.is_joined:
                self.network.kill(worker.process)

    def hand_off(self, owner: Worker, reader: Worker, rival: Worker | None = None) -> str:
        """Begins one handoff; `under_way` has it until a reader has its ticket."""
        request_id = f"r{next(self._requests)}"
        waiting = [reader] if rival is None else [reader, rival]
        self.under_way[request_id] = waiting
        self._begun.append(now())

        def ended(by: Worker, well: bool) -> None:
            waiting.remove(by)
            if well:
                self.under_way.pop(request_id, None)
                owner.forget(request_id)  # the reader has settled in the owner's memory
            elif not waiting and self.under_way.pop(request_id, None) is not None:
                self.ledger.done["in vain"] += 1
                if self.failures_count:
                    self.ledger.violated(f"{request_id} from {owner!r} to {reader!r} was in vain")

        owner.offer(request_id)
        for each in list(waiting):
            each.claim(request_id, self.chance.random() < 0.3, partial(ended, each))
        return request_id

    async def traffic(self, pause_s: float = 2.0) -> None:
        """Handoffs between any two, until cancelled."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.0, 2 * pause_s))
            running = self.running()
            if len(running) < 2:
                continue
            owner, reader = self.chance.sample(running, 2)
            rival = self.chance.choice(running) if self.chance.random() < 0.2 else None
            self.hand_off(owner, reader, rival)
            if self.chance.random() < 0.1:
                reader.settle(owner, self.chance.randrange(1000))

    async def look_for_stale_ones(self) -> None:
        """Coordinators that have lost their store keep nobody who could ask another, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for seat in self.seats:
                if seat.process.runs and seat.is_serving and seat.store.health().stale_s > _STALE_S:
                    num_waiting = (await seat.process.start(seat.store.status())).waiting_claims
                    if num_waiting or seat.coordinator.counts.feeds:
                        self.ledger.violated(
                            f"{seat.process} has lost its store: {num_waiting} claims wait there"
                        )

    def check_settled(self) -> None:
        """Two leases after the last fault."""
        joined = {worker.worker_id: worker for worker in self.workers() if worker.is_joined}
        for name in self.names:
            of_name = [worker for worker in self.workers() if worker.worker_id == name]
            if [worker.is_joined for worker in of_name].count(True) != 1:
                self.ledger.violated(f"not exactly one process has joined as {name}: {of_name}")
        epochs = {name: worker.session.card.epoch for name, worker in joined.items() if worker.session}
        for watcher in self.watchers:
            if watcher.known != epochs:
                self.ledger.violated(f"{watcher.process} sees {watcher.known} instead of {epochs}")

    async def check_hand_offs(self) -> None:
        """Each worker to the next."""
        ring = self.running()
        for owner, reader in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            self.hand_off(owner, reader)
        await asyncio.sleep(5.0)
        for request_id, waiting in self.under_way.items():
            if any(worker.process.runs for worker in waiting):
                self.ledger.violated(f"{request_id} is under way long after the last fault")
        self.under_way.clear()

    async def check_bounds(self) -> None:
        """When nothing is under way."""
        for seat in self.seats:
            status = await seat.process.start(seat.store.status())
            if status.waiting_claims:
                self.ledger.violated(
                    f"{status.waiting_claims} claims wait at {seat.process}, and nobody for them"
                )
            if status.workers != len(self.names):
                self.ledger.violated(f"{seat.process} knows {status.workers} of {len(self.names)} workers")
            self._check_store(seat)
        open_calls = sum(len(connection.calls) for connection in self.network.connections)
        if open_calls > 10 * (len(self.names) + 5):
            self.ledger.violated(f"{open_calls} calls are open")
        self._check_rates()

    def _check_store(self, seat: CoordinatorSeat) -> None:
        """Checks the store's contents for requests that can still matter."""
        while self._begun and self._begun[0] < now() - _KEPT_S:
            self._begun.popleft()
        store = seat.store
        if isinstance(store, EtcdStore):
            num_held = len(store._mirror.requests)
            busy = len(store._pending) + len(store._claims._running) + len(store._sync._awaited)
        else:
            assert isinstance(store, MemoryStore)
            num_held, busy = store._offers.num_tickets + len(store._offers._claimed), 0
        if num_held > len(self._begun):
            self.ledger.violated(f"{seat.process} holds {num_held} requests of the last {len(self._begun)}")
        behind = max(map(len, seat.coordinator.counts.feeds), default=0)
        if busy + behind > _FEW:
            self.ledger.violated(f"{seat.process} is busy: {busy} calls, {behind} changes not watched")

    def _check_rates(self) -> None:
        """Since the last time."""
        counts = Counter({"lines": self.lines.num_loud, "messages": self.network.num_messages})
        if self.etcd is not None:
            counts["store calls"] = self.etcd.num_calls
        for what, most in MOST_PER_S.items():
            rate = (counts[what] - self._counts[what]) / (now() - self._since)
            self.ledger.peak(what, rate)
            if rate > most:
                self.ledger.violated(f"{rate:.1f} {what} a second")
        self._since, self._counts = now(), counts
