# SPDX-License-Identifier: Apache-2.0
"""A network of virtual time: connections that bring messages in order, late, or not at all while a way is cut."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from control_simulation.processes import Process, State, true_time

_CLIENT_PINGS_S = (10.0, 15.0)
_SERVER_PINGS_S = (20.0, 30.0)
"""When an end breaks a connection whose other end does not answer: as keepalive is set in channel.py and server.py."""


class End(Protocol):
    """Receives messages at one end of a connection."""

    def broken(self, connection: Connection, why: str) -> None:
        """Once."""


class Listener(End, Protocol):
    """A server."""

    process: Process

    def accept(self, connection: Connection) -> None:
        """A client has come."""


class Network:
    """Decides by `chance` how long each message takes. Hosts are names as 10.0.0.1."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.listeners: dict[str, Listener] = {}
        self.connections: dict[Connection, None] = {}
        self.num_messages = 0
        self.most_steps: dict[str, float] = {}
        """By method, of a call or of a message in a stream."""
        self.loss = 0.0
        self.slowness = 1.0
        self.certificates = 1
        """Counts how often those of all processes were renewed."""
        self._cut: dict[tuple[str, str], int] = {}
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def trace(self) -> str:
        """Returns a digest of everything that was delivered, and when."""
        return self._trace.hexdigest()

    def note(self, what: str) -> None:
        """Makes `what` a part of the trace."""
        self._trace.update(f"{true_time():.6f} {what}\n".encode())

    def delay_s(self) -> float:
        """Draws the delay of one message. TCP sends what is lost again, so it comes later."""
        delay = 0.0002 + self.chance.expovariate(2000.0) * self.slowness
        while self.loss and self.chance.random() < self.loss:
            delay += 0.2
        return delay

    def note_steps(self, path: str, num_steps: float) -> None:
        """A call has ended."""
        self.most_steps[path] = max(self.most_steps.get(path, 0.0), num_steps)

    def is_cut(self, source: str, target: str) -> bool:
        return self._cut.get((source, target), 0) > 0

    def cut(self, source: str, target: str) -> None:
        """Drops messages from `source` to `target` until as many calls of `restore`."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1
        self.look()

    def restore(self, source: str, target: str) -> None:
        self._cut[source, target] -= 1
        self.look()

    def look(self) -> None:
        """After every change of a way or a process."""
        for connection in list(self.connections):
            connection.look()

    def kill(self, process: Process, silently: bool = False) -> None:
        """Its kernel says so to those that are connected; `silently`: its host is gone, too."""
        for address in [name for name, of in self.listeners.items() if of.process is process]:
            del self.listeners[address]
        if not silently:
            for connection in [each for each in self.connections if process in each.processes]:
                connection.reset_by(process)
        process.kill()
        self.look()

    async def connect(self, client: Process, end: End, address: str, timeout_s: float) -> Connection:
        """Raises OSError in the words of gRPC."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Connection] = loop.create_future()
        host = address.rpartition(":")[0]

        def refuse() -> None:
            if not answer.done():
                answer.set_exception(ConnectionRefusedError("Connection refused"))

        def arrive() -> None:
            if self.is_cut(client.host, host):
                return
            listener = self.listeners.get(address)
            if listener is not None:
                listener.process.call_at(true_time(), take, listener)
            elif not self.is_cut(host, client.host):
                client.call_at(true_time() + self.delay_s(), refuse)

        def take(listener: Listener) -> None:
            if self.listeners.get(address) is not listener:
                refuse()
                return
            connection = Connection(self, client, end, listener)
            listener.accept(connection)
            connection.down.send("accepted", lambda: answered(connection))

        def answered(connection: Connection) -> None:
            if answer.done():
                connection.close(client, "not awaited any more")
            else:
                answer.set_result(connection)

        loop.call_at(loop.time() + self.delay_s(), arrive)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), timeout_s)
        except asyncio.TimeoutError:
            answer.cancel()
            raise TimeoutError("connection attempt timed out before receiving SETTINGS frame") from None


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._held: deque[tuple[str, Callable[[], None]]] = deque()
        self._last = 0.0
        self.is_open = True

    def send(self, what: str, deliver: Callable[[], None]) -> None:
        if not self.is_open:
            return
        if self._held or self._network.is_cut(self._source.host, self._target.host):
            self._held.append((what, deliver))
        else:
            self._post(what, deliver)

    def look(self) -> None:
        """Sends again what was held up, if the way is free."""
        if self._held and not self._network.is_cut(self._source.host, self._target.host):
            self._last = max(self._last, true_time() + self._network.chance.uniform(0, 1))
            while self._held:
                self._post(*self._held.popleft())

    def _post(self, what: str, deliver: Callable[[], None]) -> None:
        network = self._network
        due = true_time() + network.delay_s()
        self._last = due = max(due, self._last + 1e-6)
        self._target.call_at(due, self._arrive, what, deliver)

    def _arrive(self, what: str, deliver: Callable[[], None]) -> None:
        self._network.num_messages += 1
        self._network.note(f"{self._source.name}>{self._target.name} {what}")
        deliver()


class Connection:
    """Between a client and a server, each of which learns by itself when it is over."""

    def __init__(self, network: Network, client: Process, end: End, server: Listener) -> None:
        self._network = network
        self._ends: dict[Process, End] = {client: end, server.process: server}
        self.processes = (client, server.process)
        self.server: Any = server
        self.up = Pipe(network, *self.processes)
        self.down = Pipe(network, *reversed(self.processes))
        self._pings: list[asyncio.TimerHandle] = []
        self.calls: dict[int, Any] = {}
        """Holds the calls of the server's end, by number."""
        network.connections[self] = None
        self.look()

    @property
    def is_open(self) -> bool:
        """At the client's end."""
        return self.processes[0] in self._ends

    def look(self) -> None:
        """Pings begin to fail, or come through again."""
        self.up.look()
        self.down.look()
        hosts = [process.host for process in self.processes]
        one, other = hosts
        is_sound = (
            all(process.runs for process in self.processes)
            and not self._network.is_cut(one, other)
            and not self._network.is_cut(other, one)
        )
        if is_sound:
            for ping in self._pings:
                ping.cancel()
            self._pings.clear()
        elif not self._pings:
            for process, span in zip(self.processes, (_CLIENT_PINGS_S, _SERVER_PINGS_S), strict=True):
                due = true_time() + self._network.chance.uniform(*span)
                self._pings.append(process.call_at(due, self.close, process, "keepalive watchdog timeout"))

    def reset_by(self, process: Process) -> None:
        """The process is no more; the other one is told."""
        if self._ends.pop(process, None) is not None:
            self._tell(process, "Connection reset by peer")

    def close(self, process: Process, why: str) -> None:
        """At one end, which lets the other one know."""
        end = self._ends.pop(process, None)
        if end is not None:
            self._tell(process, "Socket closed")
            end.broken(self, why)

    def _tell(self, process: Process, why: str) -> None:
        client, server = self.processes
        other, pipe = (server, self.up) if process is client else (client, self.down)
        pipe.send("closed", lambda: self.close(other, why))
        pipe.is_open = False
        if not any(left.state is not State.DEAD for left in self._ends):
            self._network.connections.pop(self, None)
            for ping in self._pings:
                ping.cancel()
