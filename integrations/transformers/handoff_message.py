# SPDX-License-Identifier: Apache-2.0
"""Defines the messages that a router carries between two processes: a request, and the start of a text."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from operator import index
from typing import Any

from kvlink.errors import ConfigError
from kvlink.ticket import Ticket

from ..request_names import printable

_MAX_JSON_BYTES = 64 << 20
_FIELDS = {"ticket", "prompt", "first_token", "first_logprob"}
_MOVED = {"num_generated", "earlier_logprobs"}
_NO_TOKEN = -(1 << 40)  # in place of a first token
_MAX_LOGPROB = 1 << 30  # of one that is written without a point


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

    def __post_init__(self) -> None:
        """Raises ConfigError for fields that no process can have made, so that the rest of kvlink may use them."""
        if not isinstance(self.prompt, tuple) or not isinstance(self.earlier_logprobs, tuple):
            raise ConfigError("the handoff is malformed: prompt and log probabilities must be tuples")
        logprobs = [*self.earlier_logprobs] + ([] if self.first_logprob is None else [self.first_logprob])
        if not isinstance(self.ticket, str) or not all(map(_is_logprob, logprobs)):
            raise ConfigError(
                "the handoff is malformed: ticket must be text, and log probabilities must be numbers"
            )
        check_tokens([*self.prompt, self.first_token])
        is_count = type(self.num_generated) is int
        if not is_count or not len(self.earlier_logprobs) <= self.num_generated < max(len(self.prompt), 1):
            raise ConfigError("the handoff is malformed: num_generated does not match the prompt")

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
        return cls(
            fields["ticket"],
            _listed(fields, "prompt"),
            fields["first_token"],
            fields["first_logprob"],
            fields.get("num_generated", 0),
            _listed(fields, "earlier_logprobs"),
        )

    def with_ticket(self, ticket: str) -> Handoff:
        """Returns the same request with a ticket."""
        return replace(self, ticket=ticket)

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
        mark = fingerprint(self.prompt, self.first_token, self.num_generated)
        return _opened(self.ticket, mark, "give the prompt to manager.add_request")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The start of a text, in whole blocks that another process may copy. It is secret like its ticket.

    It has no tokens and no ticket if there was no whole block to copy.
    """

    ticket: str
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError for fields that no process can have made, so that the rest of kvlink may use them."""
        if not isinstance(self.ticket, str) or not isinstance(self.tokens, tuple):
            raise ConfigError("the prefix is malformed: ticket must be text, and tokens a tuple")
        check_tokens(self.tokens)

    def to_json(self) -> str:
        """Returns one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prefix:
        """Parses text of a peer. Raises ConfigError for anything that `to_json` cannot have written."""
        fields = _parsed(text, {"ticket", "tokens"})
        return cls(fields["ticket"], _listed(fields, "tokens"))

    def open_ticket(self) -> Ticket:
        """Returns the ticket if it was made for these tokens. Raises ConfigError otherwise."""
        return _opened(self.ticket, prefix_mark(self.tokens), "leave it out")


def _parsed(
    text: str, required: AbstractSet[str], optional: AbstractSet[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > _MAX_JSON_BYTES:
        raise ConfigError(f"the handoff is malformed: it must be text of at most {_MAX_JSON_BYTES} bytes")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the handoff is malformed: {error}") from None
    if not isinstance(fields, dict) or not required <= set(fields) <= required | optional:
        raise ConfigError(
            f"the handoff is malformed: it must have the fields {', '.join(sorted(required))}; both ends must run "
            "versions of kvlink that know its fields"
        )
    return fields


def _listed(fields: dict[str, Any], name: str) -> tuple[Any, ...]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise ConfigError(f"the handoff is malformed: {name} must be a list")
    return tuple(value)


def _is_logprob(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MAX_LOGPROB)


def _opened(text: str, mark: str, instead: str) -> Ticket:
    ticket = Ticket.from_text(text)
    if not ticket.request_id.endswith(mark):
        raise ConfigError(
            f"the ticket of {printable(ticket.request_id)} was made for other tokens: the router mixed handoffs up; "
            f"submit each as it was returned, or {instead}"
        )
    return ticket


def token_ids(tokens: Iterable[Any]) -> list[int]:
    """Returns token ids of a caller, such as a tensor, as integers. Raises ConfigError for anything else."""
    try:
        ids = [index(token) for token in tokens]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"token ids must be whole numbers: {error}") from None
    check_tokens(ids)
    return ids


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
