# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server with a connector between them, and the requests of clients and routers."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from servers import Server, post

VOCABULARY = 512
NUM_NEW = 24
CHUNK_TOKENS = 1024
# Small pools: one prompt of 8,192 tokens fits, a few of 4,000 overwrite everything. Blocks have 128 tokens, those of
# MLA 16; windows have blocks of their own.
_POOL_BLOCKS = {
    "llama": 96,
    "qwen3": 96,
    "gemma3": 192,
    "deepseek": 640,
    "granite-hybrid": 700,
    "qwen3-next": 700,
}
_DTYPES = {"qwen3-next": "bfloat16"}
_OVERWRITING = 4
_SETTLE_S = 30.0
_LOADS = {
    "KVLinkConnector": "vllm:kvlink_transfer_seconds_count",
    "NixlConnector": "vllm:nixl_xfer_time_seconds_count",
}
_ASK_FOR_A_HANDOFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Tokens = list[int]


def prompt(name: str, num_tokens: int) -> Tokens:
    """Random tokens, the same for the same name."""
    chosen = random.Random(name)
    return [chosen.randrange(VOCABULARY) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Answer:
    """Holds the client's answer; `tokens` is None unless the status is 200."""

    status: int
    tokens: Tokens | None
    body: Mapping[str, Any]

    @property
    def handoff(self) -> Any:
        """Returns the part of a prefill server's answer that is carried to decode."""
        return self.body.get("kv_transfer_params")


@dataclass
class Pair:
    """Both servers; whoever kills one replaces it here."""

    model: str
    connector: str
    prefill: Server
    decode: Server
    lease_s: float
    coordinators: list[Server]
    """One or none."""

    def ask(self, server: Server, tokens: Sequence[int], num_new: int = NUM_NEW, **extra: Any) -> Answer:
        """One greedy completion."""
        return ask(server.url, self.model, tokens, num_new, **extra)

    def hand_off(self, tokens: Sequence[int], server: Server | None = None) -> Any:
        """Prefills, and returns what decode needs; the blocks wait at the prefill server, or the one that is given."""
        params = dict(_ASK_FOR_A_HANDOFF)
        answer = self.ask(server or self.prefill, tokens, 1, kv_transfer_params=params)
        assert answer.status == 200, answer.body
        assert answer.handoff, f"no handoff in {answer.body}"
        return answer.handoff

    def continued(self, tokens: Sequence[int], handoff: Any, num_new: int = NUM_NEW) -> Answer:
        """Decodes with a handoff, whether it belongs to these tokens or not."""
        return self.ask(self.decode, tokens, num_new, kv_transfer_params=handoff)

    def forget(self) -> None:
        """Nothing is left in either prefix cache, so that every byte has to travel. Blocks in use would stay: those of
        a handoff that failed do until their lease ends."""
        assert self.settles(self.lease_s + _SETTLE_S), "blocks of an earlier request are still held"
        for server in (self.prefill, self.decode):
            status, answer = post(f"{server.url}/reset_prefix_cache", {})
            assert status == 200, answer

    def overwrite(self, server: Server, name: str) -> None:
        """Every free block of the server's pool gets other contents."""
        for part in range(_OVERWRITING):
            assert self.ask(server, prompt(f"{name}, overwriting {part}", 4000), 1).status == 200

    def loads(self) -> float:
        """Handoffs whose bytes decode has received, and not computed after all."""
        return self.decode.metric(_LOADS[self.connector])

    def usage(self, server: Server) -> float:
        """Fraction of its blocks in use. A small request first: the gauge does not change while nothing runs."""
        assert self.ask(server, prompt("usage", 3), 2).status == 200
        return server.metric("vllm:kv_cache_usage_perc")

    def settles(self, within_s: float) -> bool:
        """Whether both pools are empty again before long."""
        return eventually(
            lambda: not any(self.usage(server) for server in (self.prefill, self.decode)), within_s
        )


def flags(model: str, prefix_caching: bool | None = None) -> tuple[str, ...]:
    """Returns the flags of every server of this model, whatever its role. `prefix_caching` overrides the usual."""
    blocks: tuple[str, ...] = ("--num-gpu-blocks-override", str(_POOL_BLOCKS[model]))
    if model in ("granite-hybrid", "qwen3-next"):  # Mamba-2's prefix caching fails in vLLM for CPUs itself
        blocks += ("--no-enable-prefix-caching", "--dtype", _DTYPES.get(model, "float32"))
    # On a CPU with AMX vLLM would choose a backend for MLA that does not take float32.
    backend = ("--attention-backend", "CPU_MLA") if model == "deepseek" else ()
    if prefix_caching is not None:
        blocks += ("--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",)
    return (*blocks, *backend, "--max-num-batched-tokens", str(CHUNK_TOKENS))


def ask(url: str, model: str, tokens: Sequence[int], num_new: int = NUM_NEW, **extra: Any) -> Answer:
    """One greedy completion, at a server or a router."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": num_new,
        "temperature": 0,
        "return_token_ids": True,
    }
    status, answer = post(f"{url}/v1/completions", body | extra)
    return Answer(status, answer["choices"][0]["token_ids"] if status == 200 else None, answer)


def stream(
    url: str, model: str, tokens: Sequence[int], hang_up_after: int | None = None, **extra: Any
) -> list[Tokens]:
    """A streamed completion, event by event. `hang_up_after`: events to wait for before the client goes away."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
    }
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body | extra), {"Content-Type": "application/json"}
        )
        events: list[Tokens] = []
        if hang_up_after == 0:
            return events
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            output = line.decode().strip().removeprefix("data: ")
            if output == "[DONE]":
                return events
            if output and (choices := json.loads(output)["choices"]):
                events.append(choices[0]["token_ids"])
            if hang_up_after is not None and len(events) >= hang_up_after:
                return events
        raise AssertionError(f"the stream broke off after {events}")
    finally:
        connection.close()


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
