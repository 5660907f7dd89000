# SPDX-License-Identifier: Apache-2.0
"""Two real SGLang servers hand requests over through kvlink; greedy tokens equal a plain server's.

`.ci/engines sglang` makes the environment. The router is the few lines of `Stack.handed_off`.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import ENGINES, LOGS, MODELS, Launch, Server, free_port, post, running

PYTHON = ENGINES / "sglang" / "bin" / "python"
HERE = Path(__file__).parent
PAGE, CHUNK, NEW_TOKENS = 16, 128, 24
LEASE_S = 8.0
"""Longer than a machine with more busy threads than cores takes for a first contact."""
LENGTHS = {
    "one": 1,
    "page": PAGE,
    "page-and-one": PAGE + 1,
    "chunk": CHUNK,
    "three-chunks": 300,
    "hundreds": 700,
}
BACKEND = ("--disaggregation-transfer-backend", "kvlink")
PREFILL = ("--disaggregation-mode", "prefill", *BACKEND)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/engines sglang"),
]

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

    def expected(self, tokens: list[int]) -> list[int]:
        """Returns the answer of the plain server."""
        status, answer = post(self.plain.url + "/generate", body(tokens))
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
        self, tokens: list[int], decode: Server | None = None, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        """Decode's answer. Prefill gets the same request at the same time."""
        request = body(tokens) | self.room() | more
        prefill = threading.Thread(target=ask_and_forget, args=(self.prefill, request))
        prefill.start()
        answer = post((decode or self.decode).url + "/generate", request)
        prefill.join()
        return answer

    def idle(self) -> bool:
        """No server holds a page for a request."""
        return all(held(server) == 0 for server in self.servers)


def body(tokens: list[int]) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }


def held(server: Server) -> int:
    """Tokens whose pages requests hold; what its prefix cache keeps does not count."""
    with urllib.request.urlopen(server.url + "/v1/loads", timeout=30) as answer:
        return sum(load["num_used_tokens"] for load in json.load(answer)["loads"])


def ask_and_forget(server: Server, request: dict[str, Any]) -> None:
    with suppress(OSError):
        post(server.url + "/generate", request)


def prompt(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed * 10_000 + length)
    return [chooser.randrange(512) for _ in range(length)]


def wait_for(condition: Any, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)


def sglang(name: str, *flags: str, **env: str) -> Launch:
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


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    subprocess.run([sys.executable, str(HERE / "models.py"), str(MODELS)], check=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    bootstrap_port = free_port()
    pair = ("--disaggregation-bootstrap-port", str(bootstrap_port))
    decode = (
        "--disaggregation-mode",
        "decode",
        "--disaggregation-decode-retraction-backup",
        "none",
        *BACKEND,
        *pair,
    )
    launches = [
        sglang("sglang-prefill", *PREFILL, *pair),
        sglang("sglang-decode", *decode),
        sglang("sglang-decode-tcp", *decode, KVLINK_TRANSPORTS="tcp"),
        sglang("sglang-plain"),
    ]
    with running(launches) as servers:
        yield Stack(servers, bootstrap_port)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_tokens_equal_the_plain_servers(stack: Stack, length: int) -> None:
    tokens = prompt(length)
    expected = stack.expected(tokens)
    for decode in (stack.decode, stack.decode_tcp):
        status, answer = stack.handed_off(tokens, decode)
        assert (status, answer["output_ids"]) == (200, expected)
    wait_for(stack.idle)


def test_each_decode_says_over_what_it_reads(stack: Stack) -> None:
    stack.handed_off(prompt(20), stack.decode)
    stack.handed_off(prompt(20), stack.decode_tcp)
    assert stack.decode.num_logged("/0 over cma") == 1
    assert stack.decode_tcp.num_logged("/0 over tcp") == 1


def test_requests_at_the_same_time_keep_apart(stack: Stack) -> None:
    prompts = [prompt(40 + 60 * number, seed=1) for number in range(8)]
    expected = [stack.expected(tokens) for tokens in prompts]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(stack.handed_off, prompts))
    assert [answer["output_ids"] for _, answer in answers] == expected
    wait_for(stack.idle)


def test_a_prefix_that_prefill_has_cached_is_handed_off_too(stack: Stack) -> None:
    shared = prompt(200, seed=2)
    for tail in (5, 40):
        tokens = shared + prompt(tail, seed=3)
        assert stack.handed_off(tokens)[1]["output_ids"] == stack.expected(tokens)
    wait_for(stack.idle)


