# SPDX-License-Identifier: Apache-2.0
"""Servers of the models and flags that variants.py makes things for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Pair, flags
from servers import Server, running, vllm


@contextmanager
def servers_of(
    model: str, more: Sequence[str], *others: Sequence[str]
) -> Iterator[tuple[Pair, list[Server]]]:
    """Starts a pair with these flags, and one further server with each of `others` in place of them."""
    roles = [("prefill", more), ("decode", more), *(("other", flags) for flags in others)]
    launches = [
        vllm(
            f"{role}-variant-{model}",
            model,
            kv_transfer("KVLinkConnector", lease_s=PATIENT_LEASE_S),
            (*flags("llama"), *own),
        )
        for role, own in roles
    ]
    with running(launches) as (prefill, decode, *rest):
        yield Pair(model, "KVLinkConnector", prefill, decode, PATIENT_LEASE_S, []), rest


def refused(server: Server, reason: str) -> float:
    """How many handoffs it has refused, or loads that failed, with this reason."""
    samples = server.samples().items()
    return sum(value for name, value in samples if "_total{" in name and f'reason="{reason}"' in name)
