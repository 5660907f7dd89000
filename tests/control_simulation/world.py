# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: real coordinators, sessions and agents on a simulated network, driven by one seed."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from typing import Any

from control_simulation.calls import Message
from control_simulation.etcd import SimulatedEtcd
from control_simulation.handoffs import KINDS, Handoffs
from control_simulation.invariants import MOST_PER_S, MOST_STEPS, Ledger, Lines
from control_simulation.network import Network
from control_simulation.processes import Process, State, true_time
from control_simulation.serving import SimulatedSecurity
from control_simulation.workers import CLAIM_S, Watcher, Worker

from kvlink.control import SessionState
from kvlink.control.limits import Limits
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.runtime.supervised import failures

LEASE_S = 10.0
_PORT = 7400
_NUM_WORKERS = 4
_STALE_S = 5.0
_FEW = 8
_LEFT_WITHIN_S = 2.5
"""A worker that leaves a hung coordinator has joined another one after this: it does not call the hung one again, which
would take 3 s."""
_JOINED_WITHIN_S = 4.0
_AT_REST = tuple(kind for kind in KINDS if kind not in ("rival", "abandoned"))
"""A rival waits for longer than the check."""
_LOOKUPS = 7
"""So often a prefix is looked up, every 2 s. Its owner asks every 10 s whether the directory has it, and every 30 s
where a coordinator has none."""
_MOST_KEPT_BYTES = 8_000
"""Bounds the requests that are kept of calls that have ended."""


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
        self.is_older = world.chance.random() < 0.2
        self.start()

    def start(self) -> None:
        self.is_serving = False
        self.process = Process(f"c{self._number}", self.host)
        self.process.start(self._serve())

    async def _serve(self) -> None:
        security = SimulatedSecurity(network=self._world.network, process=self.process, older=self.is_older)
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
        self.spares_members = False
        """No worker may lose its lease."""
        self.has_only_one = False
        """Nothing else happens in this round."""
        self.has_one_fault = False
        """Beside those that cost no worker its lease."""
        self.leaves_one = False
        """There is a coordinator that nothing happens to, and an etcd."""
        self.limits = Limits()
        """Bounds coordinators in memory that start from now on."""
        self.handoffs = Handoffs(chance, self.ledger)
        self._num_survived = sum(failures().values())
        self._kept_before = Message.num_kept.copy()
        self._slots = 0
        self._hosts = 0
        self._workers: list[Worker] = []
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
            return MemoryStore(LEASE_S, self.limits)
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

    def start_worker(self, worker_id: str, agent: str = "") -> Worker:
        """One more process of the name, at a host of its own. `agent`: it names another agent as its own."""
        self._hosts += 1
        host = f"10.0.1.{self._hosts}"
        worker = Worker(self.network, self.ledger, worker_id, host, self.coordinators, agent)
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

    def slot(self) -> int:
        """Returns a number that no other seat has."""
        self._slots += 1
        return self._slots

    async def traffic(self, pause_s: float = 2.0) -> None:
        """All that workers do, between any of them, until cancelled."""
        chance = self.chance
        while True:
            await asyncio.sleep(chance.uniform(0.0, 2 * pause_s))
            running = self.running()
            if len(running) < 3:
                continue
            self.handoffs.some(running)
            one, other = chance.sample(running, 2)
            if chance.random() < 0.1:
                self.note("settle", one.settle(other, self.slot(), chance.random() < 0.5))
            if chance.random() < 0.1:
                self.note("visit", one.visit(other, self.slot()))
            if chance.random() < 0.1:
                self.note("find", one.find(other))
            if chance.random() < 0.1:
                one.pretend(other, chance.randrange(6))
            if chance.random() < 0.05:
                self.ledger.done["prefix withdrawn"] += 1
                one.withdraw()
                asyncio.get_running_loop().call_later(chance.uniform(0.0, 20.0), one.publish)

    def note(self, what: str, doing: asyncio.Task[Any]) -> None:
        """Counts what was answered, and what was not."""

        def count(done: asyncio.Task[Any]) -> None:
            well = not done.cancelled() and done.result()
            self.ledger.done[what if well else f"{what}, in vain"] += 1

        doing.add_done_callback(count)

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

    async def look_for_hung_ones(self) -> None:
        """Workers leave a coordinator that hangs for another one at once, until cancelled."""
        since: dict[Worker, float] = {}
        while True:
            await asyncio.sleep(0.25)
            for worker in self.workers():
                if worker.session is None or worker.is_joined or not worker.process.runs:
                    since.pop(worker, None)
                elif worker.session.state is SessionState.REJOINING:
                    out_s = true_time() - since.setdefault(worker, true_time())
                    if self.leaves_one and out_s > _LEFT_WITHIN_S:
                        self.ledger.violated(f"{worker} has not found the other coordinator in {out_s:.1f} s")
                        since[worker] = float("inf")

    def check_lost(self, worker: Worker) -> None:
        """Two leases after it died."""
        self.ledger.done["lost"] += 1
        for watcher in self.watchers if self.has_only_one else ():
            if worker.worker_id in watcher.known:
                self.ledger.violated(f"{watcher.process} still sees {worker}, who died two leases ago")

    def check_settled(self) -> None:
        """Two leases after the last fault."""
        joined = {worker.worker_id: worker for worker in self.workers() if worker.is_joined}
        for name in self.names:
            of_name = [worker for worker in self.workers() if worker.worker_id == name]
            if [worker.is_joined for worker in of_name].count(True) != 1:
                self.ledger.violated(f"not exactly one process has joined as {name}: {of_name}")
        cards = {name: worker.session.card for name, worker in joined.items() if worker.session}
        known = {name: (card.epoch, card.draining) for name, card in cards.items()}
        for watcher in self.watchers:
            if watcher.known != known:
                self.ledger.violated(f"{watcher.process} sees {watcher.known} instead of {known}")
        publishers = {(name, card.epoch) for name, card in cards.items()}
        for seat in self.seats:
            for directory in seat.coordinator._prefixes._directories.values():
                if gone := set(directory.publishers()) - publishers:
                    self.ledger.violated(f"{seat.process} has prefixes of {gone}, who are gone")

    async def check_restart(self) -> None:
        """A process whose host still runs can be replaced at once."""
        old = self.chance.choice(self.running())
        self.network.kill(old.process)
        new = self.start_worker(old.worker_id)
        await asyncio.sleep(_JOINED_WITHIN_S)
        if not new.is_joined:
            self.ledger.violated(f"{new} has not joined {_JOINED_WITHIN_S:g} s after {old.process} ended")
            await asyncio.sleep(LEASE_S)

    async def check_calls(self) -> None:
        """Whatever there is works, from each worker to the next. Handoffs of each kind succeed within 5 s."""
        ring = self.running()
        self.handoffs.must_succeed = True
        settling, visiting = [], []
        for number, owner in enumerate(ring):
            reader, other = ring[(number + 1) % len(ring)], ring[(number + 2) % len(ring)]
            for kind in _AT_REST if number == 0 else ("plain", "offered again"):
                self.handoffs.begin(kind, owner, reader, other)
            slot = self.slot()
            settling.append((owner, slot, reader.settle(owner, slot, bool(number % 2))))
            visiting.append((owner, other.visit(owner, self.slot())))
        self.handoffs.ask_for_abandoned(ring[0])
        await asyncio.sleep(5.0)
        self.handoffs.check_over()
        self.handoffs.must_succeed = False
        for owner, slot, accepted in settling:
            self.ledger.done["settle at rest"] += 1
            if not (accepted.done() and accepted.result() and slot in owner.settled):
                self.ledger.violated(f"{owner} is not told to settle {slot}")
        for owner, visited in visiting:
            self.ledger.done["visit at rest"] += 1
            if not (visited.done() and visited.result()):
                self.ledger.violated(f"the agent of {owner} does not answer as it should")
        await self._check_late_order(ring[1], ring[0])
        await asyncio.gather(*map(self._check_found, ring))
        await self._check_withdrawn(ring[0])

    async def _check_late_order(self, owner: Worker, reader: Worker) -> None:
        """An order that comes while its owner has no stream waits for the next one."""
        for connection in [each for each in self.network.connections if each.processes[0] is owner.process]:
            connection.close(owner.process, "its host has moved")
        await asyncio.sleep(0.005)
        slot = self.slot()
        accepted = reader.settle(owner, slot)
        await asyncio.sleep(4.0)
        self.ledger.done["settle without a stream"] += 1
        if not (accepted.done() and accepted.result() and slot in owner.settled):
            self.ledger.violated(f"{owner} is not told to settle {slot}, which came while it had no stream")

    async def _check_withdrawn(self, owner: Worker) -> None:
        if any(seat.is_older for seat in self.seats):  # its publisher may have backed off
            return
        owner.withdraw()
        await asyncio.sleep(3.0)
        for seat in self.seats:
            if seat.address == owner.client.next_address and not seat.is_older:
                directory = seat.coordinator._prefixes._directories.get("")
                name = (owner.worker_id, owner.epoch)
                if directory is not None and name in directory.publishers():
                    self.ledger.violated(f"{seat.process} still has what {owner} has withdrawn")
        owner.publish()

    async def _check_found(self, owner: Worker) -> None:
        """A claim that timed out may have sent the owner to another coordinator, which learns of its prefix soon."""
        tickets: list[bytes] | None = []
        for _ in range(_LOOKUPS if not any(seat.is_older for seat in self.seats) else 3 * _LOOKUPS):
            address = owner.client.next_address
            others = [each for each in self.running() if each.client.next_address == address]
            others.remove(owner)
            seat = next(each for each in self.seats if each.address == address)
            if seat.is_older or not others or owner.prefix_since > true_time() - CLAIM_S:
                self.ledger.done["no lookup"] += 1
                return
            tickets = await others[0].find(owner)
            if tickets == [owner.process.name.encode()]:
                self.ledger.done["prefix found at rest"] += 1
                return
            await asyncio.sleep(2.0)
        self.ledger.violated(f"the prefix of {owner} is not found: {tickets}")

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
        self._check_kept()
        if (num_survived := sum(failures().values())) != self._num_survived:
            self._num_survived = num_survived
            self.ledger.violated(f"loops have survived errors that nobody expected: {failures()}")
        self._check_rates()

    def _check_kept(self) -> None:
        """A call that has ended leaves its request only at who was killed meanwhile. A stream keeps its last one."""
        running = {call.path for connection in self.network.connections for call in connection.calls.values()}

        def kept() -> dict[str, int]:
            of_all = Message.num_kept - self._kept_before
            return {path: num_bytes for path, num_bytes in of_all.items() if path not in running}

        if sum(kept().values()) > _MOST_KEPT_BYTES:
            gc.collect()  # of cycles, which wait for long where other tests have left a large heap
        num_kept = sum(kept().values())
        self.ledger.peak("message bytes", num_kept)
        if num_kept > _MOST_KEPT_BYTES:
            self.ledger.violated(f"requests are kept of calls that have ended: {kept()} bytes")

    def _check_store(self, seat: CoordinatorSeat) -> None:
        """Checks the store's contents for requests that can still matter."""
        store = seat.store
        if isinstance(store, EtcdStore):
            num_held = len(store._mirror.requests)
            busy = len(store._pending) + len(store._claims._running) + len(store._sync._awaited)
        else:
            assert isinstance(store, MemoryStore)
            num_held, busy = store._offers.num_tickets + len(store._offers._claimed), 0
        if num_held > self.handoffs.num_kept:
            self.ledger.violated(f"{seat.process} holds {num_held} requests of {self.handoffs.num_kept}")
        behind = max(map(len, seat.coordinator.counts.feeds), default=0)
        if busy + behind > _FEW:
            self.ledger.violated(f"{seat.process} is busy: {busy} calls, {behind} changes not watched")

    def _check_rates(self) -> None:
        """Since the last time."""
        steps = sum(seat.process.num_steps for seat in self.seats)
        counts = Counter(lines=self.lines.num_loud, messages=self.network.num_messages, steps=steps)
        if self.etcd is not None:
            counts["store calls"] = self.etcd.num_calls
        for what, most in MOST_PER_S.items():
            rate = (counts[what] - self._counts[what]) / (true_time() - self._since)
            self.ledger.peak(what, rate)
            if rate > most:
                self.ledger.violated(f"{rate:.1f} {what} a second")
        for path, num_steps in self.network.most_steps.items():
            if path.startswith("/kvlink."):
                self.ledger.peak("steps a call", num_steps)
                if num_steps > MOST_STEPS:
                    self.ledger.violated(f"a call of {path} took {num_steps:.0f} steps")
        self._since, self._counts = true_time(), counts
