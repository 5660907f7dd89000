# SPDX-License-Identifier: Apache-2.0
"""Replays conversations of a trace on two real servers in turn, with and without shared prefixes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from chats import MODEL, pool_flags
from first_token import Timed, spread, timed
from pair import Pair, Tokens, prompt
from servers import STEADY_MALLOC, Server, post, running, vllm
from sharing import computed, learn, pulled, results, sharing

from kvlink.benchmarks.workloads.traces import HASH_TOKENS, Request, read_trace

SCALE = 4
"""One token stands for so many of the trace."""
LARGEST = 4096
_BLOCKS = 400
_SPAN = 2
"""Prefixes are compared every 256 tokens, which are so many hashes of the scaled trace."""
_CLIENTS = 64
_SETTLE_S = 3.0


def conversations(requests: Sequence[Request], seconds: float) -> list[Request]:
    """Returns the requests before `seconds` of conversations that have several of them, none of them too long.

    The first hash of a prompt is that of the service's system prompt, and the second one tells conversations apart.
    """
    found: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        if request.at_s < seconds and len(request.prefixes) > 1:
            found[request.prefixes[1]].append(request)
    longest = (LARGEST - 1) * SCALE
    several = [
        turns
        for turns in found.values()
        if len(turns) > 1 and all(turn.prompt_tokens <= longest for turn in turns)
    ]
    return sorted((request for turns in several for request in turns), key=lambda request: request.at_s)


def tokens_of(request: Request) -> Tokens:
    """Returns the scaled prompt of a request."""
    tokens = [
        token for number in request.prefixes for token in prompt(f"hash {number}", HASH_TOKENS // SCALE)
    ]
    return tokens[: request.prompt_tokens // SCALE]


def elsewhere(requests: Sequence[Request]) -> list[int]:
    """Returns the numbers of the requests whose prefix the other of two servers has more of, by a kvlink span at least.

    Requests go to the two in turn, and nothing is evicted.
    """
    found = []
    held: tuple[set[int], set[int]] = (set(), set())
    for number, request in enumerate(requests):
        own, other = (
            next((n for n, one in enumerate(request.prefixes) if one not in server), len(request.prefixes))
            for server in (held[number % 2], held[1 - number % 2])
        )
        if other - own >= _SPAN:
            found.append(number)
        held[number % 2].update(request.prefixes)
    return found


def replays(trace: Path, seconds: float, speed: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each replay, without and with shared prefixes in alternation."""
    requests = conversations(read_trace(trace), seconds)
    prompts = [tokens_of(request) for request in requests]
    times = [(request.at_s - requests[0].at_s) / speed for request in requests]
    repeated = elsewhere(requests)
    first: list[Tokens] = []
    for _ in range(rounds):
        for shared in (False, True):
            with _two(shared) as servers:
                for server in servers:
                    assert post(f"{server.url}/reset_prefix_cache", {})[0] == 200
                time.sleep(_SETTLE_S)
                before = _counters(servers)
                answers = _replay(servers, prompts, times)
                time.sleep(_SETTLE_S)  # vLLM counts after the answer
                counted = _counters(servers) - before
            tokens = [answer.tokens for answer in answers]
            first = first or tokens
            took = [answer.first_ms for answer in answers]
            yield {
                "shared": shared,
                "requests": len(prompts),
                "tokens": sum(map(len, prompts)),
                "computed": int(counted["computed"]),
                "pulled": int(counted["pulled"]),
                "MiB": round(counted["bytes"] / (1 << 20)),
                **{name: int(counted[name]) for name in _RESULTS},
                "first_token": spread(took),
                "p90": round(quantiles(took, n=10, method="inclusive")[-1]),
                "repeated": len(repeated),
                "first_token_of_repeated": spread([took[number] for number in repeated]),
                "other_tokens": sum(one != other for one, other in zip(tokens, first, strict=True)),
            }


_RESULTS = ("found", "loaded", "computed_is_faster", "evicted")


def _counters(servers: Sequence[Server]) -> Counter[str]:
    found: Counter[str] = Counter()
    for server in servers:
        found["computed"] += computed(server)
        found["pulled"] += pulled(server)
        found["bytes"] += server.metric("vllm:kvlink_transfer_bytes_sum")
        for name in _RESULTS:
            found[name] += results(server, name)
    return found


@contextmanager
def _two(shared: bool) -> Iterator[list[Server]]:
    if shared:
        with sharing(_BLOCKS, LARGEST) as pair:
            yield [pair.prefill, pair.decode]
        return
    launches = [
        vllm(f"{name}-alone", MODEL, None, pool_flags(_BLOCKS, LARGEST), STEADY_MALLOC)
        for name in ("one", "other")
    ]
    with running(launches) as servers:
        for server in servers:
            learn(Pair(MODEL, "", *servers, 0, []), server)
        yield servers


def _replay(servers: Sequence[Server], prompts: Sequence[Tokens], times: Sequence[float]) -> list[Timed]:
    """Sends each prompt at its time, to the servers in turn."""
    with ThreadPoolExecutor(_CLIENTS) as clients:
        waiting = []
        began = time.monotonic()
        for number, (tokens, at_s) in enumerate(zip(prompts, times, strict=True)):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            server = servers[number % len(servers)]
            waiting.append(clients.submit(timed, server, MODEL, {"prompt": tokens}, 1))
        return [answer.result() for answer in waiting]
