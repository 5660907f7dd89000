# SPDX-License-Identifier: Apache-2.0
"""Defines the messages that a router carries between two processes: a request, and the start of a text."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

from kvlink.errors import ConfigError
from kvlink.ticket import Ticket

_MAX_JSON_BYTES = 64 << 20
_FIELDS = {"ticket", "prompt", "first_token", "first_logprob"}
_MOVED = {"num_generated", "earlier_logprobs"}
_NO_TOKEN = -(1 << 40)  # in place of a first token


@dataclass(frozen=True, slots=True)
class Handoff:
    """A request that goes on elsewhere. It is secret like its ticket: a holder may read the blocks.

    `ticket` is the text of a kvlink Ticket whose request id ends with a hash of the tokens below. `prompt` has the ids
    of the tokens whose blocks are offered. `first_token` follows them, and its log probability is `first_logprob` if
    requested. If the request was moved while it generated, the last `num_generated` tokens of `prompt` are generated
    ones, and `earlier_logprobs` has their log probabilities.
    """

    ticket: str
    prompt: tuple[int, ...]
    first_token: int
    first_logprob: float | None = None
    num_generated: int = 0
    earlier_logprobs: tuple[float, ...] = ()

    def to_json(self) -> str:
        """Returns one JSON object. Earlier versions of kvlink read that of a request that was not moved."""
        fields = asdict(self)
        return json.dumps(
            fields if self.num_generated else {name: fields[name] for name in fields if name not in _MOVED}
        )

    @classmethod
    def from_json(cls, text: str) -> Handoff:
        """Parses text of a peer. Raises ConfigError for anything that `to_json` cannot have written."""
        fields = _parsed(text, _FIELDS, _MOVED)
        logprobs = [fields["first_logprob"], *_listed(fields, "earlier_logprobs")]
        if (
            not all(isinstance(logprob, (float, int, type(None))) for logprob in logprobs)
            or None in logprobs[1:]
        ):
            raise ConfigError("the handoff is malformed: log probabilities must be numbers")
        prompt, num_generated = _listed(fields, "prompt"), fields.get("num_generated", 0)
        check_tokens([*prompt, fields["first_token"]])
        if type(num_generated) is not int or not len(logprobs) - 1 <= num_generated < max(len(prompt), 1):
            raise ConfigError("the handoff is malformed: num_generated does not match the prompt")
        return cls(
            fields["ticket"],
            tuple(prompt),
            fields["first_token"],
            logprobs[0],
            num_generated,
            tuple(logprobs[1:]),
        )

    @property
    def num_prompt(self) -> int:
        """The number of tokens that were not generated."""
        return len(self.prompt) - self.num_generated

    def remaining(self, max_new_tokens: int | None) -> int | None:
        """Returns how many of so many tokens are left to generate. Raises ConfigError if none is."""
        if max_new_tokens is None or max_new_tokens > self.num_generated:
            return None if max_new_tokens is None else max_new_tokens - self.num_generated
        raise ConfigError(
            f"the request has generated {self.num_generated + 1} tokens already; give it the max_new_tokens that it had"
        )

    def open_ticket(self) -> Ticket:
        """Returns the ticket if it was made for these tokens. Raises ConfigError otherwise."""
        check_tokens([*self.prompt, self.first_token])
        mark = fingerprint(self.prompt, self.first_token, self.num_generated)
        return _opened(self.ticket, mark, "give the prompt to manager.add_request")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The start of a text, in whole blocks that another process may copy. It is secret like its ticket."""

    ticket: str
    tokens: tuple[int, ...]

    def to_json(self) -> str:
        """Returns one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prefix:
        """Parses text of a peer. Raises ConfigError for anything that `to_json` cannot have written."""
        fields = _parsed(text, {"ticket", "tokens"})
        tokens = _listed(fields, "tokens")
        check_tokens(tokens)
        return cls(fields["ticket"], tuple(tokens))

    def open_ticket(self) -> Ticket:
        """Returns the ticket if it was made for these tokens. Raises ConfigError otherwise."""
        check_tokens(self.tokens)
        return _opened(self.ticket, prefix_mark(self.tokens), "leave it out")


def _parsed(
    text: str, required: AbstractSet[str], optional: AbstractSet[str] = frozenset()
) -> dict[str, Any]:
    if len(text) > _MAX_JSON_BYTES:
        raise ConfigError("the handoff is malformed: it is too long")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the handoff is malformed: {error}") from None
    if not isinstance(fields, dict) or not required <= set(fields) <= required | optional:
        raise ConfigError(
            f"the handoff is malformed: it must have the fields {', '.join(sorted(required))}; both ends must run "
            "versions of kvlink that know its fields"
        )
    if not isinstance(fields["ticket"], str):
        raise ConfigError("the handoff is malformed: ticket must be text")
    return fields


def _listed(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise ConfigError(f"the handoff is malformed: {name} must be a list")
    return value


def _opened(text: str, mark: str, instead: str) -> Ticket:
    ticket = Ticket.from_text(text)
    if not ticket.request_id.endswith(mark):
        raise ConfigError(
            f"the ticket of {ticket.request_id} was made for other tokens: the router mixed handoffs up; submit each "
            f"as it was returned, or {instead}"
        )
    return ticket


def check_tokens(tokens: Sequence[int]) -> None:
    """Raises ConfigError for values that no tokenizer can have made."""
    if any(type(token) is not int or not 0 <= token < 2**31 for token in tokens):
        raise ConfigError("token ids must be whole numbers from 0 to 2^31 - 1")


def fingerprint(prompt: Sequence[int], first_token: int, num_generated: int = 0) -> str:
    """Returns a hash of the tokens, and of how many of the prompt are generated, which ends a ticket's request id."""
    tokens = array("q", [*prompt, first_token])
    if num_generated:
        tokens.append(-num_generated)  # tokens are not negative
    return "@" + hashlib.sha256(tokens.tobytes()).hexdigest()[:32]


def prefix_mark(tokens: Sequence[int]) -> str:
    """Returns what ends the request id of the ticket of a Prefix."""
    return fingerprint(tokens, _NO_TOKEN)
