# SPDX-License-Identifier: Apache-2.0
"""Pull or compute: never a pull that is predicted to be slower, and a rate that follows what is measured."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.control.limits import MAX_ASKED_LAST
from kvlink.errors import ConfigError
from kvlink.worker.prefix_choice import PrefillMeter, PrefillRate, WatchedSources, pull_or_compute

TOKENS, SECONDS = st.integers(-5, 1 << 20), st.floats(0, 100)
RATES = st.none() | st.builds(PrefillRate, st.floats(1, 1e6), st.floats(0, 10))


@given(TOKENS, SECONDS, RATES, st.floats(1, 4), st.floats(0, 1))
def test_a_slower_pull_is_never_chosen(
    tokens: int, pull_s: float, rate: PrefillRate | None, margin: float, least_s: float
) -> None:
    choice = pull_or_compute(tokens, pull_s, rate, margin=margin, least_s=least_s)
    assert choice.reason.startswith("pulls" if choice.pull else "computes")
    if choice.pull:
        assert rate is not None
        assert pull_s * margin < tokens / rate.tokens_per_s
        assert tokens / rate.tokens_per_s - pull_s >= least_s
    elif tokens > 0 and rate is not None:
        saved_s = tokens / rate.tokens_per_s
        assert pull_s * margin >= saved_s or saved_s - pull_s < least_s


@pytest.mark.parametrize(
    ("tokens", "pull_s", "rate", "reason"),
    [
        (4096, 0.01, PrefillRate(10_000), "pulls 4096 tokens: pull 10 ms, compute 410 ms"),
        (
            4096, 0.3, PrefillRate(10_000),
            "computes 4096 tokens: pull 300 ms, compute 410 ms; a pull may take 1.5 times as long",
        ),
        (16, 1e-4, PrefillRate(10_000), "computes 16 tokens: pull 0.1 ms, compute 1.6 ms; a pull must save 2 ms"),
        (0, 0.0, PrefillRate(10_000), "computes: the peer has no more tokens than the own cache"),
        (4096, 0.01, None, "computes: the time of a prefill here is not known yet"),
        (
            4096, math.nan, PrefillRate(10),
            "computes 4096 tokens: pull nan ms, compute 4.1e+05 ms; a pull may take 1.5 times as long",
        ),
    ],
)  # fmt: skip
def test_the_reason_names_both_times(
    tokens: int, pull_s: float, rate: PrefillRate | None, reason: str
) -> None:
    assert pull_or_compute(tokens, pull_s, rate).reason == reason


def test_the_start_of_a_prefill_is_not_saved() -> None:
    """The rest of the prompt has to be computed either way."""
    slow_start = PrefillRate(10_000, start_s=10.0)
    assert not pull_or_compute(1000, 0.09, slow_start).pull
    assert pull_or_compute(1000, 0.05, slow_start).compute_s == pytest.approx(0.1)
    assert slow_start.predict_s(1000) == pytest.approx(10.1)


@given(st.floats(10, 1e6), st.floats(0, 1), st.lists(st.integers(1, 100_000), min_size=3, max_size=50))
def test_the_meter_finds_the_rate(tokens_per_s: float, start_s: float, lengths: list[int]) -> None:
    meter = PrefillMeter()
    for length in lengths:
        meter.note(length, start_s + length / tokens_per_s)
    rate = meter.rate()
    assert rate is not None
    for length in {min(lengths), max(lengths)}:
        assert rate.predict_s(length) == pytest.approx(start_s + length / tokens_per_s, rel=1e-3)


def test_the_meter_follows_a_server_that_becomes_slower() -> None:
    meter = PrefillMeter()
    for rate in (20_000, 5_000):
        for number in range(200):
            meter.note(512 + number % 7 * 512, (512 + number % 7 * 512) / rate)
    found = meter.rate()
    assert found is not None
    assert found.tokens_per_s == pytest.approx(5_000, rel=0.02)


def test_the_meter_says_nothing_that_it_does_not_know() -> None:
    meter = PrefillMeter()
    assert meter.rate() is None
    meter.note(100, 0.1)
    meter.note(200, 0.2)
    assert meter.rate() is None
    for _ in range(3):
        meter.note(100, 1.0)
        meter.note(900, 0.1)
    assert meter.rate() is None, "more tokens in less time"
    faster = PrefillMeter()
    for tokens, seconds in ((1000, 0.05), (2000, 0.2), (3000, 0.35)):
        faster.note(tokens, seconds)
    found = faster.rate()
    assert found is not None
    assert found.start_s == 0.0
    assert 8_000 < found.tokens_per_s < 12_000


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 0.1), (100, 0.0), (0, 0.0)])
def test_prefills_without_tokens_or_time_say_nothing(tokens: int, seconds: float) -> None:
    meter = PrefillMeter()
    for _ in range(5):
        meter.note(tokens, seconds)
    assert meter.rate() is None


def test_impossible_rates_and_margins_are_refused() -> None:
    for rate, start_s in ((0.0, 0.0), (math.inf, 0.0), (math.nan, 0.0), (1.0, -1.0)):
        with pytest.raises(ConfigError, match="a prefill rate needs"):
            PrefillRate(rate, start_s)
    with pytest.raises(ConfigError, match="margin must be 1 or more"):
        pull_or_compute(1, 1.0, None, margin=0.9)


class Peers:
    """Counts of pulls as a worker has them, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.good: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.sources = WatchedSources(lambda name: (self.good[name], self.failed[name]), lambda: self.now)


def test_a_peer_that_failed_is_asked_last_until_it_delivers_or_for_a_minute() -> None:
    peers = Peers()
    peers.failed["liar"] = 3  # of earlier pulls, which say nothing
    peers.sources.found(["liar", "honest"])
    assert peers.sources.last() == ()
    peers.failed["liar"] += 1
    peers.good["honest"] += 1
    peers.failed["honest"] += 1  # evicted: others of its prefixes came
    assert peers.sources.last() == peers.sources.last() == ("liar",)
    peers.now = 59.9
    assert peers.sources.last() == ("liar",)
    peers.now = 60.0
    assert peers.sources.last() == ()
    peers.failed["liar"] += 1
    assert peers.sources.last() == ("liar",)
    peers.good["liar"] += 1
    assert peers.sources.last() == ()


def test_what_is_remembered_is_bounded() -> None:
    peers = Peers()
    for number in range(1_000):
        peers.sources.found([f"w{number}"])
        peers.failed[f"w{number}"] += 1
    last = peers.sources.last()
    assert last == tuple(f"w{number}" for number in range(1_000 - MAX_ASKED_LAST, 1_000))
    assert len(peers.sources._before) == 256
