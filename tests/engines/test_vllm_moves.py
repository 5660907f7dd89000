# SPDX-License-Identifier: Apache-2.0
"""Streams move between two real servers through kvlink's router, or lose their server: the tokens stay the same."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pair import Tokens, ask, prompt
from servers import ENGINES, Server, post, router, running
from streams import MODEL, Refused, Streamed, body_of, decoding, tell, two_servers

NUM_NEW = 200
SEEDED = {"temperature": 1.0, "seed": 7}
MOVES, KILL_EVERY = 200, 30
CLIENTS, PROMPTS = 4, 12

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[list[Server]]:
    with two_servers() as servers:
        yield servers


@pytest.fixture
def routed(two: list[Server]) -> Iterator[Server]:
    with running([router(two, two, "--migrate")]) as (server,):
        yield server


def whole(server: Server, tokens: Tokens, num_new: int = NUM_NEW, **how: Any) -> Tokens | None:
    """Returns the answer that one server gives alone. Afterwards it has nothing of it in its cache."""
    answer = ask(server.url, MODEL, tokens, num_new, ignore_eos=True, **how)
    assert post(f"{server.url}/reset_prefix_cache", {})[0] == 200
    return answer.tokens


@pytest.mark.parametrize("how", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [3, 700])
def test_a_stream_moves_while_it_decodes(
    two: list[Server], routed: Server, num_tokens: int, how: dict[str, Any]
) -> None:
    tokens = prompt(f"moved {num_tokens}", num_tokens)
    expected = whole(two[0], tokens, **how)
    streamed = Streamed()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(streamed.read, routed.url, "/v1/completions", body_of(tokens, NUM_NEW, **how))
        assert streamed.begun.wait(60)
        tell(routed, "drain", decoding(routed, two))
        reading.result()
    assert streamed.tokens == expected
    assert routed.metric("kvlink_router_moved_total") == 1
    assert len(streamed.names) == 1


def test_a_chat_moves(two: list[Server], routed: Server) -> None:
    messages = [
        {"role": "user", "content": " ".join(f"t{token}" for token in prompt("a chat that moves", 200))}
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    body |= {"skip_special_tokens": False, "stream_options": {"include_usage": True}}
    status, answer = post(f"{two[0].url}/v1/chat/completions", {**body, "stream_options": None})
    assert status == 200, answer
    streamed = Streamed()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(streamed.read, routed.url, "/v1/chat/completions", body)
        assert streamed.begun.wait(60)
        tell(routed, "drain", decoding(routed, two))
        reading.result()
    assert streamed.text == answer["choices"][0]["message"]["content"]
    assert streamed.last["usage"] == {name: answer["usage"][name] for name in streamed.last["usage"]}
    assert routed.metric("kvlink_router_moved_total") == 1
    assert len(streamed.names) == 1


@pytest.mark.parametrize(
    ("how", "end"), [({}, "kill"), (SEEDED, "kill"), ({}, "close")], ids=["greedy", "seeded", "SIGTERM"]
)
def test_a_server_ends_while_it_decodes(
    two: list[Server], routed: Server, how: dict[str, Any], end: str
) -> None:
    tokens = prompt("killed", 400)
    expected = whole(two[0], tokens, **how)
    streamed = Streamed()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(streamed.read, routed.url, "/v1/completions", body_of(tokens, NUM_NEW, **how))
        assert streamed.begun.wait(60)
        place = two.index(decoding(routed, two))
        getattr(two[place], end)()
        reading.result()
    two[place] = two[place].restarted().wait()
    assert streamed.tokens == expected
    assert routed.metric("kvlink_router_resumed_total") == 1


class _Clients:
    """Stream the same prompts in turn until they are stopped."""

    def __init__(self, url: str, expected: list[Tokens | None]) -> None:
        self.answered, self.refused, self.failed = 0, 0, list[str]()
        self._url, self._expected = url, expected
        self._numbers, self._stop = itertools.count(), threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._reading = [self._threads.submit(self._read) for _ in range(CLIENTS)]

    def _read(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers) % PROMPTS
            streamed = Streamed()
            try:
                streamed.read(
                    self._url, "/v1/completions", body_of(prompt(f"many {number}", 50 + 60 * number), NUM_NEW)
                )
            except Refused:
                self.refused += 1  # the only server was killed before the draining one was resumed
            except (OSError, AssertionError) as error:
                self.failed.append(f"{number}: {error!r}")
            else:
                self.answered += 1
                if streamed.tokens != self._expected[number]:
                    self.failed.append(f"{number}: other tokens")

    def stop(self) -> None:
        self._stop.set()
        self._threads.shutdown()
        for reading in self._reading:
            reading.result()


def test_many_moves_and_kills(two: list[Server], routed: Server) -> None:
    """Kills servers of both kinds: those that streams leave, and those that they move to."""
    expected = [whole(two[0], prompt(f"many {number}", 50 + 60 * number)) for number in range(PROMPTS)]
    clients = _Clients(routed.url, expected)
    chosen, kills, leaving = random.Random(1), 0, 0
    try:
        while (moved := routed.metric("kvlink_router_moved_total")) < MOVES:
            tell(routed, "resume", two[1 - leaving])
            tell(routed, "drain", two[leaving])
            if moved >= KILL_EVERY * (kills + 1):
                time.sleep(chosen.uniform(0.0, 0.5))
                place = (leaving, 1 - leaving)[kills % 2]
                two[place].kill()
                kills += 1
                tell(routed, "resume", two[leaving])
                two[place] = two[place].restarted().wait()
            leaving = 1 - leaving
            time.sleep(chosen.uniform(0.5, 2.0))
    finally:
        clients.stop()
    counts = {name: value for name, value in routed.samples().items() if value}
    print(f"{clients.answered} streams, {kills} kills, {clients.failed[:3]} failed or differ; {counts}")
    assert not clients.failed
    assert clients.refused == counts.get("kvlink_router_refused_total", 0)
    assert kills >= MOVES // KILL_EVERY - 1
