# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers that hand requests over, and the few lines of a router between them."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import ENGINES, LOGS, MODELS, Launch, Server, free_port, post, running

PYTHON = ENGINES / "sglang" / "bin" / "python"
HERE = Path(__file__).parent
PAGE, CHUNK, NEW_TOKENS = 16, 128, 24
LEASE_S = 8.0
"""Longer than a machine with more busy threads than cores takes for a first contact."""
ANSWER_S = 400.0
"""Longer than the last of a long queue waits on a loaded machine."""
BACKEND = ("--disaggregation-transfer-backend", "kvlink")
PREFILL = ("--disaggregation-mode", "prefill", *BACKEND)

_rooms = itertools.count(random.SystemRandom().getrandbits(60))


@dataclass
class Stack:
    """`decode` reads by cma, `decode_tcp` by tcp; both from `prefill`. `plain` does all by itself."""

    servers: list[Server]
    bootstrap_port: int

    prefill = property(lambda self: self.servers[0])
    decode = property(lambda self: self.servers[1])
    decode_tcp = property(lambda self: self.servers[2])
    plain = property(lambda self: self.servers[3])

    def expected(self, tokens: list[int], num_new: int = NEW_TOKENS) -> list[int]:
        """Returns the answer of the plain server."""
        status, answer = post(self.plain.url + "/generate", body(tokens, num_new))
        assert status == 200, answer
        return answer["output_ids"]

    def room(self) -> dict[str, Any]:
        """Returns the fields that a router adds to the request, the same for both servers."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_rooms),
        }

    def handed_off(
        self, tokens: list[int], decode: Server | None = None, num_new: int = NEW_TOKENS, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        """Decode's answer. Prefill gets the same request at the same time."""
        request = body(tokens, num_new) | self.room() | more
        prefill = threading.Thread(target=ask_and_forget, args=(self.prefill, request))
        prefill.start()
        answer = post((decode or self.decode).url + "/generate", request, ANSWER_S)
        prefill.join()
        return answer

    def idle(self) -> bool:
        """No server holds a page for a request."""
        return all(held(server) == 0 for server in self.servers)


def body(tokens: list[int], num_new: int = NEW_TOKENS) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True},
    }


def held(server: Server) -> int:
    """Tokens whose pages requests hold; what its prefix cache keeps does not count."""
    with urllib.request.urlopen(server.url + "/v1/loads", timeout=30) as answer:
        return sum(load["num_used_tokens"] for load in json.load(answer)["loads"])


def ask_and_forget(server: Server, request: dict[str, Any]) -> None:
    with suppress(OSError):
        post(server.url + "/generate", request, ANSWER_S)


def prompt(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed * 10_000 + length)
    return [chooser.randrange(512) for _ in range(length)]


def wait_for(condition: Any, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)


def sglang(name: str, *flags: str, **env: str) -> Launch:
    """Returns the launch of a server. Flags that are repeated override those below."""
    port = free_port()
    command = (
        *(str(PYTHON), "-W", "ignore", str(HERE / "sglang_server.py")),
        *("--host", "127.0.0.1", "--port", str(port), "--model-path", str(MODELS / "llama")),
        *("--skip-tokenizer-init", "--device", "cpu", "--dtype", "float32", "--skip-server-warmup"),
        *(
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--disable-overlap-schedule",
        ),
        "--sleep-on-idle",  # or each idle scheduler spins, and four of them keep a small machine from its work
        *("--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384"),
        *flags,
    )
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "KVLINK_LEASE_S": str(LEASE_S),
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "8",  # a machine that stalls for seconds is no dead prefill
    }
    return Launch(name, command, port, settings | env)


def decode_flags(bootstrap_port: int, retraction_backup: str = "none") -> tuple[str, ...]:
    """Returns the flags of a decode server whose prefill server has this bootstrap port."""
    return (
        *("--disaggregation-mode", "decode", *BACKEND),
        *("--disaggregation-decode-retraction-backup", retraction_backup),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    )


@contextmanager
def servers_of(launches: Iterable[Launch]) -> Iterator[list[Server]]:
    """Makes the models if need be, and runs servers until the end of the block."""
    subprocess.run([sys.executable, str(HERE / "models.py"), str(MODELS)], check=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    with running(launches) as servers:
        yield servers
