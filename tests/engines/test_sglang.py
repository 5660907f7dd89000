# SPDX-License-Identifier: Apache-2.0
"""Two real SGLang servers hand requests over through kvlink; greedy tokens equal a plain server's.

`.ci/engines sglang` makes the environment. The router is the few lines of `Stack.handed_off`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import free_port, post, running
from sglang_stack import (
    CHUNK,
    LEASE_S,
    PAGE,
    PREFILL,
    PYTHON,
    Stack,
    ask_and_forget,
    body,
    decode_flags,
    held,
    prompt,
    servers_of,
    sglang,
    wait_for,
)

LENGTHS = {
    "one": 1,
    "page": PAGE,
    "page-and-one": PAGE + 1,
    "chunk": CHUNK,
    "three-chunks": 300,
    "hundreds": 700,
}

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/engines sglang"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    bootstrap_port = free_port()
    pair = ("--disaggregation-bootstrap-port", str(bootstrap_port))
    launches = [
        sglang("sglang-prefill", *PREFILL, *pair),
        sglang("sglang-decode", *decode_flags(bootstrap_port)),
        sglang("sglang-decode-tcp", *decode_flags(bootstrap_port), KVLINK_TRANSPORTS="tcp"),
        sglang("sglang-plain"),
    ]
    with servers_of(launches) as servers:
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
