# SPDX-License-Identifier: Apache-2.0
"""Says which streamed answers another server can continue, and derives the request that does so. Does no I/O.

Its prompt has all tokens so far. So each of its parameters must mean the same after some tokens as before the first.
"""

from __future__ import annotations

from typing import Any, Final

from .bodies import HANDOFF, Body, one_handoff_suffices

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"

DRAWN = "kvlink_drawn"
"""In `vllm_xargs`, the number of tokens that were sampled with the request's seed before."""
_XARGS = "vllm_xargs"
_DEFAULT_MOST_TOKENS = 16
"""The limit of a completion that names none, in OpenAI's API and in vLLM."""

_UNCHANGED = frozenset(
    {
        "allowed_token_ids",
        "cache_salt",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
    }
    | {
        "min_p",
        "model",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "return_token_ids",
        "seed",
        "session_id",
    }
    | {"skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream", "stream_options"}
    | {"temperature", "top_k", "top_p", "user"}
)
"""Parameters that a continued request has unchanged. The repetition penalty covers the prompt as well as the answer."""
_LIMITS = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))
_OF_PROMPTS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
    }
    | {
        "documents",
        "messages",
        "metadata",
        "parallel_tool_calls",
        "prompt",
        "reasoning_effort",
        "tool_choice",
    }
)
"""Parameters that say how a prompt is made, whose tokens are known by then."""
_KNOWN = _UNCHANGED | _LIMITS | _OF_PROMPTS | {HANDOFF}
_ONLY: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],), "best_of": (1,), "echo": (False,), "frequency_penalty": (0, 0.0), "logprobs": (False,),
    "n": (1,), "presence_penalty": (0, 0.0), "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,), "stop": ([], ""), "tools": ([],), "top_logprobs": (0,),
    "use_beam_search": (False,),
}  # fmt: skip
"""Parameters that may have only these values, which are also the defaults."""


def can_continue(path: str, body: Body) -> bool:
    """Returns whether another server may continue the streamed answer to this request."""
    if path not in (COMPLETIONS, CHATS) or body.get("stream") is not True or not one_handoff_suffices(body):
        return False
    if not all(value is None or _is_known(name, value) for name, value in body.items()):
        return False
    messages = body.get("messages") or []
    return isinstance(messages, list) and all(map(_is_text, messages))


def _is_known(name: str, value: Any) -> bool:
    if name in _ONLY:
        return any(type(value) is type(one) and value == one for one in _ONLY[name])
    return name in _KNOWN and (name not in _LIMITS or type(value) is int)


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def needs_limit(path: str, body: Body) -> bool:
    """Returns whether the answer may have as many tokens as the model allows: a completion needs a number."""
    return path == CHATS and body.get("max_completion_tokens") is None and body.get("max_tokens") is None


def continuing_body(
    path: str, body: Body, prompt: list[int], answer: list[int], model_limit: int | None
) -> Body:
    """Returns the request for COMPLETIONS that continues an answer. `model_limit` is that of prompt and answer."""
    num_tokens = len(answer)
    asked = {name: value for name, value in body.items() if name in _UNCHANGED and value is not None}
    asked |= {"prompt": prompt + answer, "return_token_ids": True}
    most = _limit(path, body, len(prompt), model_limit)
    if most is not None:
        asked["max_tokens"] = most - num_tokens
    if least := body.get("min_tokens"):
        asked["min_tokens"] = max(least - num_tokens, 0)
    if body.get("seed") is not None:
        asked[_XARGS] = {DRAWN: num_tokens}
    return asked


def _limit(path: str, body: Body, num_prompt: int, model_limit: int | None) -> int | None:
    """Returns the limit of the whole answer, or None if nobody has told it."""
    if needs_limit(path, body):
        return model_limit - num_prompt if model_limit is not None else None
    for name in ("max_completion_tokens", "max_tokens") if path == CHATS else ("max_tokens",):
        if (given := body.get(name)) is not None:
            return int(given)
    return _DEFAULT_MOST_TOKENS
