# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers live through hostile clients and peers that do not fit, and rooms that failed are right again.

Everybody else gets the tokens that the same servers gave before, which test_sglang.py compares with a plain server's.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hostile_requests import NUM_NEW, TICKET_TEXT, WITHOUT_HANDOFF, At, Hostile, Manner
from servers import Server, free_port, post
from sglang_stack import (
    HERE,
    NEW_TOKENS,
    PREFILL,
    PYTHON,
    Stack,
    ask_and_forget,
    body,
    decode_flags,
    prompt,
    servers_of,
    sglang,
    wait_for,
)

WAIT_S = 30
"""The time that a request of these servers waits for its other part."""
SETTINGS = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAIT_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(WAIT_S),
}
ANSWER_S = 3 * WAIT_S
GIVEN_UP_S = 5
PROMPTS = [prompt(length, seed=40) for length in (1, 17, 200)]

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/engines sglang"),
]

ROOMS: dict[str, Any] = {
    "0": 0, "-1": -1, "2^63": 2**63, "2^64": 2**64, "a text": "7", "a list": [7], "null": None, "half": 1.5,
    "true": True,
}  # fmt: skip
HOSTS: dict[str, Any] = {
    "empty": "", "nowhere": "nowhere.invalid", "a surrogate": "\ud800", "a scheme": "http://[", "1 MB": "a" * 10**6,
    "a list": ["127.0.0.1"], "a number": 7,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    **{f"bootstrap_room {name}": {"bootstrap_room": room} for name, room in ROOMS.items()},
    **{f"bootstrap_host {name}": {"bootstrap_host": host} for name, host in HOSTS.items()},
    "bootstrap_port closed": {"bootstrap_port": 1},
    "bootstrap_port -1": {"bootstrap_port": -1},
    "bootstrap_port a text": {"bootstrap_port": "x"},
    "rid of 100 KB": {"rid": "x" * 100_000},
    "rid with the text of a ticket": {"rid": "a" + TICKET_TEXT},
    "rid with a surrogate": {"rid": "\ud800"},
    "n of 2": {"sampling_params": {"n": 2, "max_new_tokens": 4}},
    "n of a list": {"sampling_params": {"n": [2], "max_new_tokens": 4}},
    "a rank that does not exist": {"disagg_prefill_dp_rank": 9},
    "a rank of -1": {"disagg_prefill_dp_rank": -1},
    "no tokens": {"input_ids": []},
}
"""Fields of SGLang's own API that no router sends. Tokens beyond the vocabulary are not among them: by themselves, they
end every server of SGLang on a CPU."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    port = free_port()
    launches = [
        sglang("sglang-hostile-prefill", *PREFILL, "--disaggregation-bootstrap-port", str(port), **SETTINGS),
        sglang("sglang-hostile-decode", *decode_flags(port), **SETTINGS),
    ]
    with servers_of(launches) as servers:
        yield Stack(servers, port)


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[list[int]]:
    """The answers of the servers before anything hostile came, each the same twice."""
    answers = [[answer_of(stack, tokens) for tokens in PROMPTS] for _ in range(2)]
    assert answers[0] == answers[1]
    return answers[0]


@pytest.fixture(scope="module")
def strangers(stack: Stack) -> Iterator[subprocess.Popen[str]]:
    command = [str(PYTHON), str(HERE / "sglang_strangers.py"), str(stack.bootstrap_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def answer_of(stack: Stack, tokens: list[int]) -> list[int]:
    status, answer = stack.handed_off(tokens)
    assert status == 200, answer
    return list(answer["output_ids"])


def check_others(stack: Stack, expected: list[list[int]]) -> None:
    """Both servers live, and answer right; nothing is held."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(lambda tokens: answer_of(stack, tokens), PROMPTS)) == expected
    wait_for(stack.idle, 2 * ANSWER_S)


def send(server: Server, one: Hostile) -> bytes:
    """Sends a hostile request of the OpenAI API. Returns what is answered, if anything."""
    host, port = server.launch.host, server.launch.port
    answer = b""
    with suppress(OSError), socket.create_connection((host, port), timeout=10) as client:
        client.settimeout(ANSWER_S)
        client.sendall(one.wire(f"{host}:{port}", "llama", PROMPTS[1]))
        while one.manner is not Manner.GONE and (part := client.recv(65536)):
            answer += part
            if one.manner is Manner.CUT:
                break
    return answer