def test_log_probabilities_come_along(stack: Stack) -> None:
    tokens = prompt(50, seed=4)
    request = body(tokens) | {"return_logprob": True}
    _, plain = post(stack.plain.url + "/generate", request)
    _, answer = stack.handed_off(tokens, return_logprob=True)
    for (ours, token, _), (theirs, expected, _) in zip(
        answer["meta_info"]["output_token_logprobs"], plain["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert token == expected
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_gives_all_pages_back(stack: Stack, who: str) -> None:
    for pause_s in (0.0, 0.2, 0.6):
        rid = f"abort-{who}-{pause_s}"
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(stack.handed_off, prompt(1500, seed=5), rid=rid)
            time.sleep(pause_s)
            post(getattr(stack, who).url + "/abort_request", {"rid": rid})
            answer.result()
        wait_for(stack.idle)
    tokens = prompt(60, seed=6)
    assert stack.handed_off(tokens)[1]["output_ids"] == stack.expected(tokens)


def test_decode_that_dies_costs_prefill_no_more_than_a_lease(stack: Stack) -> None:
    request = body(prompt(3000, seed=7)) | stack.room()
    batches = stack.prefill.num_logged("Prefill batch")
    with ThreadPoolExecutor(2) as clients:
        answer = clients.submit(post, stack.prefill.url + "/generate", request)
        clients.submit(ask_and_forget, stack.decode_tcp, request)
        wait_for(lambda: stack.prefill.num_logged("Prefill batch") > batches)
        stack.decode_tcp.kill()
        status, text = answer.result()
    assert status >= 400, text
    wait_for(lambda: held(stack.prefill) == 0, 3 * LEASE_S)
    stack.servers[2] = stack.decode_tcp.restarted().wait()
    tokens = prompt(100, seed=8)
    assert stack.handed_off(tokens, stack.decode_tcp)[1]["output_ids"] == stack.expected(tokens)


def test_prefill_that_dies_fails_the_request_and_is_found_again(stack: Stack) -> None:
    request = body(prompt(3000, seed=9)) | stack.room()
    batches = stack.prefill.num_logged("Prefill batch")
    with ThreadPoolExecutor(2) as clients:
        answer = clients.submit(post, stack.decode.url + "/generate", request)
        clients.submit(ask_and_forget, stack.prefill, request)
        wait_for(lambda: stack.prefill.num_logged("Prefill batch") > batches)
        stack.prefill.kill()
        status, text = answer.result()
    assert status == 500, text
    wait_for(lambda: held(stack.decode) == 0)
    stack.servers[0] = stack.prefill.restarted().wait()
    tokens = prompt(100, seed=10)
    for decode in (stack.decode, stack.decode_tcp):
        assert stack.handed_off(tokens, decode)[1]["output_ids"] == stack.expected(tokens)
    wait_for(stack.idle)


@pytest.mark.parametrize("seeds", [(11, 12), (13, 13)], ids=["two-prompts", "a-retry"])
def test_one_room_at_two_prefill_servers(stack: Stack, seeds: tuple[int, int]) -> None:
    """Each client gets the tokens of its prompt, or an error within seconds. The servers go on."""
    port = free_port()
    other = (*PREFILL, "--disaggregation-bootstrap-port", str(port))
    prompts = [prompt(700, seed=seed) for seed in seeds]
    expected = [stack.expected(tokens) for tokens in prompts]
    with running([sglang("sglang-prefill-2", *other)]) as (second,):
        room = stack.room()
        requests = [body(prompts[0]) | room, body(prompts[1]) | room | {"bootstrap_port": port}]
        with ThreadPoolExecutor(4) as clients:
            for server, request in zip((stack.prefill, second), requests, strict=True):
                clients.submit(ask_and_forget, server, request)
            began = time.monotonic()
            answers = list(clients.map(lambda one: post(stack.decode.url + "/generate", one), requests))
            took_s = time.monotonic() - began
            # Prefill's leg of the refused one waits for decode until its client goes.
            post(second.url + "/abort_request", {"abort_all": True})
            post(stack.prefill.url + "/abort_request", {"abort_all": True})
    statuses = sorted(status for status, _ in answers)
    assert statuses == [200, 500], answers
    for (status, answer), tokens in zip(answers, expected, strict=True):
        assert status != 200 or answer["output_ids"] == tokens
    assert took_s < 30
    tokens = prompt(60, seed=14)
    assert stack.handed_off(tokens)[1]["output_ids"] == stack.expected(tokens)
    wait_for(stack.idle)
