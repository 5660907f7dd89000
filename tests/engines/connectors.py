# SPDX-License-Identifier: Apache-2.0
"""Pairs of vLLM servers by connector: the same flags for each, but for what the connector itself is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pair import Pair, flags
from servers import coordinator, running, vllm

LEASE_S = 6
_EXTRA: dict[str, Mapping[str, Any]] = {
    "KVLinkConnector": {"lease_s": LEASE_S},
    "NixlConnector": {"kv_lease_duration": LEASE_S},
}


def kv_transfer(connector: str, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config. `policy`: what vLLM does about a load that failed."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": _EXTRA[connector] | extra,
    }


@contextmanager
def pair_of(
    connector: str,
    model: str,
    policy: str = "recompute",
    tp: tuple[int, int] = (1, 1),
    coordinated: bool = False,
    **extra: Any,
) -> Iterator[Pair]:
    """Starts both servers, ends those that are there in the end.

    tp: tensor parallelism of prefill and decode. coordinated: with a coordinator, which kvlink's connector needs for
    hand-overs in parts. extra: more for kv_connector_extra_config.
    """
    with running([coordinator()] if coordinated else []) as coordinators:
        for one in coordinators:
            extra["coordinator"] = f"127.0.0.1:{one.launch.port}"
        config = kv_transfer(connector, policy, **extra)
        launches = [
            vllm(
                f"{role}-{connector}-{model}",
                model,
                config,
                (*flags(model), "--tensor-parallel-size", str(size)),
            )
            for role, size in zip(("prefill", "decode"), tp, strict=True)
        ]
        with running(launches) as (prefill, decode):
            pair = Pair(model, connector, prefill, decode, LEASE_S, coordinators)
            try:
                yield pair
            finally:
                for server in (pair.prefill, pair.decode):
                    server.close()  # a test may have replaced it
