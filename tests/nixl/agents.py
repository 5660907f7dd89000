# SPDX-License-Identifier: Apache-2.0
"""NIXL agents as processes, each with a real wheel of NIXL and the plugin of this checkout.

As a program it forks agents. Each evaluates what the test says, in a namespace with its agent and its memory.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = os.environ.get("KVLINK_NIXL_BUILD", "cpp")
"""The folder below build/; the plugin of asan and tsan needs their runtime before all other libraries."""
PLUGINS = ROOT / "build" / BUILD / "nixl"
RELEASES = ("1.0.0", "1.0.1", "1.1.0", "1.2.0", "1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1")
NEWEST = RELEASES[-1]


def wheel(release: str) -> Path:
    """Returns a folder with this release of NIXL, which is installed there once."""
    folder = ROOT / "build" / "nixl" / release
    if not folder.exists():
        part = folder.with_suffix(".part")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part)]
        subprocess.run([*command, f"nixl-cu12=={release}", f"nixl=={release}"], check=True)
        part.rename(folder)
    return folder


def environment(release: str = NEWEST, **more: str) -> dict[str, str]:
    """Returns the environment of a process that loads this NIXL and the plugin."""
    assert (PLUGINS / "libplugin_KVLINK.so").exists(), "make build-cpp"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVLINK_")}
    if BUILD != "cpp":
        names = f"lib{BUILD}.so", "libstdc++.so"  # the first one catches what is thrown in the second
        kept["LD_PRELOAD"] = " ".join(
            subprocess.check_output(["c++", f"-print-file-name={name}"], text=True).strip() for name in names
        )
        kept["ASAN_OPTIONS"] = "detect_leaks=0"  # CPython has some
        kept |= {"UBSAN_OPTIONS": "halt_on_error=1", "TSAN_OPTIONS": "halt_on_error=1"}
    return kept | {"PYTHONPATH": str(wheel(release)), "NIXL_PLUGIN_DIR": str(PLUGINS)} | more


@contextmanager
def reserved_port() -> Iterator[str]:
    """Reserves a port that nobody else gets meanwhile, and at which a process that is told of it may listen."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield str(bound.getsockname()[1])


def _read(pipe: IO[bytes]) -> Any:
    head = pipe.read(4)
    if len(head) < 4:
        raise EOFError("the agent's process has ended")
    return pickle.loads(pipe.read(struct.unpack("<I", head)[0]))


def _write(pipe: IO[bytes], value: object) -> None:
    body = pickle.dumps(value)
    pipe.write(struct.pack("<I", len(body)) + body)
    pipe.flush()


class Process:
    """A process that a nursery forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: int | None = None
        with suppress(ProcessLookupError):
            self._ended = os.pidfd_open(pid)

    def poll(self, within_s: float | None = 0) -> bool:
        """Returns whether it has ended."""
        return self._ended is None or bool(select.select([self._ended], [], [], within_s)[0])

    def wait(self) -> None:
        self.poll(None)

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        if self._ended is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, number)

    def end(self) -> None:
        """Kills it. Idempotent."""
        self.signal(signal.SIGKILL)
        self.wait()
        if self._ended is not None:
            os.close(self._ended)
        self._ended = None


class Nursery:
    """A process that has loaded NIXL, and forks agents: that takes a small part of the time of starting them."""

    def __init__(self, release: str) -> None:
        self._asked, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answers:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(answers.fileno())],
                pass_fds=[answers.fileno()],
                env=environment(release, OPENBLAS_NUM_THREADS="1"),
            )

    def fork(self, name: str, more: dict[str, str]) -> tuple[Process, list[IO[bytes]]]:
        """Returns an agent's process, two pipes to and from it, and the file that it writes errors into."""
        (stdin, calls), (answers, stdout), errors = os.pipe(), os.pipe(), os.memfd_create("errors")
        socket.send_fds(self._asked, [pickle.dumps((name, more))], [stdin, stdout, errors])
        os.close(stdin)
        os.close(stdout)
        opened = [os.fdopen(calls, "wb"), os.fdopen(answers, "rb"), os.fdopen(errors, "rb")]
        return Process(int(self._asked.recv(32))), opened

    def close(self) -> None:
        self._asked.close()
        self._process.wait()


