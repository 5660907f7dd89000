# SPDX-License-Identifier: Apache-2.0
"""Measures handoffs in vLLM between two hosts whose link has a given rate: time to the first token, without streaming
and with it, prompt by prompt in turn.

    sudo python tests/engines/paced_times.py [--rates 1gbit 10gbit] [--rounds 5] [--json]

The hosts are network namespaces, with a CPU for each of the two servers. The model is a llama of random weights with
64 KiB of cache a token. Added: of the time to the first token, what is more than prefill's own time to it and decode's
from its own prefix cache. The last chunk's transfer is its share of the time that the load took without streaming.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # for the hosts of another lane

from connectors import kv_transfer
from netns.lan import Lan
from pair import Tokens, ask, prompt
from servers import MODELS, Launch, Server, coordinator, router, running, vllm

LENGTHS = (1025, 2049, 4097)  # whole blocks and one token, which decode computes
CHUNK_TOKENS = 1040
MODEL = "llama-paced"
_LIKE = "llama"
_WIDER = {"num_attention_heads": 16, "num_key_value_heads": 16}
_POOL_BLOCKS = 80
_FLAGS = (
    *("--load-format", "dummy", "--seed", "1"),
    *("--num-gpu-blocks-override", str(_POOL_BLOCKS), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
)
_LEASE_S = 60
_PAUSE_S = 0.3  # what the request before left to do is done by then
_PREFILLING = "vllm:request_prefill_time_seconds_sum"
_LOADING = "vllm:kvlink_transfer_seconds_sum"
_EARLY = "vllm:kvlink_early_bytes_total"
Typical = Callable[[Sequence[float]], float]
WAYS = ("afterwards", "streaming")


class Deployment(NamedTuple):
    """Both servers, and a router for each way."""

    lan: Lan
    prefill: Server
    decode: Server
    routers: dict[str, Server]


class Sample(NamedTuple):
    """One prompt by one way, and prefill's and decode's own parts. All in milliseconds.

    `slowed`: what prefill's computing took more for the prompt that is handed off, as it says itself.
    """

    first_token: float
    prefill: float
    slowed: float
    cached: float
    transfer: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="as tc has them")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpus", nargs=2, default=["0", "1"], help="of prefill and decode, as taskset has them"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={}, help="more for kv_connector_extra_config")
    options = parser.parse_args()
    for rate in options.rates:  # each has servers of its own, which know no other link
        with deployed(rate, options.extra, options.cpus) as on:
            for way in WAYS:
                sample(on, way, prompt(f"warm up {way}", max(options.lengths)))
            for length in options.lengths:
                row = {"rate": rate, **measured(on, rate, length, options.rounds)}
                print(json.dumps(row) if options.json else sentence(row), flush=True)
    return 0


@contextmanager
def deployed(rate: str, extra: dict[str, Any], cpus: Sequence[str]) -> Iterator[Deployment]:
    """Three hosts: prefill, decode, and one for everything else, which is where this process goes."""
    make_model()
    with ExitStack() as stack:
        lan = Lan(["front", "prefill", "decode"])
        stack.callback(lan.close)
        lan.enter("front")
        for host in ("prefill", "decode"):
            lan.pace(host, rate)
            lan.receive_on(host, 2)
        front = lan.address("front")
        launch = coordinator()
        there = (*launch.command, "--host", front, "--insecure")
        (one,) = stack.enter_context(running([replace(launch, host=front, command=there)]))
        config = kv_transfer(
            "KVLinkConnector", "fail", _LEASE_S, transports="tcp", streaming_from_tokens=0,
            coordinator=f"{front}:{one.launch.port}", **extra,
        ) | {"kv_connector_module_path": "resting_connectors"}  # fmt: skip
        launches = [
            on_host(lan, name, cpu, config) for name, cpu in zip(("prefill", "decode"), cpus, strict=True)
        ]
        prefill, decode = stack.enter_context(running(launches))
        flags = ((), ("--streaming-from", "0"))
        routers = stack.enter_context(running([router([prefill], [decode], *more) for more in flags]))
        yield Deployment(lan, prefill, decode, dict(zip(WAYS, routers, strict=True)))


def on_host(lan: Lan, name: str, cpu: str, config: dict[str, Any]) -> Launch:
    address = lan.address(name)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    ours = {"KVLINK_HOST": address, "KVLINK_INSECURE": "1", "VLLM_HOST_IP": address, "PYTHONPATH": path}
    return replace(vllm(name, MODEL, config, _FLAGS).at(address, lan.inside(name), **ours), cpus=cpu)


def make_model() -> None:
    """Writes a configuration without weights, which vLLM then makes up."""
    folder = MODELS / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(MODELS / _LIKE, folder, ignore=shutil.ignore_patterns("*.safetensors", "made-by"))
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **_WIDER}))


def measured(on: Deployment, rate: str, length: int, rounds: int) -> dict[str, Any]:
    """Returns a row of medians, and of the best that occurred, which other work on the machine disturbs least."""
    taken: dict[str, list[Sample]] = {way: [] for way in WAYS}
    early, decided = on.decode.metric(_EARLY), decisions(on)
    for turn in range(rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            taken[way].append(sample(on, way, prompt(f"{rate} {length} {turn} {way}", length)))
    early = on.decode.metric(_EARLY) - early
    transfer_ms = statistics.median(one.transfer for one in taken["afterwards"])
    return {
        "tokens": length,
        "rounds": rounds,
        "transfer_ms": round(transfer_ms),
        "last_chunk_ms": round(transfer_ms * ((length - 1) % CHUNK_TOKENS + 1) / length),
        **{
            f"{what}_{name}": figure
            for what, typical in (("p50", statistics.median), ("best", min))
            for name, figure in figures(taken, typical).items()
        },
        **{
            f"{way}_slowed_ms": round(statistics.median(one.slowed for one in samples))
            for way, samples in taken.items()
        },
        "early_mib": round(early / rounds / 2**20, 1),
        "decisions": {name: number for name, number in (decisions(on) - decided).items() if number},
    }


def figures(taken: dict[str, list[Sample]], typical: Typical) -> dict[str, float]:
    """Returns the times by way. What is added is added to what prefill and decode take by themselves."""
    everything = [one for samples in taken.values() for one in samples]
    alone_ms = typical([one.prefill for one in everything]) + typical([one.cached for one in everything])
    first_ms = {way: typical([one.first_token for one in samples]) for way, samples in taken.items()}
    return {
        "alone_ms": round(alone_ms),
        **{f"{way}_ms": round(ms) for way, ms in first_ms.items()},
        **{f"{way}_added_ms": round(ms - alone_ms) for way, ms in first_ms.items()},
        "ratio": round(first_ms["streaming"] / first_ms["afterwards"], 3),
    }


def sample(on: Deployment, way: str, tokens: Tokens) -> Sample:
    """Measures prefill with other tokens of that length, which no server has seen either."""
    others = prompt(f"others {tokens[:9]}", len(tokens))
    alone_s = on.prefill.metric(_PREFILLING)
    prefill_ms = first_token_ms(on.prefill.url, others)
    prefilling_s, loading_s = on.prefill.metric(_PREFILLING), on.decode.metric(_LOADING)
    alone_s = prefilling_s - alone_s
    first_ms = first_token_ms(on.routers[way].url, tokens)
    cached_ms = first_token_ms(on.decode.url, tokens)
    prefilling_s = on.prefill.metric(_PREFILLING) - prefilling_s
    loading_s = on.decode.metric(_LOADING) - loading_s
    return Sample(first_ms, prefill_ms, (prefilling_s - alone_s) * 1e3, cached_ms, loading_s * 1e3)


def first_token_ms(url: str, tokens: Tokens) -> float:
    time.sleep(_PAUSE_S)
    start = time.perf_counter()
    answer = ask(url, MODEL, tokens, 1)
    took_ms = (time.perf_counter() - start) * 1e3
    assert answer.status == 200, answer.body
    return took_ms


def decisions(on: Deployment) -> Counter[str]:
    """Returns how often each was made by either server, so far."""
    samples = [*on.prefill.samples().items(), *on.decode.samples().items()]
    made = Counter[str]()
    for name, number in samples:
        if name.startswith("vllm:kvlink_streaming_total{"):
            made[name.partition('decision="')[2].partition('"')[0]] += int(number)
    return made


def sentence(row: dict[str, Any]) -> str:
    return "  ".join(f"{name}={value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
