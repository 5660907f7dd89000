# SPDX-License-Identifier: Apache-2.0
"""Tracks what a client has of a streamed answer, so that another server can continue it. Does no I/O.

The client sees one answer: the events of later servers get the name of the first one, its format, and counts of all
tokens.
"""

from __future__ import annotations

from typing import Any

from kvlink.router.bodies import Body
from kvlink.router.continuation import CHATS, COMPLETIONS, continuing_body

_NAMES = ("id", "created", "model")
_IDS, _PROMPT_IDS = "token_ids", "prompt_token_ids"
_OF_OTHER_TEXT = ("reasoning", "reasoning_content", "tool_calls")


class BrokenOff(Exception):
    """A server said in an event that it does not finish the answer."""


class StreamedAnswer:
    """One answer to a request that `can_continue`. It takes the events of the servers that give it, in turn."""

    def __init__(self, path: str, body: Body) -> None:
        self._path = path
        self._body = body
        self._names: Body = {}
        self._prompt: list[int] | None = None
        self._tokens: list[int] = []
        self._held: list[int] = []
        """The tokens whose text has not come: a character may need several."""
        self._before = 0
        """The number of tokens that came from earlier servers."""
        self._is_plain = True
        """Whether the text is that of the tokens, and the server told all of them."""
        self.is_finished = False
        """Whether the last token has come."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of the answer's tokens whose text the client has."""
        return len(self._tokens)

    @property
    def can_move(self) -> bool:
        """Returns whether another server could continue after the last event."""
        return self.can_be_continued and not self._held and bool(self._tokens)

    @property
    def can_be_continued(self) -> bool:
        """Returns whether another server can continue, after the client's last text or from the beginning."""
        return self._is_plain and not self.is_finished

    def asking(self) -> Body:
        """Returns the client's request, so that the server also tells the tokens."""
        return self._body | {"return_token_ids": True}

    def continued(self) -> tuple[str, Body]:
        """Returns the path and the body of the request for the next server, whose events `take` gets from now on."""
        self._held.clear()
        self._before = len(self._tokens)
        return self.to_continue()

    def to_continue(self) -> tuple[str, Body]:
        """Returns the same for a request whose events `take` does not get."""
        if self._prompt is None or not self._tokens:
            return self._path, self.asking()
        return COMPLETIONS, continuing_body(self._path, self._body, self._prompt, self._tokens)

    def take(self, event: Body) -> Body | None:
        """Returns the event for the client, or None if it has none of it. Raises BrokenOff."""
        choices = event.get("choices")
        if "error" in event or not isinstance(choices, list):
            raise BrokenOff(str(event.get("error", "an event without choices"))[:200])
        has_begun = bool(self._names)
        self._learn_prompt(event, choices)
        for choice in choices:
            self._take(choice)
        self._names = self._names or {name: event[name] for name in _NAMES if name in event}
        if has_begun and choices and self._only_role(choices[0]):
            return None
        return self._for_client(event, choices)

    def _learn_prompt(self, event: Body, choices: list[Any]) -> None:
        for place in (event, *choices):
            ids = place.get(_PROMPT_IDS)
            if ids is not None and self._prompt is None:
                self._prompt = list(ids)

    def _take(self, choice: Body) -> None:
        if choice.get("finish_reason") == "abort":
            raise BrokenOff("the server aborted the request")
        delta = choice.get("delta") or {}
        ids, text = choice.get(_IDS), choice.get("text") or delta.get("content")
        if (text and not ids) or any(delta.get(name) for name in _OF_OTHER_TEXT):
            self._is_plain = False
        self._held += ids or ()
        if text:
            self._tokens += self._held
            self._held.clear()
        self.is_finished = self.is_finished or choice.get("finish_reason") is not None

    def _only_role(self, choice: Body) -> bool:
        delta = choice.get("delta") or {}
        return bool(delta.get("role")) and not delta.get("content") and choice.get("finish_reason") is None

    def _for_client(self, event: Body, choices: list[Any]) -> Body:
        if not self._body.get("return_token_ids"):
            for place in (event, *choices):
                place.pop(_IDS, None)
                place.pop(_PROMPT_IDS, None)
        if self._before:
            for place in (event, *choices):
                place.pop(_PROMPT_IDS, None)
            if self._path == CHATS:
                event |= {"object": "chat.completion.chunk", "choices": list(map(_chat_choice, choices))}
            if usage := event.get("usage"):
                usage["prompt_tokens"] -= self._before
                usage["completion_tokens"] += self._before
        return event | self._names


def _chat_choice(choice: Body) -> Body:
    return {"delta": {"content": choice.pop("text", "")}, **choice}
