# SPDX-License-Identifier: Apache-2.0
"""Says which streamed answers another server can continue, and derives the request that does so. Does no I/O.

The request has the tokens of the prompt and of the answer so far as its prompt. A request is continued only if each of
its parameters means the same after some tokens as before the first one.
"""

from __future__ import annotations

from typing import Any, Final

from kvlink.router.bodies import HANDOFF, Body, one_handoff_suffices

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"

DRAWN = "kvlink_drawn"
"""In `vllm_xargs`, the number of tokens that were sampled with the request's seed before."""
_XARGS = "vllm_xargs"
_DEFAULT_MOST_TOKENS = 16  # OpenAI's default for completions

_KEPT = frozenset(
    (
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "model",
        "priority",
        "repetition_penalty",
        "return_token_ids",
        "seed",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "user",
    )
)
"""Parameters that a continued request has unchanged. The repetition penalty covers the prompt as well as the answer."""
_DERIVED = frozenset(("max_tokens", "max_completion_tokens", "min_tokens", HANDOFF))
_OF_PROMPTS = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "best_of",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "metadata",
        "n",
        "parallel_tool_calls",
        "prompt",
        "reasoning_effort",
        "tool_choice",
    )
)
"""Parameters that say how a prompt is made, whose tokens are known by then, and the number of answers, which is one."""
_KNOWN = _KEPT | _DERIVED | _OF_PROMPTS
_NO_FORMAT: Body = {"type": "text"}


def can_continue(path: str, body: Body) -> bool:
    """Returns whether another server may continue the streamed answer to this request."""
    if path not in (COMPLETIONS, CHATS) or body.get("stream") is not True or not one_handoff_suffices(body):
        return False
    if any(value and name not in _KNOWN and value != _NO_FORMAT for name, value in body.items()):
        return False
    messages = body.get("messages") or []
    return isinstance(messages, list) and all(map(_is_text, messages))


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def continuing_body(path: str, body: Body, prompt: list[int], answer: list[int]) -> Body:
    """Returns the request for COMPLETIONS that continues an answer of at least one token."""
    num_tokens = len(answer)
    asked = {name: value for name, value in body.items() if name in _KEPT}
    asked |= {"prompt": prompt + answer, "max_tokens": _most_tokens(path, body, num_tokens)}
    if least := body.get("min_tokens"):
        asked["min_tokens"] = max(least - num_tokens, 0)
    if body.get("seed") is not None:
        asked[_XARGS] = {DRAWN: num_tokens}
    return asked | {"return_token_ids": True}


def _most_tokens(path: str, body: Body, num_tokens: int) -> int | None:
    if path == CHATS:
        most = body.get("max_completion_tokens") or body.get("max_tokens")
    else:
        most = body.get("max_tokens", _DEFAULT_MOST_TOKENS)
    return most - num_tokens if isinstance(most, int) else None