@functools.cache
def nursery(release: str) -> Nursery:
    """Returns the nursery of this release, which lives as long as this process."""
    made = Nursery(release)
    atexit.register(made.close)
    return made


class Agent:
    """A process with one agent. Calling it evaluates an expression there, with the keywords as names."""

    def __init__(self, name: str, release: str = NEWEST, **more: str) -> None:
        self.name = name
        self.process, (self._stdin, self._stdout, self._stderr) = nursery(release).fork(name, more)
        self.started = _read(self._stdout)

    def __call__(self, expression: str, **names: object) -> Any:
        self.send(expression, **names)
        return self.answer()

    def send(self, expression: str, **names: object) -> None:
        """Begins a call whose answer() is taken later."""
        _write(self._stdin, (expression, names))

    def answer(self) -> Any:
        worked, value = _read(self._stdout)
        if not worked:
            raise RuntimeError(value)
        return value

    def counts(self) -> tuple[int, int]:
        """Returns how many descriptors and threads it has."""
        descriptors, threads = (
            sum(1 for _ in Path(f"/proc/{self.process.pid}", each).iterdir()) for each in ("fd", "task")
        )
        return descriptors, threads

    def has_answered(self, within_s: float) -> bool:
        """Returns whether the answer of the call that was begun is there."""
        return bool(select.select([self._stdout], [], [], within_s)[0])

    def said(self) -> str:
        """Returns the text on its standard error: at least what it wrote before its last answer."""
        errors = self._stderr.fileno()  # its position is the agent's, too
        return os.pread(errors, os.fstat(errors).st_size, 0).decode()

    def end(self) -> None:
        """Kills it. Idempotent."""
        self.process.end()
        for pipe in (self._stdin, self._stdout, self._stderr):
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def agents(*names: str, release: str = NEWEST, **more: str) -> Iterator[list[Agent]]:
    """Runs agents of these names."""
    with ExitStack() as stack:
        running: list[Agent] = []
        for name in names:
            running.append(Agent(name, release, **more))
            stack.callback(running[-1].end)
        yield running


def introduce(reader: Agent, owner: Agent) -> None:
    """Gives the owner's metadata to the reader, and none to the owner."""
    reader("agent.add_remote_agent(metadata)", metadata=owner("agent.get_agent_metadata()"))


