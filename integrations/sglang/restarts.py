# SPDX-License-Identifier: Apache-2.0
"""Notices prefill servers that were restarted at the same address within the patience of SGLang's heartbeat.

SGLang keeps the sockets of prefill's ranks until some heartbeats in a row have failed. After a faster restart it would
send to the sockets of the former processes, and requests would wait for their timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

Route = tuple[Any, Any, Any, Any]
"""The data, context, tensor and pipeline rank of a prefill process, as its bootstrap server is asked for them."""

_ROUTE = "kvlink_route"
_NAMES = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_TIMEOUT_S = (2, 3)


def with_route(info: dict[str, Any] | None, route: Route) -> dict[str, Any] | None:
    """Returns what a bootstrap server said of a rank, and with it how it was asked."""
    return None if info is None else info | {_ROUTE: route}


def was_restarted(session: Any, bootstrap_addr: str, known: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether the server at this address, which is alive, has other ranks than `known`, or none yet.

    session: asks by HTTP, as `requests.Session` does. Its errors pass.
    """
    for info in known:
        query = urlencode(dict(zip(_NAMES, info[_ROUTE], strict=True)))
        answer = session.get(f"http://{bootstrap_addr}/route?{query}", timeout=_TIMEOUT_S)
        if answer.status_code != 200:
            return True
        now = answer.json()
        if (now["rank_ip"], int(now["rank_port"])) != (info["rank_ip"], int(info["rank_port"])):
            return True
    return False
