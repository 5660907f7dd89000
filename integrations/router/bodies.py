# SPDX-License-Identifier: Apache-2.0
"""Derives the request of each side from the client's request, and says which headers go on.

The handoff is opaque: it is carried and never read, except for whether decode still needs it. No function raises for
any body that `parsed` returns.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeAlias

from multidict import CIMultiDict, MultiMapping

Body: TypeAlias = dict[str, Any]

HANDOFF = "kv_transfer_params"
_ASK: Body = {"do_remote_decode": True, "do_remote_prefill": False}
_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_ASK_FOR_A_HANDOFF: Body = _ASK | dict.fromkeys(_REMOTE)
_STREAM = "kvlink_stream"
"""The name under which a server with kvlink announces a running prefill, and another one follows it."""
_ANNOUNCED = "kvlink_announced"
_STREAMS_FROM = "kvlink_streams_from"
"""The tokens of the shortest prompt that a prefill server announces, in its answer to a shorter one."""
_TRACEPARENT = "kvlink_traceparent"
"""The header of that name, for servers that do not pass headers to the engine."""
_ANSWER_AS, ANSWER_OF = "kvlink_answer_as", "kvlink_answer_of"
_CHARACTERS_A_TOKEN = 4
_SAMPLING = "sampling_params"
"""The parameters in a request of vLLM's /inference/v1/generate, whose prompt is `token_ids`."""
# A request for a single token that is not streamed ignores or refuses these.
_ONLY_FOR_DECODE = ("stream_options", "min_tokens")
_NEED_THE_PROMPT_COMPUTED = ("echo", "prompt_logprobs", "use_beam_search")
MOST_PARSED = 64 << 20
"""The bytes of the largest body that is parsed, of a client or of a server."""
_MOST_LEVELS = 200
_SURROGATES = re.compile("[\ud800-\udfff]")

REQUEST_ID: Final = "X-Request-Id"
ENCODING: Final = "Content-Encoding"

