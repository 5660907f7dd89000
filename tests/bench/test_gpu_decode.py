# SPDX-License-Identifier: Apache-2.0
"""The loop like decoding that runs beside pulls and handoffs, with other work in place of matrix products."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvlink.benchmarks.measurements.decode_loop import Loop, step_on, times_us
from kvlink.benchmarks.measurements.gpu_decode import compared
from kvlink.errors import ConfigError, TransferError


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


def test_a_loop_runs_on_a_thread_of_its_own_until_the_work_beside_it_is_done() -> None:
    threads: set[int] = set()
    steps = threading.Semaphore(0)

    def step() -> None:
        threads.add(threading.get_ident())
        steps.release()

    with Loop(step) as loop:
        for _ in range(20):
            steps.acquire()
    ended = len(loop.times_us)
    assert ended >= 18, (
        "neither the step that began before the entry counts, nor one that ended after the exit"
    )
    assert threading.get_ident() not in threads
    assert len(threads) == 1
    assert not steps.acquire(blocking=False) or len(loop.times_us) == ended


def test_a_step_that_fails_fails_the_measurement_after_the_work_beside_it() -> None:
    def step() -> None:
        raise ConfigError("no device")

    done = []
    with pytest.raises(ConfigError, match="no device"), Loop(step):
        done.append(True)
    assert done == [True]


def test_a_step_on_the_cpu_multiplies_and_others_are_refused() -> None:
    step_on("cpu")()
    with pytest.raises(ConfigError, match="write cpu or gpu"):
        step_on("tpu")
