# SPDX-License-Identifier: Apache-2.0
"""The processes of a soak from outside: hands tickets on, kills and stops processes, judges what became of pulls."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection

from soak.ledger import Excuses, Ledger
from soak.messages import Abort, AtRest, Ending, Finish, Late, Offered, Pulled, PullThis, Release
from soak.processes import Child

from kvlink import _core

_NUM_OWNERS, _NUM_READERS = 2, 3
_MOST_PULLS = 12
"""Under way at one reader."""
_LONG_S = 30.0
_HANGS_S = 20.0
"""Beyond the deadline of a pull."""
_REST_S = 40.0


@dataclass(slots=True, eq=False)
class _Shared:
    """One ticket, and who reads it."""

    offered: Offered
    owner: Child
    readers: int
    """That have not reported yet."""
    settle: bool
    may_be_stale: bool = False
    owner_killed: bool = False


@dataclass(slots=True, eq=False)
class _Running:
    """A pull that has not been reported yet."""

    order: PullThis
    shared: _Shared
    reader: Child
    ends: float


class Fleet:
    """Used by one thread."""

    def __init__(self, seed: int, fault: str = "", calm: bool = False) -> None:
        """Starts the processes. `fault`: a plan for the readers' transports. `calm`: none is killed or stopped."""
        self.ledger = Ledger()
        self._fault, self._calm = fault, calm
        self._random = random.Random(seed)
        self._numbers, self._orders, self._ties = itertools.count(1), itertools.count(), itertools.count()
        here = [name for name, _, _, why_not, _ in _core.transports() if not why_not]
        between = tuple(name for name in here if name in ("shm", "cma", "verbs", "tcp"))
        self.children: list[Child] = []
        self._running: dict[int, _Running] = {}
        self._load: Counter[Child] = Counter()
        self._waiting: deque[tuple[Child, Offered]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._finishing = False
        for number in range(_NUM_OWNERS):
            self._start(f"owner-{number}", between, has_owner=True, has_reader=False)
        for number in range(_NUM_READERS):
            self._start(f"reader-{number}", between, has_owner=False, has_reader=True)
        self._start("both", ("loopback",), has_owner=True, has_reader=True)
        self._in(5.0, self._disrupt)

    def _start(self, name: str, transports: tuple[str, ...], *, has_owner: bool, has_reader: bool) -> None:
        child = Child(name, next(self._numbers), transports, has_owner, has_reader, self._fault)
        child.start(self._random.getrandbits(31))
        self.children.append(child)

    def _in(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._ties), do))

    def turn(self) -> None:
        """A few milliseconds."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        of = {id(pipe): child for child in self.children for pipe in child.pipes()}
        pipes = [pipe for child in self.children for pipe in child.pipes()]
        for pipe in connection.wait(pipes, timeout=0.01):
            assert isinstance(pipe, connection.Connection)
            self._receive(of[id(pipe)], pipe)
        while self._waiting and self._hand_on(*self._waiting[0]):
            self._waiting.popleft()
        self._look_for_hangs()

    def _receive(self, child: Child, pipe: connection.Connection) -> None:
        try:
            while pipe.poll():
                self._take(child, pipe.recv())
        except (EOFError, OSError):
            pipe.close()
            if not self._finishing:
                self.ledger.note(
                    "innocent", f"{child.name} died by itself, exit code {child.process.exitcode}"
                )
                self._replace(child)

    def _take(self, child: Child, message: object) -> None:
        match message:
            case Offered():
                self._waiting.append((child, message))
            case Pulled():
                self._pulled(message)
            case Late():
                self.ledger.note("late", f"{child.name} over {message.transport}", message.places)
            case AtRest():
                self.ledger.at_rest(child.name, message.held)

    # Tickets.

    def _hand_on(self, owner: Child, offered: Offered) -> bool:
        """False: all readers are busy."""
        if owner not in self.children or self._finishing:
            return True
        readers = [
            child
            for child in self.children
            if child.reader is not None
            and self._load[child] < _MOST_PULLS
            and ("loopback" in child.transports) == ("loopback" in owner.transports)
        ]
        if not readers:
            return False
        if self._random.random() < 0.02:  # nobody wants it
            owner.send(owner.owner, Abort(offered.request))
            return True
        wanted = self._random.choices((1, 2, 3), (0.8, 0.15, 0.05))[0]
        shared = _Shared(offered, owner, wanted, settle=wanted == 1, may_be_stale=offered.may_be_stale)
        for _ in range(wanted):
            self._order(shared, self._random.choice(readers))
        return True

    def _order(self, shared: _Shared, reader: Child) -> None:
        count = shared.offered.num_blocks
        first, end = (
            (0, count) if self._random.random() < 0.7 else sorted(self._random.sample(range(count + 1), 2))
        )
        ending = Ending.NONE if self._random.random() < 0.7 else self._random.choice(list(Ending))
        is_short = self._random.random() < 0.05
        order = PullThis(
            next(self._orders),
            shared.offered,
            self._random.choice(reader.transports),
            first,
            end - first,
            shared.settle,
            self._random.choice((0.0, 0.001, 0.01, 0.05, 0.3)) if is_short else _LONG_S,
            ending,
            self._random.choice((0.0, 0.0005, 0.003, 0.02)),
        )
        self._running[order.number] = _Running(order, shared, reader, time.monotonic() + _LONG_S + _HANGS_S)
        self._load[reader] += 1
        reader.send(reader.reader, order)

    def _pulled(self, message: Pulled) -> None:
        running = self._running.pop(message.number, None)
        if running is None:
            return
        order, shared, outcome = running.order, running.shared, message.outcome
        self._load[running.reader] -= 1
        shared.readers -= 1
        excuses = Excuses(
            shared.may_be_stale,
            order.timeout_s < _LONG_S,
            order.ending not in (Ending.NONE, Ending.AWAIT),
            shared.owner_killed,
        )
        about = (
            f"request {order.offered.request} of {shared.owner.name} number {order.offered.owner}, blocks "
            f"{order.first} to {order.first + order.num_blocks} at {running.reader.name} over {order.transport}, "
            f"{order.ending}"
        )
        self.ledger.pulled(outcome, excuses, about)
        if outcome.settled and running.reader in self.children and self._random.random() < 0.05:
            again = _Shared(shared.offered, shared.owner, 1, True, True, shared.owner_killed)
            self._order(again, running.reader)
        elif shared.readers == 0 and not outcome.settled:
            self._end(shared, running.reader)

    def _end(self, shared: _Shared, reader: Child) -> None:
        """Nobody reads it any more: a reader releases it, or its owner takes it back."""
        if reader in self.children and self._random.random() < 0.5:
            transport = self._random.choice(reader.transports)
            reader.send(reader.reader, Release(shared.offered, transport))
        else:
            shared.owner.send(shared.owner.owner, Abort(shared.offered.request))

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        for number, running in list(self._running.items()):
            if running.ends < now:
                self.ledger.note("hung", f"{running.order} at {running.reader.name}")
                del self._running[number]

    # Kills and stops.

    def _disrupt(self) -> None:
        if self._finishing or self._calm:
            return
        self._in(self._random.uniform(0.3, 2.5), self._disrupt)
        child = self._random.choice(self.children)
        if child.is_stopped or self._random.random() < 0.3:
            self.ledger.note("kills", child.name)
            self._replace(child)
        else:
            self.ledger.note("stops", child.name)
            child.stop()
            self._in(self._random.uniform(0.05, 1.5), child.go_on)

    def _replace(self, child: Child) -> None:
        child.go_on()
        child.kill()
        self.children.remove(child)
        for number, running in list(self._running.items()):
            if running.shared.owner is child:
                running.shared.owner_killed = True
            if running.reader is child:
                del self._running[number]
                running.shared.readers -= 1
                running.shared.may_be_stale = True  # its owner will be told that this reader is gone
                self.ledger.counts["pulls of killed readers"] += 1
                running.shared.owner.send(running.shared.owner.owner, Abort(running.shared.offered.request))
        del self._load[child]
        self._start(child.name, child.transports, has_owner=child.has_owner, has_reader=child.has_reader)

    def finish(self) -> None:
        """Lets everybody end what is under way, and checks what is left."""
        for child in self.children:
            child.go_on()
        self._later.clear()
        self._finishing = True
        until = time.monotonic() + _LONG_S + _HANGS_S
        while self._running and time.monotonic() < until:
            self.turn()
        for which in ("reader", "owner"):  # first those that hold on to others
            for child in self.children:
                child.send(getattr(child, which), Finish())
            self._receive_all(which)

    def _receive_all(self, which: str) -> None:
        until = time.monotonic() + _REST_S
        for child in self.children:
            pipe = getattr(child, which)
            rested = pipe is None
            while not rested and time.monotonic() < until:
                try:
                    message = pipe.recv() if pipe.poll(0.1) else None
                except (EOFError, OSError):
                    break
                self._take(child, message)
                rested = isinstance(message, AtRest)
            if not rested:
                self.ledger.note("hung", f"{child.name} did not come to rest")

    def kill_all(self) -> None:
        """Leaves no process behind."""
        for child in self.children:
            child.kill()
