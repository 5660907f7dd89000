# SPDX-License-Identifier: Apache-2.0
"""The loop like decoding that `kvlink bench gpu` runs beside pulls, with other work in place of a GPU's."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvlink.benchmarks.measurements.gpu_decode import compared, times_us
from kvlink.errors import TransferError


def test_a_token_lasts_from_the_end_of_the_one_before_it() -> None:
    ends = iter([0, 5_000, 6_000, 9_000])
    assert times_us(lambda: None, 3, lambda: next(ends)) == [5, 1, 3]


def test_the_loop_runs_alone_and_then_beside_pulls() -> None:
    here = threading.get_ident()
    pulled: list[int] = []
    began = threading.Event()
    steps: list[bool] = []

    def pull() -> None:
        pulled.append(threading.get_ident())
        began.set()

    clock = itertools.count(0, 1000)
    alone, beside = compared(lambda: steps.append(began.is_set()), pull, 50, lambda: next(clock))
    assert (alone["decode"], alone["tokens"], alone["pulls"], alone["p50_ratio"]) == ("alone", 50, 0, None)
    assert (beside["decode"], beside["tokens"], beside["p50_ratio"]) == ("beside pulls", 50, 1)
    assert beside["pulls"] == len(pulled) >= 1
    assert here not in pulled
    assert steps == [False] * 70 + [True] * 50


def test_a_pull_that_fails_fails_the_measurement() -> None:
    def pull() -> None:
        raise TransferError("the owner is gone")

    with pytest.raises(TransferError, match="the owner is gone"):
        list(compared(lambda: None, pull, 5))