def test_hostile_requests(stack: Stack, expected: list[list[int]]) -> None:
    """The requests of hostile_requests.py, to prefill and to decode. None has a room, so that none may be answered."""
    for one in WITHOUT_HANDOFF:
        for server in (stack.prefill,) if one.at is At.PREFILL else (stack.prefill, stack.decode):
            with ThreadPoolExecutor(one.copies) as clients:
                for answer in clients.map(lambda _, to=server, one=one: send(to, one), range(one.copies)):
                    assert b" 500 " not in answer.partition(b"\r\n")[0] or b"Traceback" not in answer, (
                        one.name
                    )
    check_others(stack, expected)


def test_hostile_fields(stack: Stack, expected: list[list[int]]) -> None:
    """Each to one server alone, and to both: the other part of a request may be as hostile, or absent."""
    requests = [body(PROMPTS[1], NUM_NEW) | stack.room() | fields for fields in FIELDS.values()]
    with ThreadPoolExecutor(16) as clients:
        for request in requests:
            for server in (stack.prefill, stack.decode):
                clients.submit(ask_and_forget, server, request)
    check_others(stack, expected)


def test_samples_that_share_a_room_are_refused(stack: Stack, expected: list[list[int]]) -> None:
    request = body(PROMPTS[1]) | stack.room()
    request["sampling_params"]["n"] = 2
    with ThreadPoolExecutor(2) as clients:
        answers = list(
            clients.map(
                lambda one: post(one.url + "/generate", request, ANSWER_S), (stack.prefill, stack.decode)
            )
        )
    assert [status for status, _ in answers] == [500, 500]
    assert "n above 1" in str(answers)
    check_others(stack, expected)


def test_peers_that_do_not_fit(
    stack: Stack, expected: list[list[int]], strangers: subprocess.Popen[str]
) -> None:
    """A request whose prefill server is a stranger's fails. One of another server at the same time is right."""
    assert strangers.stdout is not None
    ports = json.loads(strangers.stdout.readline())
    assert len(ports) >= 10
    requests = [body(PROMPTS[1]) | stack.room() | {"bootstrap_port": port} for port in ports.values()]
    with ThreadPoolExecutor(len(ports)) as clients:
        answers = clients.map(lambda one: post(stack.decode.url + "/generate", one, 2 * ANSWER_S), requests)
        check_others_meanwhile = [answer_of(stack, tokens) for tokens in PROMPTS]
        statuses = dict(zip(ports, answers, strict=True))
    assert check_others_meanwhile == expected
    assert {name: status for name, (status, _) in statuses.items() if status < 400} == {}
    assert "groups of caches" in str(statuses["other caches"])
    assert "version 9" in str(statuses["a chunk of another version"])
    check_others(stack, expected)


def test_hostile_messages(stack: Stack, expected: list[list[int]], strangers: subprocess.Popen[str]) -> None:
    assert strangers.stdin is not None
    assert strangers.stdout is not None
    strangers.stdin.write("500\n")
    strangers.stdin.flush()
    assert int(strangers.stdout.readline()) >= 500
    check_others(stack, expected)


@pytest.mark.parametrize("end", ["prefill", "decode", "prefill alone"])
def test_a_room_whose_attempt_has_failed_is_right_again(
    stack: Stack, expected: list[list[int]], end: str
) -> None:
    """A router that keeps the room of a request for all its attempts."""
    room = stack.room()
    server = stack.decode if end == "decode" else stack.prefill
    for attempt in range(3):
        rid = f"again-{end}-{attempt}"
        request = body(prompt(2500, seed=41 + attempt), 200) | room | {"rid": rid}
        with ThreadPoolExecutor(2) as clients:
            for to in (stack.prefill,) if end == "prefill alone" else (stack.prefill, stack.decode):
                clients.submit(ask_and_forget, to, request)
            time.sleep(0.3)
            post(server.url + "/abort_request", {"rid": rid})
        again = body(PROMPTS[2], NEW_TOKENS) | room
        with ThreadPoolExecutor(1) as clients:
            clients.submit(ask_and_forget, stack.prefill, again)
            status, answer = post(stack.decode.url + "/generate", again, ANSWER_S)
        assert (status, answer.get("output_ids") if status == 200 else answer) == (200, expected[2])
    check_others(stack, expected)
