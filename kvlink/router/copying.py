# SPDX-License-Identifier: Apache-2.0
"""Copies the cache of a request that still decodes, so that another server can continue it at once.

The server is asked for a handoff of the tokens so far, as prefill is. It has their blocks in its prefix cache. The
other server pulls them, and keeps them in its own cache for the request that follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvlink.router.bodies import Body, decode_body, handoff_of, prefill_body
from kvlink.router.streamed_answer import StreamedAnswer
from kvlink.router.upstream import NotServed, Upstream

_MOST_COPIES = 3
_FEW_TOKENS = 256
"""The tokens that come during a copy and are computed again instead of copied, which takes about one step."""


async def copy_ahead(
    servers: Upstream, source: str, target: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    """Copies until `target` lacks few tokens. Returns False if one of the servers does not take part."""
    for _ in range(_MOST_COPIES):
        before = answer.num_tokens
        path, body = answer.to_continue()
        try:
            if not await _copy(servers, source, target, path, prefill_body(body), headers):
                return False
        except NotServed:
            return False
        if answer.num_tokens - before <= _FEW_TOKENS:
            break
    return True


async def _copy(
    servers: Upstream, source: str, target: str, path: str, body: Body, headers: Mapping[str, str]
) -> bool:
    offered = await servers.ask("POST", source, path, body, headers)
    try:
        handoff = handoff_of(json.loads(offered.begin)) if offered.status == 200 else None
    except ValueError:
        handoff = None
    if handoff is None:
        return False
    pulled = await servers.ask("POST", target, path, decode_body(body, handoff), headers)
    return pulled.status == 200
