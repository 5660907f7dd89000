# SPDX-License-Identifier: Apache-2.0
"""Compares what came from outside with this server, once. Afterwards no step can fail on it.

`Handoff.from_params` and `Part.from_bytes` parse; what they return is within bounds, and from any server. `mismatch`
compares it with the caches of this one, before anything is indexed, divided or read by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

from ..model.caches import TokenUnit
from .handoff import Handoff, RankInfo


def take_params(request: Any) -> dict[str, Any]:
    """Returns the `kv_transfer_params` of one of vLLM's requests, {} for none. Removes what is no object.

    A client can send anything under this name in `vllm_xargs`, where vLLM expects an object.
    """
    params = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        params = request.kv_transfer_params = None
    return params or {}


def is_name(name: object) -> TypeGuard[str]:
    """Returns whether parts or answers can be announced under this name, which a router or client chose."""
    return isinstance(name, str) and bool(name)


def mismatch(handoff: Handoff, own: RankInfo, total_heads: int = 1) -> str:
    """Returns why a server with the caches of `own` cannot load a handoff, or "" if its groups fit.

    `total_heads` are those of the model, which the owners must be able to share evenly.
    """
    ours, theirs = own.block_tokens, handoff.block_tokens
    if len(ours) != len(theirs):
        return f"it has {_groups(theirs)}, and this server has {_groups(ours)}"
    for group, (mine, size, units) in enumerate(zip(ours, theirs, own.units, strict=True)):
        if (mine == 0) is not (size == 0) or not all(unit.divides(size, mine) for unit in units):
            return f"cache group {group} has {_kind(size)} there and {_kind(mine)} here{_rows(units)}"
    owners = len(handoff.owners)
    if total_heads % owners and owners % total_heads:
        return f"its {owners} ranks cannot share {total_heads} KV heads"
    return ""


def _groups(block_tokens: tuple[int, ...]) -> str:
    return f"{len(block_tokens)} cache group{'s' * (len(block_tokens) != 1)}"


def _rows(units: Iterable[TokenUnit]) -> str:
    most = max((unit.tokens for unit in units if not unit.is_block), default=1)
    return f", in rows of {most} tokens" if most > 1 else ""


def _kind(block_tokens: int) -> str:
    return f"blocks of {block_tokens} tokens" if block_tokens else "states"
