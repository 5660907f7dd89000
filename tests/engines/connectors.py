# SPDX-License-Identifier: Apache-2.0
"""Pairs of vLLM servers by connector: the same flags for each, but for what the connector itself is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from call_times import FILE_SETTING
from pair import Pair, flags, prompt
from servers import coordinator, running, vllm

LEASE_S = 6
PATIENT_LEASE_S = 120
"""Outlasts whatever a busy machine does meanwhile, where nothing is to expire."""
_LEASES = {"KVLinkConnector": "lease_s", "NixlConnector": "kv_lease_duration"}


def kv_transfer(
    connector: str, policy: str = "recompute", lease_s: int = LEASE_S, **extra: Any
) -> dict[str, Any]:
    """The value of --kv-transfer-config. `policy`: what vLLM does about a load that failed.

    With a patient lease kvlink's pulls wait for a first connection, too, a third of their time: the ranks of two
    servers, which spin, leave other threads of two CPUs many seconds at a time without one (ksoftirqd among them).
    """
    if connector == "KVLinkConnector" and lease_s == PATIENT_LEASE_S:
        extra["timeout_s"] = PATIENT_LEASE_S * 3 / 4
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {_LEASES[connector]: lease_s, **extra},
    }


@contextmanager
def pair_of(
    connector: str,
    model: str,
    policy: str = "recompute",
    tp: tuple[int, int] = (1, 1),
    lease_s: int = LEASE_S,
    coordinated: bool = False,
    call_times: Path | None = None,
    module_path: str = "",
    env: Mapping[str, str] | None = None,
    prefix_caching: bool | None = None,
    **extra: Any,
) -> Iterator[Pair]:
    """Starts both servers, ends those that are there in the end. Each has computed once: the first forward of several
    ranks compiles for many seconds, in which nothing else runs.

    tp: tensor parallelism of prefill and decode. coordinated: with a coordinator, which kvlink's connector needs for
    handoffs in parts. call_times: a folder where each server writes down what the connector's calls take, in a file
    of its role's name. module_path: where vLLM looks for the connector, instead of its registry.
    env: more for the servers' environment. prefix_caching: instead of what the model's flags say.
    extra: more for kv_connector_extra_config.
    """
    with running([coordinator()] if coordinated else []) as coordinators:
        for one in coordinators:
            extra["coordinator"] = f"127.0.0.1:{one.launch.port}"
        config = kv_transfer(connector, policy, lease_s, **extra)
        if call_times is not None:
            module_path = "timed_connectors"
        if module_path:
            config["kv_connector_module_path"] = module_path
        launches = [
            replace(
                vllm(
                    f"{role}-{connector}-{model}",
                    model,
                    config,
                    (*flags(model, prefix_caching), "--tensor-parallel-size", str(size)),
                    {**(env or {}), **(writes_down(call_times / role) if call_times is not None else {})},
                ),
                cpus=cpus,
            )
            for role, size, cpus in zip(("prefill", "decode"), tp, _cpus_of_each(tp), strict=True)
        ]
        with running(launches) as (prefill, decode):
            pair = Pair(model, connector, prefill, decode, lease_s, coordinators)
            try:
                for server in (prefill, decode):
                    answer = pair.ask(server, prompt("warm up", 300), 2)
                    assert answer.status == 200, answer.body
                yield pair
            finally:
                for server in (pair.prefill, pair.decode):
                    server.close()  # a test may have replaced it


def _cpus_of_each(tp: tuple[int, int]) -> tuple[str, str]:
    """Returns CPUs for each server. Several ranks spin for a second after every step, and a prefill server makes steps
    while leases are open: with CPUs of its own it leaves some to the other server."""
    cpus = sorted(os.sched_getaffinity(0))
    if max(tp) == 1 or len(cpus) < 2:
        return "", ""
    half = len(cpus) // 2
    return ",".join(map(str, cpus[:half])), ",".join(map(str, cpus[half:]))


def writes_down(path: Path) -> dict[str, str]:
    """Returns the environment variables that a server needs for that."""
    return {"PYTHONPATH": str(Path(__file__).parent), FILE_SETTING: str(path)}
