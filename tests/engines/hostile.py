# SPDX-License-Identifier: Apache-2.0
"""Hostile ids and handoffs between vLLM's own schedulers, without a model: `hostile.py MODEL [EXAMPLES] [SEED]`.

Runs in vLLM's environment. Before each step computes a token, all tokens before it must have the cache that belongs to
them, and every answer must be that of its prompt, whatever the other requests are. Prints one JSON object: how many
requests decode answered, and the counts of both servers' statistics.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import vllm.distributed.parallel_state as parallel_state
from chatting import Checking
from stepping import Side, sampled_after, until
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from kvlink.integrations.vllm.wire.handoff import KEY, Handoff

os.environ["KVLINK_TICKET_KEYS"] = "none"  # or what is changed would be refused as forged, and not parsed

Params = dict[str, Any]

IDS = ["r", "x" * 513, "y" * 100_000, "S1ZUM" + "A" * 95, "\ud800", "a\0\n", "é" * 300, "0_n", "kvlink-id-"]
NUMBERS = [-1, 0, 1, 3, 8, 15, 16, 17, 32, 202, 2**31 - 1, 2**32 - 1, 2**64]
VALUES = [None, True, 0, 1.5, "", "\ud800", "x", [], {}, [[]], {"a": 1}, ["w", "1", "h:1"]]
FIELDS = ["ticket", "block_tokens", "owners", "groups", "prompt", "more"]
KEYS = [
    KEY,
    "kvlink_stream",
    "kvlink_answer_of",
    "kvlink_traceparent",
    "do_remote_prefill",
    "do_remote_decode",
]


def of_another_server(change: Callable[[Handoff], Handoff]) -> Callable[[Params], Any]:
    def changed(params: Params) -> Params:
        try:
            return params | {KEY: change(Handoff.from_params(params)).to_params()}
        except Exception:  # no server can send it
            return params

    return changed


def mutation(draw: random.Random) -> Callable[[Params], Any]:
    """Returns what becomes of prefill's parameters before decode gets them; often nothing."""
    number, value, key, field = (draw.choice(each) for each in (NUMBERS, VALUES, KEYS, FIELDS))
    owner = [
        draw.choice(["w", "", "\ud800", "w" * 600]),
        str(number),
        draw.choice(["h", "\ud800:1", "127.0.0.1:1"]),
    ]
    times = draw.randrange(4)
    kinds: list[Callable[[Params], Any]] = [
        lambda params: params,
        lambda params: params,
        lambda params: value,
        lambda params: params | {key: value},
        lambda params: params | {KEY: params[KEY] | {field: value}},
        lambda params: params | {KEY: params[KEY] | {"block_tokens": str(number)}},
        lambda params: params | {KEY: params[KEY] | {"owners": [owner]}},
        of_another_server(
            lambda h: replace(h, block_ids=h.block_ids * times, block_tokens=h.block_tokens * times)
        ),
        of_another_server(lambda h: replace(h, owners=h.owners * times)),
        of_another_server(lambda h: replace(h, num_tokens=number)),
        of_another_server(lambda h: replace(h, seats=h.seats[:times])),
        of_another_server(lambda h: replace(h, request_id=draw.choice(IDS))),
    ]
    return draw.choice(kinds)


def example(
    prefill: Side, decode: Side, number: int, draw: random.Random, asked: dict[str, list[int]]
) -> None:
    """Up to three requests: handed off, changed, asked for once or twice, aborted, preempted, reset, in some order."""
    for index in range(draw.randrange(1, 4)):
        name = f"{draw.choice(IDS)}{number}-{index}"
        tokens = [number % 500, number // 500, index, *range(draw.choice([20, 60, 100]))]
        prefill.add(f"{name}p", {"do_remote_decode": True}, tokens)
        steps(prefill, draw.randrange(4))
        disturb(prefill, f"{name}p", draw)
        until(
            lambda name=name: f"{name}p" not in prefill.scheduler.requests or f"{name}p" in prefill.answers,
            prefill,
        )
        answer = prefill.answers.get(f"{name}p")
        handoff = (answer.kv_transfer_params if answer else None) or {"do_remote_prefill": True, KEY: {}}
        change = mutation(draw)
        for again in range(draw.choice([1, 1, 2])):
            asked[f"{name}d{again}"] = tokens
            params = change(dict(handoff))
            decode.add(f"{name}d{again}", dict(params) if isinstance(params, dict) else params, tokens)
            steps(decode, draw.randrange(3))
        disturb(decode, f"{name}d0", draw)
        steps(draw.choice([prefill, decode]), 2)


def disturb(side: Side, name: str, draw: random.Random) -> None:
    """Lets a client leave, takes a request's blocks, or resets the cache, or none of these."""
    request, what = side.scheduler.requests.get(name), draw.randrange(8)
    if what == 0 and request is not None and not RequestStatus.is_finished(request.status):
        side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    elif what == 1 and request in side.scheduler.running:
        side.scheduler.running.remove(request)
        side.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    elif what == 2:
        side.scheduler.reset_prefix_cache(reset_connector=True)


def steps(side: Side, times: int) -> None:
    for _ in range(times):
        side.step()


def main(model: str, examples: str = "1000", seed: str = "1") -> dict[str, Any]:
    parallel_state.get_tensor_model_parallel_rank = lambda: 0  # nothing of torch.distributed is started
    init_none_hash(sha256)
    draw, asked = random.Random(int(seed)), dict[str, list[int]]()
    prefill, decode = (Checking(model, "", "full") for _ in range(2))
    counted = {name: Counter[str]() for name in ("transports", "failures", "unused", "guarded")}
    for side in (prefill, decode):
        count(side.worker, counted)
        count(side.scheduler.connector, counted)
    answers = 0
    for number in range(int(examples)):
        example(prefill, decode, number, draw, asked)

        def over() -> bool:
            for side in (prefill, decode):
                side.scheduler.connector.reset_cache()  # nobody reads the rest
            return not (prefill.scheduler.requests or decode.scheduler.requests)

        until(over, prefill, decode)
        for name, tokens in asked.items():
            if name in decode.answers:
                answers += 1
                assert decode.answers[name].new_token_ids == [sampled_after(tokens)], name
        asked.clear()
        decode.answers.clear()
        prefill.answers.clear()
        assert [prefill.left(), decode.left()] == [[0, 0], [0, 0]], number
    return {"answers": answers, **{name: dict(counts) for name, counts in counted.items()}}


def count(connector: Any, counted: dict[str, Counter[str]]) -> None:
    """Adds what the connector's statistics have from now on, of which vLLM takes each once."""
    take = connector.get_kv_connector_stats

    def taken() -> Any:
        stats = take()
        for name, counts in counted.items():
            counts.update(stats.data[name] if stats is not None else {})
        return stats

    connector.get_kv_connector_stats = taken


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
