# SPDX-License-Identifier: Apache-2.0
"""Handles of peers (see peer.py): a process of its own, or this one; and what of them a leak would show in."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from transports.peer import Commands, count_agent_calls
from transports.pools import PoolSpec

import kvlink.errors
from kvlink import Ticket

T = TypeVar("T")

_PEER = [sys.executable, str(Path(__file__).with_name("peer.py"))]
_TESTS = Path(__file__).parent.parent

PATIENCE = float(os.environ.get("KVLINK_TEST_PATIENCE", "1"))
"""Multiplies what only bounds how long a test that has failed goes on. An emulated machine needs more."""


EMULATED = PATIENCE > 1
"""Whether this machine is emulated, and so is each of its NICs."""


class Peer(Protocol):
    """Somebody with Workers."""

    pid: int

    def lives(self) -> bool: ...

    def call(self, do: str, **arguments: Any) -> Any: ...

    def close(self) -> None: ...


class LocalPeer:
    """This process."""

    def __init__(self) -> None:
        count_agent_calls()
        self._commands = Commands()
        self.pid = os.getpid()

    def lives(self) -> bool:
        return True

    def call(self, do: str, **arguments: Any) -> Any:
        return getattr(self._commands, do)(**arguments)

    def close(self) -> None:
        self._commands.close_all()


class PeerProcess:
    """A process. `prefix` is a command that runs it, for example in a network namespace."""

    def __init__(self, prefix: Sequence[str] = (), **env: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, *_PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(_TESTS), **env},
        )
        self.pid = self.process.pid
        self._stopped = False
        self._one_at_a_time = threading.Lock()

    def lives(self) -> bool:
        """And is not stopped."""
        return self.process.poll() is None and not self._stopped

    def call(self, do: str, **arguments: Any) -> Any:
        """Raises what the command raised when it is kvlink's, else RuntimeError."""
        with self._one_at_a_time:
            self.send(do, **arguments)
            return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            kind, text = answer["error"]
            raise getattr(kvlink.errors, kind, RuntimeError)(text)
        return answer["ok"]

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of it is stopped."""
        self._stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        while any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.0005)

    def go_on(self) -> None:
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        if not self.lives():
            return self.kill()
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class RemoteWorker:
    """A Worker of a peer."""

    def __init__(self, peer: Peer, name: str, pool: PoolSpec, **config: Any) -> None:
        self.peer = peer
        self.name = name
        self.pool = pool
        self.info: dict[str, Any] = peer.call("open", name=name, pool=pool.json(), config=config)
        self._num_offers = 0
        self._open = True
        self._ended: dict[str, str] = {}

    def do(self, command: str, **arguments: Any) -> Any:
        return self.peer.call(command, name=self.name, **arguments)

    def offer(self, blocks: Sequence[int], request_id: str = "", **options: Any) -> Ticket:
        self._num_offers += 1
        request_id = request_id or f"{self.name}-{self._num_offers}"
        options = {"ttl_s": 60.0, **options}
        text = self.do("offer", request_id=request_id, block_ids=list(blocks), options=options)
        return Ticket.from_text(text)

    def fate_of(self, request_id: str) -> str:
        """How an offer ended; waits for it."""

        def has_ended() -> bool:
            self._ended.update(self.do("events"))
            return request_id in self._ended

        eventually(has_ended)
        return self._ended.pop(request_id)

    def close(self) -> None:
        """Idempotent. It may have died with its process."""
        if self._open and self.peer.lives():
            self._open = False
            self.do("close")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


def open_fds(pid: int) -> Counter[str]:
    """Counts the open descriptors of a process, without numbers of sockets and the like."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"\d+", "", str(entry.readlink()))] += 1
    return found


def native_threads(pid: int) -> Counter[str]:
    """Counts threads of the data plane; gRPC's own come and go."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[(task / "comm").read_text().strip()] += 1
    return Counter({name: count for name, count in found.items() if name.startswith("kvlink-")})


def usage(pid: int) -> Counter[str]:
    """Whatever a leak would show in. asyncio's own pool of threads grows to a bound and stays."""
    here = threading.enumerate() if pid == os.getpid() else []
    python = [thread.name.rstrip("0123456789") for thread in here if not thread.name.startswith("asyncio_")]
    return open_fds(pid) + native_threads(pid) + Counter(python)


def eventually(holds: Callable[[], T], within_s: float = 20.0) -> T:
    """Waits until `holds()`, and returns what it says. The bound only ends a test that has failed."""
    deadline = time.monotonic() + within_s * PATIENCE
    while not (held := holds()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.002)
    return held


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody has. Below those of outgoing connections, so that a server can come back to its own."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_768), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
