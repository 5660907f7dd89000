# SPDX-License-Identifier: Apache-2.0
"""Servers are replaced one after the other while clients ask: each drains on SIGTERM, and no request fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Answer, Tokens, ask, eventually, flags, prompt
from references import References, references_for
from servers import ENGINES, Launch, Server, router, running, vllm

_MODEL = "llama"
_CLIENTS, _PROMPTS = 2, 12
_DRAIN_S = 60.0

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    if not (ENGINES / "vllm" / ".made").exists():
        pytest.skip("no vLLM in build/engines; make test-engines makes it")
    known = references_for(_MODEL)
    known.learn(prompt(f"rolling {number}", 300) for number in range(_PROMPTS))
    yield known
    known.close()


def _launch(role: str) -> Launch:
    options = (*flags(_MODEL), "--shutdown-timeout", str(int(_DRAIN_S)))
    return vllm(f"{role}-rolling", _MODEL, kv_transfer("KVLinkConnector", lease_s=PATIENT_LEASE_S), options)


class _Clients:
    """Ask the same prompts in turn until they are stopped."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, Answer | Exception]] = []
        self._url, self._numbers, self._stop = url, count(), threading.Event()
        self._threads = ThreadPoolExecutor(_CLIENTS)
        self._asking = [self._threads.submit(self._ask) for _ in range(_CLIENTS)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers) % _PROMPTS
            try:
                answer: Answer | Exception = ask(self._url, _MODEL, prompt(f"rolling {number}", 300))
            except OSError as error:
                answer = error
            self.answers.append((number, answer))

    def stop(self) -> None:
        self._stop.set()
        self._threads.shutdown()
        for asking in self._asking:
            asking.result()


def _drained(routed: Server, server: Server) -> int | None:
    """Ends it as an operator does: the router first, and then the server alone, and no process of its group."""
    command = [sys.executable, "-m", "kvlink", "drain", server.url, "--router", str(routed.launch.port)]
    subprocess.run(command, check=True, timeout=120, stdout=sys.stderr)
    os.kill(server.pid, signal.SIGTERM)
    return server.exit_status(_DRAIN_S + 20)


def test_a_prefill_server_ends_when_decode_has_read(references: References) -> None:
    tokens = prompt("rolling 0", 300)
    with running([_launch("prefill"), _launch("decode")]) as (prefill, decode):
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        warm = ask(prefill.url, _MODEL, prompt("warm", 300), 1, kv_transfer_params=dict(wanted))
        assert ask(decode.url, _MODEL, prompt("warm", 300), 2, kv_transfer_params=warm.handoff).status == 200
        handed_off = ask(prefill.url, _MODEL, tokens, 1, kv_transfer_params=dict(wanted))
        loads = decode.metric("vllm:kvlink_transfer_seconds_count")
        os.kill(prefill.pid, signal.SIGTERM)
        answer = ask(decode.url, _MODEL, tokens, kv_transfer_params=handed_off.handoff)
        assert answer.tokens == references(tokens)
        assert decode.metric("vllm:kvlink_transfer_seconds_count") == loads + 1, "decode computed the prompt"
        assert prefill.exit_status(_DRAIN_S) == 0
        assert prefill.num_logged("requests were not read") == 0


def test_a_rolling_restart_fails_no_request(references: References) -> None:
    roles = ("prefill", "prefill", "decode", "decode")
    wanted: list[Tokens] = [references(prompt(f"rolling {number}", 300)) for number in range(_PROMPTS)]
    with (
        running(_launch(role) for role in roles) as servers,
        running([router(servers[:2], servers[2:])]) as (routed,),
    ):
        clients = _Clients(routed.url)
        try:
            for place, server in enumerate(servers):
                before = len(clients.answers)
                assert eventually(lambda before=before: len(clients.answers) >= before + 4, 120.0)
                assert _drained(routed, server) == 0, server.tail()
                servers[place] = server.restarted().wait()
            before = len(clients.answers)
            assert eventually(lambda: len(clients.answers) >= before + 8, 120.0)
        finally:
            clients.stop()
        failed = [
            (number, answer)
            for number, answer in clients.answers
            if isinstance(answer, Exception) or answer.tokens != wanted[number]
        ]
        counts = {name: value for name, value in routed.samples().items() if value}
        print(f"{len(clients.answers)} requests, {len(failed)} failed or differ; {counts}")
        assert not failed, failed[:3]
