# SPDX-License-Identifier: Apache-2.0
"""Tracks what a client has of a streamed answer, so that another server can continue it. Does no I/O.

The client sees one answer: later events get the name of the first one, its format, and counts of all tokens.
"""

from __future__ import annotations

from typing import Any

from .bodies import Body
from .continuation import CHATS, COMPLETIONS, continuing_body, needs_limit
from .retries import is_final

_NAMES = ("id", "created", "model")
_IDS, _PROMPT_IDS = "token_ids", "prompt_token_ids"
_PARSED = ("reasoning", "reasoning_content", "tool_calls")
"""The fields of a chat's event with text that the server has taken out of the content."""
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_TAIL_CHARACTERS = 16
_TAIL_TOKENS = 64


class BrokenOffError(Exception):
    """A server does not finish its answer."""


class StreamedAnswer:
    """One answer to a request that `can_continue`. It takes the events of the servers that give it, in turn."""

    def __init__(self, path: str, body: Body) -> None:
        self._path = path
        self._body = body
        self.model = body.get("model")
        self._names: Body = {}
        self._prompt: list[int] | None = None
        self._tokens: list[int] = []
        self._held: list[int] = []
        """The tokens since the last text: a character may need several."""
        self._tail = ""
        self._earlier = 0
        """The number of tokens that came from earlier servers."""
        self._is_plain = True
        """Whether the text is that of the tokens, and the server told all of them."""
        self._ends_with_token = False
        """Whether the text of the last token is complete, as far as the last event says."""
        self._has_usage = False
        self.model_limit: int | None = None
        """The largest number of tokens of prompt and answer, which the caller learns if `needs_limit`."""
        self.is_finished = False
        """Whether the last token has come."""
        self.is_foreign = False
        """Whether an event came of which it is not known what it adds, so that nobody else can continue."""
        self.error: Body | None = None
        """The event in which a server said that it does not finish, until another one goes on."""
        self._is_refused = False

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens up to the text that the client has."""
        return len(self._tokens)

    @property
    def can_be_continued(self) -> bool:
        """Returns whether another server can continue, after the client's last text or from the beginning."""
        is_known = self._prompt is not None or not self._tokens
        is_ours = self._is_plain and not self.is_foreign
        return is_ours and is_known and not self.is_finished and not self._is_refused

    @property
    def can_move(self) -> bool:
        """Returns whether another server could continue after the last event, without computing a token again."""
        return self.can_be_continued and not self._held and bool(self._tokens)

    @property
    def needs_limit(self) -> bool:
        """Returns whether a request that continues it needs the model's limit."""
        return bool(self._tokens) and self.model_limit is None and needs_limit(self._path, self._body)

    @property
    def needs_check(self) -> bool:
        """Returns whether the text may end within that of the last token: within a character, or before held text."""
        return bool(self._tokens) and not self._ends_with_token

    def last_tokens(self, without: int) -> list[int]:
        """Returns tokens before the client's last text, of which the last `without` are left out, for `ends_with`."""
        end = len(self._tokens) - without
        few = self._tokens[max(end - _TAIL_TOKENS, 0) : end]
        before = self._prompt or []
        return before[len(before) - min(len(before), _TAIL_TOKENS - len(few)) :] + few

    def ends_with(self, text: str, without: int) -> bool:
        """Takes the text of `last_tokens`, and returns whether the client's text ends there. Then it keeps only these.

        vLLM holds back an incomplete character, which shows as U+FFFD, and its parsers for chats may hold back more.
        """
        is_here = text.endswith(self._tail) if self._path == CHATS else not text.endswith("\ufffd")
        if not is_here or without >= len(self._tokens) or (without and self._body.get("return_token_ids")):
            return False
        del self._tokens[len(self._tokens) - without :]
        self._ends_with_token = True
        return True

    def first_request(self) -> Body:
        """Returns the client's request, so that the server also tells the tokens."""
        return self._body | {"return_token_ids": True}

    def continuation(self) -> tuple[str, Body]:
        """Returns the path and the body of the request that continues it now."""
        if self._prompt is None or not self._tokens:
            return self._path, self.first_request()
        body = continuing_body(self._path, self._body, self._prompt, self._tokens, self.model_limit)
        return COMPLETIONS, body

    def begin_continuation(self) -> tuple[str, Body]:
        """Returns the same. From now on, `take` gets the events of the next server."""
        self._held.clear()
        self._earlier = len(self._tokens)
        if not self._tokens:
            self._prompt = None  # a template may contain the time
        return self.continuation()

    def take(self, event: Body) -> Body | None:
        """Returns the event for the client, or None. One of no known form is foreign. Raises BrokenOffError."""
        if event.get("error") is not None:
            self.error, self._is_refused = event, _is_of_request(event["error"])
            raise BrokenOffError(repr(event["error"])[:200])
        if not _is_known(event):
            self.is_foreign = True
            return event
        choices = event["choices"]
        self.error, has_begun = None, bool(self._names)
        self._learn_prompt(event, choices)
        for choice in choices:
            self._take(choice)
        self._names = self._names or {name: event[name] for name in _NAMES if name in event}
        self._has_usage = self._has_usage or bool(not choices and event.get("usage"))
        if has_begun and choices and _only_has_role(choices[0]):
            return None
        return self._for_client(event, choices, has_begun=has_begun)

    def missing_usage(self) -> Body | None:
        """Returns the usage that the client asked for and that a server which ended did not send."""
        options = self._body.get("stream_options")
        wanted = isinstance(options, dict) and options.get("include_usage")
        if self._has_usage or self._prompt is None or not wanted:
            return None
        counts = len(self._prompt), len(self._tokens) + len(self._held)
        usage = dict(zip(_COUNTS, (*counts, sum(counts)), strict=True))
        kind = "chat.completion.chunk" if self._path == CHATS else "text_completion"
        return {"object": kind, "choices": [], "usage": usage} | self._names

    def _learn_prompt(self, event: Body, choices: list[Any]) -> None:
        for place in (event, *choices):
            ids = place.get(_PROMPT_IDS)
            if ids is not None and self._prompt is None:
                self._prompt = list(ids)

    def _take(self, choice: Body) -> None:
        if choice.get("finish_reason") == "abort":
            raise BrokenOffError("the server aborted the request")
        delta = choice.get("delta") or {}
        ids, text = choice.get(_IDS) or [], choice.get("text") or delta.get("content")
        if (text and not ids) or any(delta.get(name) for name in _PARSED):
            self._is_plain = False
        self._held += ids
        self.is_finished = self.is_finished or choice.get("finish_reason") is not None
        if _IDS in choice:
            choice[_IDS] = self._held.copy() if text or self.is_finished else []
        if text:
            self._tokens += self._held
            self._held.clear()
            self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
            self._ends_with_token = len(ids) == 1 and self._path == COMPLETIONS

    def _for_client(self, event: Body, choices: list[Any], *, has_begun: bool) -> Body:
        hidden = [] if self._body.get("return_token_ids") else [_IDS, _PROMPT_IDS]
        for place in (event, *choices):
            for name in [*hidden, _PROMPT_IDS] if has_begun else hidden:
                place.pop(name, None)
        if self._earlier:
            if self._path == CHATS:
                event |= {"object": "chat.completion.chunk", "choices": list(map(_chat_choice, choices))}
            if usage := event.get("usage"):
                event["usage"] = _usage_of_all(usage, self._earlier)
        return event | self._names


