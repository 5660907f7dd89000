# SPDX-License-Identifier: Apache-2.0
"""When decode begins to pull a prompt that is being computed: early enough to lose no time, and no earlier."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from kvlink.integrations.vllm.wire.stream_timing import (
    LoadCost,
    Remaining,
    Share,
    Start,
    cost_of,
    slowest,
    start,
)
from kvlink.transfer.cost_model import Cost

SLOW, FAST = LoadCost(0.01, 0.5e-3), LoadCost(0.001, 0.05e-3)  # 4,000 tokens in 2 s and in 0.2 s


@pytest.mark.parametrize(
    ("cost", "prompt_s", "part_s", "expected"),
    [
        (SLOW, 9.0, 1.0, Start.WAIT),
        (SLOW, 3.0, 1.0, Start.PAYS),
        (SLOW, 9.0, 7.0, Start.PAYS),  # the next chunk is long
        (SLOW, 3.5, 0.0, Start.WAIT),  # the next part follows at once
        (SLOW, 2.8, 0.0, Start.PAYS),  # it would fit, if the prediction were exact
        (FAST, 3.0, 1.0, Start.WAIT),
        (FAST, 1.2, 1.0, Start.PAYS),
        (FAST, 0.0, 0.0, Start.PAYS),
    ],
)
def test_it_waits_as_long_as_the_transfer_still_fits(
    cost: LoadCost, prompt_s: float, part_s: float, expected: Start
) -> None:
    assert start(4000, Remaining(prompt_s, part_s), cost, last=False) is expected


def test_longer_prompts_begin_earlier() -> None:
    begins = [start(num, Remaining(3.0, 1.0), SLOW, last=False) for num in (1000, 2000, 4000)]
    assert begins == [Start.WAIT, Start.WAIT, Start.PAYS]


def test_nothing_is_waited_for_after_the_last_part() -> None:
    assert start(4000, Remaining(9.0, 1.0), FAST, last=True) is Start.LAST_CHUNK
    assert start(4000, None, None, last=True) is Start.LAST_CHUNK


def test_it_does_not_wait_by_guess() -> None:
    assert start(4000, Remaining(9.0, 1.0), None, last=False) is Start.UNKNOWN
    assert start(4000, None, FAST, last=False) is Start.UNKNOWN


def test_the_cost_is_what_the_path_predicts() -> None:
    path = Cost(start_us=500, op_ns=1000, gib_per_s=1)
    cost = cost_of([Share(path.predict_us, 0.125, 2**16)])
    for num_tokens in (1000, 4000, 32_000):
        expected_us = path.predict_us(num_tokens // 8, num_tokens << 16)
        assert cost.predict_s(num_tokens) == pytest.approx(expected_us / 1e6, rel=1e-6)


def test_owners_of_one_server_share_its_link() -> None:
    share = Share(Cost(0, 0, 1).predict_us, 1, 2**16)
    assert cost_of([share, share]).predict_s(4096) == pytest.approx(2 * cost_of([share]).predict_s(4096))


def test_a_load_ends_with_the_slowest_rank() -> None:
    merged = slowest({"p": SLOW, "q": FAST}, {"p": FAST, "r": SLOW})
    assert merged == {"p": SLOW, "q": FAST, "r": SLOW}
    assert slowest({"p": LoadCost(1, 2)}, {"p": LoadCost(2, 1)}) == {"p": LoadCost(2, 2)}


def test_a_path_that_predicts_no_slope_is_taken_as_proportional() -> None:
    assert cost_of([Share(lambda ops, num_bytes: 8192.0, 1, 1)]) == LoadCost(0.0, 1e-6)
