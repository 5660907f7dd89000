# SPDX-License-Identifier: Apache-2.0
"""Prepares another decode server to continue an answer: it gets a copy of the cache, and says what its tokens mean.

The server that decodes is asked for a handoff of the tokens so far, as prefill is. It has their blocks in its prefix
cache. The other server pulls them, and keeps them in its own cache for the request that follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvlink.router.bodies import Body, decode_body, handoff_of, object_in, prefill_body
from kvlink.router.retries import Answer
from kvlink.router.streamed_answer import StreamedAnswer
from kvlink.router.upstream import Sent, Upstream

_MOST_COPIES = 3
_FEW_TOKENS = 256
"""The tokens that come during a copy and are computed again instead of copied, which takes about one step."""
_MOST_OF_A_CHARACTER = 4
"""The tokens that may be left out at the end: those of an incomplete character, which has at most four bytes."""


async def copy_ahead(
    servers: Upstream, source: str, target: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    """Copies until `target` lacks few tokens. Returns False if one of the servers does not take part.

    Raises NotServed.
    """
    for _ in range(_MOST_COPIES):
        before = answer.num_tokens
        path, body = answer.continuation()
        asked = prefill_body(body)
        handoff = handoff_of(_value(await servers.ask(source, Sent(path, asked, headers))))
        if handoff is None:
            return False
        pulled = await servers.ask(target, Sent(path, decode_body(asked, handoff), headers))
        if pulled.status != 200:
            return False
        if answer.num_tokens - before <= _FEW_TOKENS:
            break
    return True


async def can_continue_here(
    servers: Upstream, url: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    """Returns whether the server can continue exactly after the text that the client has. It asks for what is unknown.

    The client's text may end within that of the last tokens, which are then left out and computed again. Raises
    NotServed.
    """
    if answer.needs_limit:
        answer.model_limit = await _model_limit(servers, url, headers)
    if answer.needs_limit:
        return False
    return not answer.needs_check or await _ends_with_token(servers, url, answer, headers)


async def _model_limit(servers: Upstream, url: str, headers: Mapping[str, str]) -> int | None:
    """Returns the limit of the server's models, which differ only by adapters."""
    models = _value(await servers.ask(url, Sent("/v1/models", None, headers, "GET"))).get("data")
    models = models if isinstance(models, list) else []
    limits = [model.get("max_model_len") for model in models if isinstance(model, dict)]
    return min((limit for limit in limits if type(limit) is int), default=None)


async def _ends_with_token(
    servers: Upstream, url: str, answer: StreamedAnswer, headers: Mapping[str, str]
) -> bool:
    for without in range(_MOST_OF_A_CHARACTER):
        asked = {"model": answer.model, "tokens": answer.last_tokens(without)}
        text = _value(await servers.ask(url, Sent("/detokenize", asked, headers))).get("prompt")
        if not isinstance(text, str):
            return False
        if answer.ends_with(text, without):
            return True
    return False


def _value(answer: Answer) -> Body:
    """Returns the object in an answer, or an empty one."""
    return (object_in(answer.begin) if answer.status == 200 else None) or {}
