# SPDX-License-Identifier: Apache-2.0
"""Servers that share their prefixes through a coordinator, and what they count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from chats import MODEL, pool_flags
from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Pair, eventually, prompt
from servers import STEADY_MALLOC, Server, coordinator, post, running, vllm

from kvlink.control import CoordinatorClient

WITHIN_S = 20.0
_LENGTHS = (300, 350, 800, 400, 900, 500, 1000)
"""A server learns its rate from prompts of these lengths. The first ones are slow."""


@contextmanager
def sharing(num_blocks: int, largest: int = 2048) -> Iterator[Pair]:
    """Yields two servers that know the time of their prefills. `largest` is the number of tokens of a request."""
    with running([coordinator()]) as (directory,):
        config = kv_transfer(
            "KVLinkConnector",
            lease_s=PATIENT_LEASE_S,
            share_prefixes=True,
            coordinator=f"127.0.0.1:{directory.launch.port}",
        )
        launches = [
            vllm(f"{name}-shares", MODEL, config, pool_flags(num_blocks, largest), STEADY_MALLOC)
            for name in ("one", "other")
        ]
        with running(launches) as (one, other):
            pair = Pair(MODEL, "KVLinkConnector", one, other, PATIENT_LEASE_S, [directory])
            for server in (one, other):
                learn(pair, server)
            # A prefix is published by the step after its request.
            assert eventually(lambda: published(directory) == 2 * len(_LENGTHS), WITHIN_S)
            yield pair


def learn(pair: Pair, server: Server) -> None:
    """Lets a server compute prompts that no other has, so that it knows its rate."""
    for length in _LENGTHS:
        assert pair.ask(server, prompt(f"{server.url} {length}", length), 1).status == 200


def forget(pair: Pair) -> None:
    """Empties both prefix caches. What is published has ended then."""
    for server in (pair.prefill, pair.decode):
        assert post(f"{server.url}/reset_prefix_cache", {}) == (200, {"success": True})
    assert eventually(lambda: published(pair.coordinators[0]) == 0, WITHIN_S)


def published(directory: Server) -> int:
    """Returns how many prefixes the coordinator knows."""

    async def ask() -> int:
        async with CoordinatorClient(f"127.0.0.1:{directory.launch.port}") as client:
            return (await client.status()).prefixes

    return asyncio.run(ask())


def labelled(server: Server, metric: str, label: str) -> float:
    """Returns one of a server's counters with a label."""
    samples = server.samples().items()
    return sum(value for name, value in samples if name.startswith(f"{metric}{{") and label in name)


def results(server: Server, result: str) -> float:
    """Returns a server's count of prefixes with this result."""
    return labelled(server, "vllm:kvlink_turns_total", f'result="{result}"')


def computed(server: Server) -> float:
    """Returns the tokens of prompts that a server has computed."""
    return labelled(server, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')


def pulled(server: Server) -> float:
    """Returns the tokens of prompts that a server has pulled."""
    return labelled(server, "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')
