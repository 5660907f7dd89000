# SPDX-License-Identifier: Apache-2.0
"""Real inference servers as child processes: started, watched, asked, killed. Each has a process group of its own.

A server's output is in build/engines/logs; an error shows its end. Nothing here needs the engines themselves.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "build" / "engines"
MODELS = ENGINES / "models"
LOGS = ENGINES / "logs"
START_S = float(os.environ.get("KVLINK_ENGINES_START_S", "400"))  # 65 on a quiet machine, 230 on a loaded one
_END_S = 20.0
STEADY_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""For servers whose memory is measured: buffers are freed to the kernel. By itself glibc keeps tens of MiB of them."""


class ServerFailed(Exception):
    """A server did not start, or ended; says the command's end of output."""


@dataclass(frozen=True)
class Launch:
    """How to start a server, again and again on the same port. `alive` is a path that answers 200 once it serves;
    empty: it need only listen. `cpus`: the CPUs that it may use, in the form of taskset; empty: all. `host` is its
    address, `inside` the prefix of a command that runs where it has that address."""

    name: str
    command: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    alive: str = "/health"
    cpus: str = ""
    host: str = "127.0.0.1"
    inside: tuple[str, ...] = ()

    def at(self, host: str, inside: Iterable[str], **env: str) -> Launch:
        """Returns the launch of the same server on another host."""
        command = tuple(host if part == self.host else part for part in self.command)
        return replace(self, command=command, host=host, inside=tuple(inside), env={**self.env, **env})


class Server:
    """One running server. `kill` and `close` end its whole process group; both are idempotent."""

    def __init__(self, launch: Launch) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.launch = launch
        self.url = f"http://{launch.host}:{launch.port}"
        self.log = LOGS / f"{launch.name}-{launch.port}.log"
        self._started = time.monotonic()
        self._logged_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(launch.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                (
                    *launch.inside,
                    *(("taskset", "-c", launch.cpus) if launch.cpus else ()),
                    *launch.command,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.env},
                cwd=ENGINES,  # not the checkout: what is installed is what is tested
                start_new_session=True,
            )

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else f"ended with {code}"
        return f"<{self.launch.name} at {self.url}, {state}>"

    @property
    def pid(self) -> int:
        """Returns the pid of the process that was started, which is also that of its group."""
        return self._process.pid

    def wait(self, within_s: float = START_S) -> Server:
        """Returns when it serves. Raises ServerFailed with the log's end; nothing of it is left then."""
        try:
            self._wait(self._started + within_s)
        except BaseException:
            self.kill()
            raise
        return self

    def _wait(self, deadline: float) -> None:
        while not self.healthy():
            if self._process.poll() is not None:
                raise ServerFailed(f"{self!r} before it served; {self.tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self!r} but not serving yet; {self.tail()}")
            time.sleep(0.5)

    def healthy(self) -> bool:
        """Whether it answers now."""
        try:
            if not self.launch.alive:
                socket.create_connection((self.launch.host, self.launch.port), timeout=5).close()
                return True
            with urllib.request.urlopen(self.url + self.launch.alive, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def samples(self) -> dict[str, float]:
        """All of /metrics, labels included in the names."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def metric(self, name: str) -> float:
        """One of /metrics, summed over its labels."""
        return sum(value for sample, value in self.samples().items() if sample.partition("{")[0] == name)

    def memory_mib(self) -> float:
        """Returns the private memory of the processes of its group, without pages of files."""
        kib = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError, ValueError):
                if os.getpgid(int(status.parent.name)) == self.pid:
                    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                    kib += sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        return kib / 1024

    def num_logged(self, words: str) -> int:
        """How many lines that this server has logged have `words`. The file may begin with an earlier one's."""
        text = self.log.read_bytes()[self._logged_before :].decode(errors="replace")
        return sum(words in line for line in text.splitlines())

    def tail(self, lines: int = 40) -> str:
        """The end of its output."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"the end of {self.log}:\n" + "\n".join(text)

    def exit_status(self, within_s: float) -> int | None:
        """Waits for its end. None: it still runs."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None

    def kill(self) -> None:
        """SIGKILL to the whole group, as a node that dies."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """SIGTERM, then SIGKILL to what is left of the group."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()

    def restarted(self) -> Server:
        """The same once more, on the same address; not waited for."""
        self.close()
        return Server(self.launch)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@contextmanager
def running(launches: Iterable[Launch]) -> Iterator[list[Server]]:
    """Starts servers side by side, yields when all serve, ends them all. A list: tests may replace the killed."""
    servers: list[Server] = []
    with ExitStack() as stack:
        stack.callback(lambda: [server.close() for server in servers])
        servers.extend(Server(launch) for launch in launches)
        for server in servers:
            server.wait()
        yield servers


def free_port() -> int:
    """A TCP port that nobody uses at the moment, nor gets by chance for a connection before a server listens there."""
    ports = list(range(20_000, 32_000))  # Linux gives connections those from 32768 on
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port from 20000 to 32000 is taken")


def vllm(
    name: str,
    model: str,
    kv_transfer: Mapping[str, Any] | None = None,
    flags: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Launch:
    """A vLLM server of a model in build/engines/models, on a CPU without a GPU."""
    port = free_port()
    command = [
        *(str(ENGINES / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(MODELS / model), "--served-model-name", model),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"),
    ]
    if kv_transfer:
        command += ["--kv-transfer-config", json.dumps(kv_transfer)]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
    }
    return Launch(name, (*command, *flags), port, {**settings, **(env or {})})


def router(prefill: Iterable[Server], decode: Iterable[Server], *flags: str) -> Launch:
    """kvlink's own router in front of running servers."""
    port = free_port()
    command = [sys.executable, "-m", "kvlink", "router", "--port", str(port)]
    for role, servers in (("--prefill", prefill), ("--decode", decode)):
        for server in servers:
            command += [role, server.url]
    return Launch("router", (*command, *flags), port)


def vllms_router(prefill: Server, decode: Server) -> Launch:
    """Returns the launch of the vLLM project's router, which knows NIXL's handoffs."""
    port = free_port()
    python = str(ENGINES / "vllm" / "bin" / "python")
    command = [python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    return Launch("vllm-router", tuple(command), port)


def coordinator() -> Launch:
    """kvlink's own, for servers that are given its address."""
    port = free_port()
    command = (sys.executable, "-m", "kvlink", "coordinator", "--port", str(port))
    return Launch("coordinator", command, port, alive="")


def post(url: str, body: Mapping[str, Any], timeout_s: float = 120) -> tuple[int, dict[str, Any]]:
    """One JSON request: status and answer, also for errors. Raises OSError when nobody answers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
