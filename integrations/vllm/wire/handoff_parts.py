# SPDX-License-Identifier: Apache-2.0
"""Defines the parts of a handoff: what a prefill server announces of a prompt while it computes it by chunks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError, StaleBlocks, StaleReason

from .handoff import KEY, Handoff, check_signature, signed
from .stream_timing import Remaining

STREAM = "kvlink_stream"
"""In `kv_transfer_params` of both sides, the name under which prefill announces parts and decode claims them."""
ANNOUNCED = "kvlink_announced"
"""In prefill's answer, that name if everything was announced to decode under it."""
STREAMS_FROM = "kvlink_streams_from"
"""In prefill's answer, the tokens of the shortest prompt that it announces, if the prompt was shorter."""
_GONE = "gone"


@dataclass(frozen=True, slots=True)
class Part:
    """Everything that has blocks by now, from token 0 on. Parts of one handoff differ in nothing else."""

    handoff: Handoff
    """`num_tokens` counts these blocks' tokens; `prompt` is the whole prompt's. Last groups have no blocks yet."""
    num_tokens: int
    """The number of tokens in the whole prompt."""
    last: bool
    """True if no part follows."""
    written: bool
    """False while the blocks are computed; the lease's slot says how many are written."""
    sure: bool = False
    """True if prefill's answer will say ANNOUNCED: the coordinator has taken a part, and refused none."""
    remaining: Remaining | None = None
    """The times that prefill still needs, or None if it cannot predict them."""

    def to_bytes(self) -> bytes:
        """Returns the bytes that the coordinator carries."""
        part = {
            KEY: self.handoff.to_params(),
            "num_tokens": self.num_tokens,
            "last": self.last,
            "written": self.written,
            "sure": self.sure,
        }
        if self.remaining is not None:
            part["remaining_s"] = [self.remaining.prompt_s, self.remaining.part_s]
        return json.dumps(signed(part)).encode()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Part:
        """Parses bytes of a peer. Raises StaleBlocks for `gone`, ConfigError for what neither method can write."""
        try:
            given = json.loads(blob)
            check_signature(given)
            if _GONE in given:
                raise StaleBlocks(
                    f"the prefill server aborted the request: {given[_GONE]!r:.80}", StaleReason.ABORTED
                )
            num_tokens, last, written = given["num_tokens"], given["last"], given["written"]
            sure = given.get("sure", False)
            handoff = Handoff.from_params(given)
            remaining = _remaining(given.get("remaining_s"))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"a part of a handoff is malformed: {type(error).__name__}: {error!s:.120}"
            ) from None
        if type(num_tokens) is not int or not all(isinstance(one, bool) for one in (last, written, sure)):
            raise ConfigError("a part of a handoff is malformed: a field has another type")
        if not handoff.num_tokens <= num_tokens < 2**31 or (last and handoff.num_tokens != num_tokens):
            raise ConfigError(
                f"a part of a handoff is malformed: {handoff.num_tokens} of {num_tokens} tokens, {last=}"
            )
        return cls(handoff, num_tokens, last, written, sure, remaining)

    @staticmethod
    def refusal(why: str) -> bytes:
        """Returns the message that stands for a part and says that no more of them come."""
        return json.dumps(signed({_GONE: why})).encode()

    def continues(self, first: Part) -> bool:
        """Returns whether both belong to one handoff. After a preemption, prefill starts over under another lease."""
        ours, theirs = self.handoff, first.handoff
        return (
            ours.seats == theirs.seats
            and ours.owners == theirs.owners
            and ours.prompt == theirs.prompt
            and ours.block_tokens == theirs.block_tokens
            and len(ours.block_ids) == len(theirs.block_ids)
            and self.num_tokens == first.num_tokens
        )


def _remaining(given: Any) -> Remaining | None:
    if given is None:
        return None
    prompt_s, part_s = map(float, given)
    if not 0 <= part_s <= prompt_s < math.inf:
        raise ValueError(f"impossible times {given!r}")
    return Remaining(prompt_s, part_s)