class Served:
    """The namespace of an agent's process."""

    def __init__(self, name: str) -> None:
        import numpy as np
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.np = np
        self.agent = nixl_agent(name, nixl_agent_config(backends=["KVLINK"]))
        self.memory: dict[str, Any] = {}
        self.registered: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}

    def register(self, key: str, num_bytes: int, seed: int | None = None, kind: str = "DRAM") -> int:
        """Registers memory, random by a seed or else zero, and returns its address."""
        made = self.np.zeros(num_bytes, dtype=self.np.uint8)
        if seed is not None:
            made[:] = self.np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=self.np.uint8)
        self.memory[key] = made
        self.registered[key] = self.agent.register_memory([(made.ctypes.data, made.nbytes, 0, "")], kind)
        return int(made.ctypes.data)

    def deregister(self, key: str) -> None:
        self.agent.deregister_memory(self.registered.pop(key))

    def prepare(
        self,
        key: str,
        peer: str,
        into: str,
        at: int,
        pieces: int,
        size: int,
        note: bytes = b"",
        op: str = "READ",
    ) -> None:
        """Prepares pieces of `size`, in reverse order at this end."""
        base = self.memory[into].ctypes.data
        local = [(base + (pieces - 1 - n) * size, size, 0) for n in range(pieces)]
        remote = [(at + n * size, size, 0) for n in range(pieces)]
        self.handles[key] = self.agent.initialize_xfer(
            op,
            self.agent.get_xfer_descs(local, "DRAM"),
            self.agent.get_xfer_descs(remote, "DRAM"),
            peer,
            note,
        )

    def wait(self, key: str, note: bytes | None = None, within: float = 60) -> str:
        """Posts a handle, and returns how it ended: DONE, ERR, or the name of the exception."""
        try:
            state = self.agent.transfer(self.handles[key], *([note] if note is not None else []))
            until = time.monotonic() + within
            while state == "PROC" and time.monotonic() < until:
                state = self.agent.check_xfer_state(self.handles[key])
        except Exception as error:
            return type(error).__name__
        return str(state)

    def equals(self, key: str, seed: int, pieces: int, size: int, of: int) -> bool:
        """Whether memory has the pieces that prepare() names, of memory of `of` bytes with this seed."""
        wanted = self.np.random.default_rng(seed).integers(0, 256, of, dtype=self.np.uint8)
        wanted = wanted[: pieces * size].reshape(pieces, size)[::-1].reshape(-1)
        return bool((self.memory[key][: pieces * size] == wanted).all())

    def read_on(self, key: str, into: str, seed: int, times: int) -> dict[str, int]:
        """Posts a handle of 64 pieces so many times, and returns how often each end came; `wrong` is one of them."""
        memory = self.memory[into]
        wanted = self.np.random.default_rng(seed).integers(0, 256, memory.nbytes, dtype=self.np.uint8)
        wanted = wanted.reshape(64, -1)[::-1].reshape(-1)
        ends = Counter[str]()
        for _ in range(times):
            end = self.wait(key)
            ends[end] += 1
            right = end != "DONE" or self.np.array_equal(memory, wanted)
            memory.fill(0)
            ends["wrong"] += not right or bool(memory.view(self.np.uint64).any())
        return dict(ends)

    def release_early(self, owner: str, at: int, size: int, times: int, seed: int) -> tuple[int, int]:
        """Posts reads of 64 pieces, and releases each after a random time. Returns how many were under way then, and
        how many left bytes that came late: each of several memories is read right away and at its next turn.
        """
        chosen, keys = random.Random(seed), [f"into{number}" for number in range(4)]
        for key in keys:
            self.register(key, size)
        start = time.perf_counter()
        self.prepare("early", owner, keys[0], at, 64, size // 64)
        for _ in range(10):
            assert self.wait("early") == "DONE"
        whole = (time.perf_counter() - start) / 10
        self.memory[keys[0]].fill(0)
        early = late = 0
        for turn in range(times):
            into = self.memory[keys[turn % len(keys)]].view(self.np.uint64)
            late += bool(into.any())
            self.prepare("early", owner, keys[turn % len(keys)], at, 64, size // 64)
            self.agent.transfer(self.handles["early"])
            until = time.perf_counter() + chosen.uniform(0, 1.5 * whole)
            while time.perf_counter() < until:
                pass
            early += turn % 2 and self.agent.check_xfer_state(self.handles["early"]) == "PROC"
            self.agent.release_xfer_handle(self.handles.pop("early"))
            into.fill(0)
            late += bool(into.any())
        return early, late

    def notes(self, count: int, of: str = "", within: float = 30) -> dict[str, list[bytes]]:
        """Takes notifications until there are so many, of one agent or of all."""
        found: dict[str, list[bytes]] = {}
        until = time.monotonic() + within
        while time.monotonic() < until:
            for name, texts in self.agent.get_new_notifs().items():
                found.setdefault(name if isinstance(name, str) else name.decode(), []).extend(texts)
            if sum(len(texts) for name, texts in found.items() if of in ("", name)) >= count:
                break
        return found


def nurse(number: int) -> None:
    """Forks an agent for each message with a name, variables and three files, until the socket is closed."""
    import nixl_cu12._api  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=number) as asked:
        while True:
            message, files, _, _ = socket.recv_fds(asked, 65536, 3)
            if not message:
                return
            pid = os.fork()
            if not pid:
                break
            asked.send(b"%d" % pid)
            for file in files:
                os.close(file)
    for at, file in enumerate(files):
        os.dup2(file, at)
        os.close(file)
    name, more = pickle.loads(message)
    os.environ.update(more)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    serve(name)
    os._exit(0)


def serve(name: str) -> None:
    """Runs one agent until its standard input ends."""
    calls, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        served = Served(name)
    except Exception as error:
        return _write(answers, f"{type(error).__name__}: {error}")
    _write(answers, "")
    scope = {key: getattr(served, key) for key in dir(served) if not key.startswith("_")}
    scope |= {"served": served, "os": os, "time": time, "threading": threading}
    while True:
        try:
            expression, names = _read(calls)
        except EOFError:
            os._exit(0)
        try:
            _write(answers, (True, eval(expression, scope | names)))
        except Exception as error:
            _write(answers, (False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    nurse(int(sys.argv[1]))
