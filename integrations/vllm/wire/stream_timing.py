# SPDX-License-Identifier: Apache-2.0
"""Decides when decode begins to pull a prompt that is still being computed. Pure: values in, a decision out.

Early pulls hold decode's blocks for long and gain nothing as soon as the transfer fits into what is left of the
prefill. Decode therefore waits for the next announcement as long as that costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

_MARGIN = 1.5
"""How much longer than predicted a transfer may take. Predictions are right within this factor."""
_SHORT_TOKENS, _LONG_TOKENS = 1024, 8192


class Start(Enum):
    """Why a pull begins, or that it does not. The values are the labels of a metric."""

    WAIT = "wait"
    PAYS = "pays"
    UNKNOWN = "unknown"
    LAST_CHUNK = "last_chunk"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Remaining:
    """The times that prefill predicts when it announces a part, from those that its chunks took."""

    prompt_s: float
    """The seconds until the whole prompt is computed."""
    part_s: float
    """The seconds until it announces the next part."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The predicted time to load tokens from a server, as a line."""

    start_s: float
    token_s: float

    def predict_s(self, num_tokens: int) -> float:
        """Returns the predicted seconds of a load."""
        return self.start_s + num_tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Share:
    """The reads of a rank from one owner for a token."""

    predict_us: Callable[[int, int], float]
    """That of the Peer, by the number of operations and bytes."""
    num_ops: float
    num_bytes: float


def cost_of(shares: Iterable[Share]) -> LoadCost:
    """Returns the cost of loads that consist of these shares, by what was learned of each path.

    The owners are of one server, whose ranks share its link, so their times add up.
    """
    short_s = long_s = 0.0
    for share in shares:
        short_s += _predicted_s(share, _SHORT_TOKENS)
        long_s += _predicted_s(share, _LONG_TOKENS)
    token_s = (long_s - short_s) / (_LONG_TOKENS - _SHORT_TOKENS)
    if token_s <= 0:
        return LoadCost(0.0, long_s / _LONG_TOKENS)
    return LoadCost(max(short_s - token_s * _SHORT_TOKENS, 0.0), token_s)


def slowest(costs: Mapping[str, LoadCost], others: Mapping[str, LoadCost]) -> dict[str, LoadCost]:
    """Returns the costs, by server, of two ranks that load at once: a load ends with the last of them."""
    merged = {**costs, **others}
    for server in costs.keys() & others.keys():
        one, other = costs[server], others[server]
        merged[server] = LoadCost(max(one.start_s, other.start_s), max(one.token_s, other.token_s))
    return merged


def _predicted_s(share: Share, num_tokens: int) -> float:
    num_ops = max(round(share.num_ops * num_tokens), 1)
    return share.predict_us(num_ops, round(share.num_bytes * num_tokens)) / 1e6


def start(num_tokens: int, remaining: Remaining | None, cost: LoadCost | None, *, last: bool) -> Start:
    """Returns whether to begin now, when a part of a prompt of `num_tokens` tokens was announced.

    Waiting for the next part is free if the whole transfer then still fits into the rest of the prefill. `last` says
    that no other part follows. Whatever is not known counts against waiting.
    """
    if last:
        return Start.LAST_CHUNK
    if remaining is None or cost is None:
        return Start.UNKNOWN
    fits = cost.predict_s(num_tokens) * _MARGIN <= remaining.prompt_s - remaining.part_s
    return Start.WAIT if fits else Start.PAYS
