# SPDX-License-Identifier: Apache-2.0
"""NIXL agents as processes, each with a real wheel of NIXL and the plugin of this checkout.

As a program, it is one agent: it evaluates what the test says, in a namespace with its agent and its memory.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "build" / "cpp" / "nixl"
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
    return kept | {"PYTHONPATH": str(wheel(release)), "NIXL_PLUGIN_DIR": str(PLUGINS)} | more


def _read(pipe: IO[bytes]) -> Any:
    head = pipe.read(4)
    if len(head) < 4:
        raise EOFError("the agent's process has ended")
    return pickle.loads(pipe.read(struct.unpack("<I", head)[0]))


def _write(pipe: IO[bytes], value: object) -> None:
    body = pickle.dumps(value)
    pipe.write(struct.pack("<I", len(body)) + body)
    pipe.flush()


class Agent:
    """A process with one agent. Calling it evaluates an expression there, with the keywords as names."""

    def __init__(self, name: str, release: str = NEWEST, **more: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(release, **more),
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self._errors: list[bytes] = []
        self._reader = threading.Thread(target=self._errors.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        self.started = _read(self.process.stdout)

    def __call__(self, expression: str, **names: object) -> Any:
        self.send(expression, **names)
        return self.answer()

    def send(self, expression: str, **names: object) -> None:
        """Begins a call whose answer() is taken later."""
        assert self.process.stdin
        _write(self.process.stdin, (expression, names))

    def answer(self) -> Any:
        assert self.process.stdout
        worked, value = _read(self.process.stdout)
        if not worked:
            raise RuntimeError(value)
        return value

    def said(self) -> str:
        """Returns the text on its standard error; all of it once the process has ended."""
        if self.process.poll() is not None:
            self._reader.join()
        return b"".join(self._errors).decode()

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stderr:
            self.process.stderr.close()


@contextmanager
def agents(*names: str, release: str = NEWEST, **more: str) -> Iterator[list[Agent]]:
    """Runs agents of these names."""
    running: list[Agent] = []
    try:
        running.extend(Agent(name, release, **more) for name in names)
        yield running
    finally:
        for agent in running:
            agent.end()


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

    def notes(self, count: int, within: float = 30) -> dict[str, list[bytes]]:
        """Takes notifications until there are so many."""
        found: dict[str, list[bytes]] = {}
        until = time.monotonic() + within
        while sum(map(len, found.values())) < count and time.monotonic() < until:
            for name, texts in self.agent.get_new_notifs().items():
                found.setdefault(name if isinstance(name, str) else name.decode(), []).extend(texts)
        return found


def serve(name: str) -> None:
    """Runs one agent until its standard input ends."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
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
    serve(sys.argv[1])