def _is_known(event: Body) -> bool:
    """Returns whether all that is read of an event has the type that it has in vLLM's."""
    choices, usage = event.get("choices"), event.get("usage")
    if not isinstance(choices, list) or not _are_ids(event.get(_PROMPT_IDS)):
        return False
    if usage is not None and not (
        isinstance(usage, dict) and all(type(usage.get(n)) is int for n in _COUNTS)
    ):
        return False
    return all(isinstance(choice, dict) and _is_known_choice(choice) for choice in choices)


def _is_known_choice(choice: Body) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict | None):
        return False
    texts = choice.get("text"), choice.get("finish_reason"), (delta or {}).get("content")
    return all(isinstance(text, str | None) for text in texts) and all(
        _are_ids(choice.get(name)) for name in (_IDS, _PROMPT_IDS)
    )


def _are_ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(one) is int for one in value))


def _is_of_request(error: Any) -> bool:
    """Returns whether any other server would give the same error."""
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is int and code >= 400 and is_final(code)


def _only_has_role(choice: Body) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("role")) and not delta.get("content") and choice.get("finish_reason") is None


def _chat_choice(choice: Body) -> Body:
    return {"delta": {"content": choice.pop("text", "")}, **choice}


def _usage_of_all(usage: Body, earlier: int) -> Body:
    """Returns the counts of a whole answer. Details, such as cached tokens, are those of one request, and left out."""
    prompt, answer, both = (usage[name] for name in _COUNTS)
    return dict(zip(_COUNTS, (prompt - earlier, answer + earlier, both), strict=True))