_OF_ONE_CONNECTION = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate"}
    | {"proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that do not go on. The client of HTTP writes some itself, and asks servers for plain answers."""


def prefill_body(body: Body, stream: str = "", traceparent: str = "", ticket: Body | None = None) -> Body:
    """Returns the request that computes the prompt and one token, which decode computes again, and keeps the blocks.

    Decode may follow under the name `stream`. `ticket` is that of the chat's last answer, which prefill may pull.
    """
    asked = _without(body, _ONLY_FOR_DECODE)
    handoff = {HANDOFF: _ASK_FOR_A_HANDOFF | (ticket or {}) | _ASK | _ours(stream, traceparent)}
    one: Body
    if isinstance(sampling := body.get(_SAMPLING), dict):
        one = {_SAMPLING: _without(sampling, _ONLY_FOR_DECODE) | {"max_tokens": 1}}
    else:
        one = {"max_tokens": 1, "max_completion_tokens": 1}
    return asked | one | {"stream": False} | handoff


def _without(body: Body, names: tuple[str, ...]) -> Body:
    return {key: value for key, value in body.items() if key not in names}


def following_body(body: Body, stream: str, traceparent: str = "") -> Body:
    """Returns decode's request while prefill still computes under this name."""
    asked = {"do_remote_prefill": True, "do_remote_decode": False}
    return decode_body(body, asked | _ours(stream, traceparent))


def _ours(stream: str, traceparent: str) -> Body:
    return {key: value for key, value in ((_STREAM, stream), (_TRACEPARENT, traceparent)) if value}


def decode_body(body: Body, handoff: Body | None) -> Body:
    """Returns the client's request with the handoff, or without one if decode must compute the prompt itself."""
    asked = _without(body, (HANDOFF,))
    return asked | {HANDOFF: handoff} if handoff else asked


def asking_for_a_ticket(body: Body, answer_as: str) -> Body:
    """Returns decode's request, whose answer has a ticket, or offers it under this name where it is streamed."""
    params = body.get(HANDOFF) or {"do_remote_prefill": False, "do_remote_decode": False}
    return body | {HANDOFF: params | {_ANSWER_AS: answer_as}}


class TooDeep(ValueError):
    """A body has more levels than the router can carry."""


def parsed(content: bytes) -> Any:
    """Returns the JSON value in a body, which can be written again. Raises ValueError, of which TooDeep is one."""
    if len(content) > MOST_PARSED:
        raise ValueError(f"it exceeds {MOST_PARSED >> 20} MiB")
    deep = TooDeep(f"it has more than {_MOST_LEVELS} levels")
    try:
        value = json.loads(content)
    except RecursionError:
        raise deep from None
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        inner = (
            part.values() if type(part) is dict else part for part in level if type(part) in (dict, list)
        )
        level = [one for parts in inner for one in parts if type(one) in (dict, list)]
        if not level:
            return value
    raise deep


def encoded(value: Any) -> bytes:
    """Returns a body with this JSON value, in ASCII: a lone surrogate has no other form."""
    return json.dumps(value, separators=(",", ":")).encode()


def object_in(content: bytes) -> Body | None:
    """Returns the JSON object that a body consists of, or None for anything else."""
    try:
        value = parsed(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def without_handoff(content: bytes) -> bytes:
    """Returns a body of any kind, without the handoff that only the router may give. Raises TooDeep."""
    try:
        value = parsed(content)
    except TooDeep:
        raise
    except ValueError:
        return content
    return encoded(_without(value, (HANDOFF,))) if isinstance(value, dict) and HANDOFF in value else content


def handoff_of(answer: Any) -> Body | None:
    """Returns the handoff in prefill's answer, or None if it has none."""
    handoff = answer.get(HANDOFF) if isinstance(answer, dict) else None
    return handoff if isinstance(handoff, dict) and handoff else None


def announced(handoff: Body | None, stream: str) -> bool:
    """Returns whether everything was announced to decode under this name, so that it needs no handoff."""
    return handoff is not None and handoff.get(_ANNOUNCED) == stream


def streams_from(handoff: Body | None) -> int | None:
    """Returns the tokens of the shortest prompt that the prefill server announces, or None if it did not say."""
    least = handoff.get(_STREAMS_FROM) if handoff is not None else None
    return least if type(least) is int else None


def num_tokens(body: Body) -> int:
    """Returns the number of tokens in the prompt, which is an estimate for text. Images do not count."""
    prompt = body.get("token_ids", body.get("prompt"))
    if isinstance(prompt, list):
        inner = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list | str) else prompt
        return len(inner) if isinstance(inner, list) else len(inner) // _CHARACTERS_A_TOKEN
    messages = body.get("messages")
    asked = messages if isinstance(messages, list) else [prompt]
    return sum(map(_num_characters, asked)) // _CHARACTERS_A_TOKEN


def _num_characters(message: Any) -> int:
    """Returns the length of a message's text, without media, whose bytes may stand in it."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return len(str(message))
    return sum(
        len(str(part.get("text", ""))) if isinstance(part, dict) else len(str(part)) for part in content
    )


def one_handoff_suffices(body: Body) -> bool:
    """Returns whether the request is one prompt with one continuation that does not need logits over the prompt."""
    sampling = body.get(_SAMPLING)
    for asked in (body, sampling if isinstance(sampling, dict) else {}):
        if asked.get("n", 1) not in (1, None) or asked.get("best_of", 1) not in (1, None):
            return False
        if any(asked.get(key) is not None and asked[key] is not False for key in _NEED_THE_PROMPT_COMPUTED):
            return False
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several


def end_to_end(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Returns the headers that are not about one connection, and that can be sent again, as they are UTF-8."""
    named = {name.strip().lower() for name in ",".join(headers.getall("Connection", [])).split(",")}
    dropped = _OF_ONE_CONNECTION | named
    passed = ((name, value) for name, value in headers.items() if name.lower() not in dropped)
    return CIMultiDict((name, value) for name, value in passed if not _SURROGATES.search(value))
