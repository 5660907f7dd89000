# SPDX-License-Identifier: Apache-2.0
"""Decides whether to pull a prefix from a peer or to compute it, and which peers to ask last. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvlink.control.limits import MAX_ASKED_LAST
from kvlink.errors import ConfigError

_ASKED_LAST_S = 60.0
_MOST_WATCHED = 256
_FORGET = 0.97
"""Each prefill counts this much less than the next one, so that the rate follows the load."""
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """The time to compute a prompt: `start_s` for any number of tokens, and 1 / `tokens_per_s` for each."""

    tokens_per_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a rate that no server can have."""
        if not 0 < self.tokens_per_s < math.inf or not 0 <= self.start_s < math.inf:
            raise ConfigError(
                f"a prefill rate needs tokens_per_s above 0 and start_s of 0 or more, not {self.tokens_per_s} and "
                f"{self.start_s}"
            )

    def predict_s(self, num_tokens: int) -> float:
        """Returns the seconds to compute so many tokens in one go."""
        return self.start_s + num_tokens / self.tokens_per_s


class PrefillMeter:
    """Fits a PrefillRate to what an engine measures. Recent prefills count more. Not thread-safe."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._num = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Adds a prefill of so many computed tokens."""
        self._n, self._x, self._y, self._xx, self._xy = (
            _FORGET * before + added
            for before, added in (
                (self._n, 1.0),
                (self._x, num_tokens),
                (self._y, seconds),
                (self._xx, num_tokens * num_tokens),
                (self._xy, num_tokens * seconds),
            )
        )
        self._num += 1

    def rate(self) -> PrefillRate | None:
        """Returns the rate, or None before three prefills, or if the time does not grow with the tokens."""
        if self._num < _FEWEST or not self._x or self._y <= 0:
            return None
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * self._n * self._xx:  # all of one length, which says nothing about the start
            return PrefillRate(self._x / self._y)
        slope = (self._n * self._xy - self._x * self._y) / spread
        start_s = (self._y - slope * self._x) / self._n
        if slope <= 0:
            return None
        return PrefillRate(1 / slope, start_s) if start_s >= 0 else PrefillRate(self._xx / self._xy)


@dataclass(frozen=True, slots=True)
class PrefixChoice:
    """Says whether to pull `num_tokens` tokens, with both predictions, and why. `reason` is a text for a log."""

    pull: bool
    num_tokens: int
    pull_s: float
    compute_s: float
    reason: str


def pull_or_compute(
    num_tokens: int,
    pull_s: float,
    prefill: PrefillRate | None,
    *,
    margin: float = 1.5,
    least_s: float = 0.002,
) -> PrefixChoice:
    """Returns whether to pull `num_tokens` tokens that the own cache lacks, or to compute them with the rest.

    A prompt has always some token left to compute, so a pull saves the time of its tokens and not the start of a
    prefill. A pull must be faster although it may take `margin` times as long as predicted, and must save `least_s`.

    num_tokens: those that the peer has beyond the own cache.
    pull_s: the predicted time of the whole pull: `Peer.predict_us`, with a connect if there is no connection yet.
    prefill: of this server, as it is now; None if it is not known, and then nothing is pulled.
    Raises ConfigError for a margin below 1.
    """
    if margin < 1 or least_s < 0:
        raise ConfigError(f"margin must be 1 or more and least_s 0 or more, not {margin} and {least_s}")
    if num_tokens <= 0:
        return PrefixChoice(False, 0, pull_s, 0.0, "computes: the peer has no more tokens than the own cache")
    if prefill is None:
        return PrefixChoice(
            False, num_tokens, pull_s, math.inf, "computes: the time of a prefill here is not known yet"
        )
    compute_s = num_tokens / prefill.tokens_per_s
    times = f"{num_tokens} tokens: pull {_ms(pull_s)}, compute {_ms(compute_s)}"
    if not pull_s >= 0 or pull_s * margin >= compute_s:
        return PrefixChoice(
            False,
            num_tokens,
            pull_s,
            compute_s,
            f"computes {times}; a pull may take {margin:g} times as long",
        )
    if compute_s - pull_s < least_s:
        return PrefixChoice(
            False, num_tokens, pull_s, compute_s, f"computes {times}; a pull must save {_ms(least_s)}"
        )
    return PrefixChoice(True, num_tokens, pull_s, compute_s, f"pulls {times}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class FailedSources:
    """Remembers which peers did not give a prefix that they have published. For a minute they are asked last.

    Without this, a peer that publishes the longest prefix of every prompt would be chosen each time. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def blame(self, worker_ids: Iterable[str]) -> None:
        """Asks these workers last from now on."""
        for worker_id in worker_ids:
            self._until.pop(worker_id, None)
            self._until[worker_id] = self._clock() + _ASKED_LAST_S
            if len(self._until) > MAX_ASKED_LAST:
                del self._until[next(iter(self._until))]

    def forgive(self, worker_ids: Iterable[str]) -> None:
        """Asks these workers as any other."""
        for worker_id in worker_ids:
            self._until.pop(worker_id, None)

    def last(self) -> tuple[str, ...]:
        """Returns the workers to ask last."""
        now = self._clock()
        return tuple(worker_id for worker_id, until in self._until.items() if until > now)


class WatchedSources(FailedSources):
    """Judges the peers whose prefixes were found by the pulls from them.

    outcomes: returns how many pulls from a worker were good and how many failed, since the start.
    """

    def __init__(
        self, outcomes: Callable[[str], tuple[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._outcomes = outcomes
        self._before: dict[str, tuple[int, int]] = {}

    def found(self, worker_ids: Iterable[str]) -> None:
        """Watches the pulls from these workers from now on."""
        for worker_id in worker_ids:
            before = self._before.pop(worker_id, None)
            self._before[worker_id] = before or self._outcomes(worker_id)
            if len(self._before) > _MOST_WATCHED:
                del self._before[next(iter(self._before))]

    def lied(self, worker_ids: Iterable[str]) -> None:
        """Asks these workers last, whatever pulls from them bring: they have not what they publish."""
        for worker_id in worker_ids:
            self._before.pop(worker_id, None)
        self.blame(worker_ids)

    def last(self) -> tuple[str, ...]:
        """Returns the workers to ask last. A good pull outweighs failed ones of the same time."""
        for worker_id, before in list(self._before.items()):
            good, failed = self._before[worker_id] = self._outcomes(worker_id)
            if good > before[0]:
                self.forgive([worker_id])
            elif failed > before[1]:
                self.blame([worker_id])
        return super().last()
