# SPDX-License-Identifier: Apache-2.0
"""`/pause` on real servers answers after a bounded time, and requests that waited meanwhile get the right tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from pair import Answer, Pair, Tokens, eventually, prompt
from references import References
from servers import Server, post

LEASE_S = 6
STILL_S = 10
"""Renewals go on for so long after decode's last progress, see renewals.py."""
SLACK_S = 10.0
LENGTH = 400

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.pairs({"model": "llama", "policy": "fail", "lease_s": LEASE_S}),
]


@pytest.fixture(autouse=True)
def resumed(pair: Pair) -> Iterator[None]:
    """Servers run before and after a test, with nothing in their caches."""
    pair.forget()
    yield
    for server in (pair.prefill, pair.decode):
        assert post(f"{server.url}/resume", {})[0] == 200
    assert pair.settles(LEASE_S + SLACK_S)


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def pause(server: Server, mode: str) -> tuple[int, float]:
    """Returns the status and the seconds that it took."""
    began = time.monotonic()
    status, _ = post(f"{server.url}/pause?mode={mode}", {}, timeout_s=60)
    return status, time.monotonic() - began


def waiting_at(
    clients: ThreadPoolExecutor, pair: Pair, server: Server, tokens: Tokens, handoff: Any
) -> Future[Answer]:
    """Sends a request to a paused server. Returns once it waits there."""

    asked = clients.submit(lambda: pair.ask(server, tokens, kv_transfer_params=handoff))
    time.sleep(1)  # the metrics of a paused engine do not change
    assert not asked.done()
    return asked


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_prefill_can_be_paused_while_a_paused_decode_holds_a_handoff(
    pair: Pair, references: References, clients: ThreadPoolExecutor, mode: str
) -> None:
    tokens = prompt(f"paused at decode, {mode}", LENGTH)
    references(tokens)
    handoff = pair.hand_off(tokens)
    assert pause(pair.decode, "keep")[0] == 200
    waiting = waiting_at(clients, pair, pair.decode, tokens, handoff)
    status, took_s = pause(pair.prefill, mode)
    print(f"\n/pause?mode={mode} at prefill took {took_s:.1f} s")
    assert status == 200
    assert took_s < max(LEASE_S, STILL_S) + LEASE_S + SLACK_S
    assert post(f"{pair.decode.url}/resume", {})[0] == 200
    answer = waiting.result()
    assert (answer.status, answer.tokens) == (200, references(tokens))
    assert counted(pair.decode, "not_renewed")


def test_servers_that_hold_handoffs_of_each_other_can_be_paused(
    pair: Pair, references: References, clients: ThreadPoolExecutor
) -> None:
    """Each steps, because the other may read from it."""
    sides = {"a": (pair.prefill, pair.decode), "b": (pair.decode, pair.prefill)}
    tokens = {name: prompt(f"each other, {name}", LENGTH) for name in sides}
    for each in tokens.values():
        references(each)
    handoffs = {name: pair.hand_off(tokens[name], source) for name, (source, _) in sides.items()}
    pauses = [clients.submit(pause, server, "keep") for server in (pair.prefill, pair.decode)]
    time.sleep(0.5)
    waiting = {
        name: waiting_at(clients, pair, reader, tokens[name], handoffs[name])
        for name, (_, reader) in sides.items()
    }
    for status, took_s in (each.result() for each in pauses):
        print(f"\n/pause?mode=keep took {took_s:.1f} s")
        assert status == 200
        assert took_s < max(LEASE_S, STILL_S) + LEASE_S + SLACK_S
    for server in (pair.prefill, pair.decode):
        assert post(f"{server.url}/resume", {})[0] == 200
    for name, asked in waiting.items():
        answer = asked.result()
        assert (answer.status, answer.tokens) == (200, references(tokens[name]))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_without_a_reader_a_pause_waits_for_the_lease(pair: Pair, mode: str) -> None:
    pair.hand_off(prompt(f"nobody reads, {mode}", LENGTH))
    status, took_s = pause(pair.prefill, mode)
    print(f"\n/pause?mode={mode} without a reader took {took_s:.1f} s")
    assert status == 200
    assert took_s < LEASE_S + SLACK_S


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_reset_ends_the_leases_of_a_pause_that_waits(
    pair: Pair, clients: ThreadPoolExecutor, mode: str
) -> None:
    pair.hand_off(prompt(f"reset while it pauses, {mode}", LENGTH))
    paused = clients.submit(pause, pair.prefill, mode)
    time.sleep(0.5)
    assert not paused.done()
    assert post(f"{pair.prefill.url}/reset_prefix_cache?reset_external=true", {})[0] == 200
    status, took_s = paused.result()
    print(f"\n/pause?mode={mode} with a reset took {took_s:.1f} s")
    assert status == 200
    assert took_s < LEASE_S


def test_a_pause_of_decode_releases_what_waits_there(
    pair: Pair, references: References, clients: ThreadPoolExecutor
) -> None:
    """Its cache is cleared, so what prefill computed before is not used after."""
    tokens = prompt("given back by the pause", LENGTH)
    expected = references(tokens)
    assert pause(pair.decode, "keep")[0] == 200
    waiting = waiting_at(clients, pair, pair.decode, tokens, pair.hand_off(tokens))
    loads = pair.loads()
    assert pause(pair.decode, "keep")[0] == 200
    status, took_s = pause(pair.prefill, "abort")
    print(f"\n/pause at prefill after decode's second took {took_s:.1f} s")
    assert (status, took_s < LEASE_S / 2) == (200, True)
    assert post(f"{pair.decode.url}/resume", {})[0] == 200
    answer = waiting.result()
    assert (answer.status, answer.tokens, pair.loads()) == (200, expected, loads)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_of_decode_in_the_middle_of_an_answer(
    pair: Pair, references: References, clients: ThreadPoolExecutor, mode: str
) -> None:
    tokens = prompt(f"paused in an answer, {mode}", LENGTH)
    references(tokens)
    handoff = pair.hand_off(tokens)
    asked = clients.submit(lambda: pair.continued(tokens, handoff, 300))
    assert eventually(lambda: pair.decode.metric("vllm:num_requests_running") > 0, 30)
    status, took_s = pause(pair.decode, mode)
    print(f"\n/pause?mode={mode} at decode took {took_s:.1f} s")
    assert status == 200
    assert post(f"{pair.decode.url}/resume", {})[0] == 200
    answer = asked.result()
    assert answer.status == 200
    assert answer.tokens is not None
    assert answer.tokens[:24] == references(tokens)[: len(answer.tokens)]
    print(f"the answer has {len(answer.tokens)} of 300 tokens")


def counted(server: Server, reason: str) -> bool:
    """Returns whether the server has counted an unused handoff with this reason, before long."""
    sample = f'reason="{reason}"'
    return eventually(
        lambda: any(sample in name and value > 0 for name, value in server.samples().items()), 10
    )
