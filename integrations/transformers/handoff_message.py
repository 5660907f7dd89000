# SPDX-License-Identifier: Apache-2.0
"""Defines the message that a router carries from the prefill process to the decode process."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvlink.errors import ConfigError
from kvlink.ticket import Ticket

_MAX_JSON_BYTES = 64 << 20
_FIELDS = {"ticket", "prompt", "first_token", "first_logprob"}


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prefilled request. It is secret like its ticket: a holder may read the blocks.

    `ticket` is the text of a kvlink Ticket whose request id ends with a hash of the tokens below. `prompt` has token
    ids. `first_token` is the one that prefill generated, `first_logprob` its log probability if requested.
    """

    ticket: str
    prompt: tuple[int, ...]
    first_token: int
    first_logprob: float | None = None

    def to_json(self) -> str:
        """Returns one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handoff:
        """Parses text of a peer. Raises ConfigError for anything that `to_json` cannot have written."""
        if len(text) > _MAX_JSON_BYTES:
            raise ConfigError("the handoff is malformed: it is too long")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the handoff is malformed: {error}") from None
        if not isinstance(fields, dict) or set(fields) != _FIELDS:
            raise ConfigError(
                f"the handoff is malformed: it must have the fields {', '.join(sorted(_FIELDS))}"
            )
        logprob = fields["first_logprob"]
        if not isinstance(fields["ticket"], str) or not isinstance(logprob, (float, int, type(None))):
            raise ConfigError("the handoff is malformed: ticket must be text, first_logprob a number or null")
        prompt = fields["prompt"]
        if not isinstance(prompt, list):
            raise ConfigError("the handoff is malformed: prompt must be a list of token ids")
        check_tokens([*prompt, fields["first_token"]])
        return cls(fields["ticket"], tuple(prompt), fields["first_token"], logprob)

    def open_ticket(self) -> Ticket:
        """Returns the ticket if it was made for these tokens. Raises ConfigError otherwise."""
        check_tokens([*self.prompt, self.first_token])
        ticket = Ticket.from_text(self.ticket)
        if not ticket.request_id.endswith(fingerprint(self.prompt, self.first_token)):
            raise ConfigError(
                f"the ticket of {ticket.request_id} was made for another prompt or first token: the router mixed "
                "handoffs up; submit each as prefill returned it, or give the prompt to manager.add_request"
            )
        return ticket


def check_tokens(tokens: Sequence[int]) -> None:
    """Raises ConfigError for values that no tokenizer can have made."""
    if any(type(token) is not int or not 0 <= token < 2**31 for token in tokens):
        raise ConfigError("token ids must be whole numbers from 0 to 2^31 - 1")


def fingerprint(prompt: Sequence[int], first_token: int) -> str:
    """Returns a hash of the tokens, which ends a ticket's request id."""
    tokens = array("q", [*prompt, first_token])
    return "@" + hashlib.sha256(tokens.tobytes()).hexdigest()[:32]
