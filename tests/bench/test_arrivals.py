# SPDX-License-Identifier: Apache-2.0
"""Open loops: what a stalled server costs those who come meanwhile is in their times."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.harness.processes import OwnerSide, owner_process
from kvlink.benchmarks.harness.results import brief
from kvlink.benchmarks.harness.statistics import quantile_interval, quantiles_us
from kvlink.benchmarks.measurements import migrate
from kvlink.benchmarks.measurements.rank_handoffs import saturation
from kvlink.benchmarks.workloads.arrivals import (
    Arrivals,
    Served,
    gamma_times,
    is_unstable,
    open_loop,
    workload,
)
from kvlink.benchmarks.workloads.traces import Request
from kvlink.errors import ConfigError, KVLinkError
from kvlink.transfer.engine import host_transports

pytestmark = pytest.mark.verify

STALL_S = 0.5
HERE = [name for name, why_not in host_transports().items() if not why_not]


def least_us(at_s: list[float], stalled: int) -> list[float]:
    """Returns the least time of each request if the server stops for STALL_S when it begins with one of them."""
    over = at_s[stalled] + STALL_S
    return [1e6 * max(0.0, over - each) if number >= stalled else 0.0 for number, each in enumerate(at_s)]


def test_a_stall_is_in_the_times_of_all_who_came_meanwhile() -> None:
    at_s = [0.01 * number for number in range(40)]
    began = []

    def serve(slot: int, index: int) -> None:
        began.append(time.monotonic())
        if index == 5:
            time.sleep(STALL_S)

    served = open_loop(at_s, serve, 1)
    for each, least in zip(served, least_us(at_s, 5), strict=True):
        assert each.took_us >= least
        assert each.took_us >= each.late_us
    assert (
        served[30].took_us - served[30].late_us < served[30].late_us
    )  # it waited; the server did not stall for it


@pytest.mark.skipif("tcp" not in HERE, reason="needs a prefill process that takes part in the transfer")
def test_a_stalled_prefill_process_shows_in_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, num = 10, 60
    arrivals = Arrivals.random(num, 100, seed=1)

    @contextmanager
    def stalling(*arguments: Any, **more: Any) -> Iterator[OwnerSide]:
        with owner_process(*arguments, **more) as owner:
            call, resume = owner.call, threading.Timer(STALL_S, os.kill, (owner.pid, signal.SIGCONT))

            def stop_once(do: str, **given: Any) -> dict[str, Any]:
                if (
                    given.get("request_id") == f"migrate-{3 + stalled}" and do == "offer_held"
                ):  # two warmed up
                    os.kill(owner.pid, signal.SIGSTOP)
                    resume.start()
                return call(do, **given)

            monkeypatch.setattr(owner, "call", stop_once)
            yield owner
            resume.join()

    monkeypatch.setattr(migrate, "owner_process", stalling)
    monkeypatch.setattr(migrate, "_SLOTS", 1)
    _, row = migrate.rows("qwen3-8b", [40] * num, "tcp", tp="8", arrivals=arrivals)
    least = least_us(list(arrivals.at_s), stalled)
    for name, us in (("p50", row["p50_us"]), ("p90", row["p90_us"]), ("p100", row["max_us"])):
        # By their actual starts one of sixty would have seen the stall.
        bound = np.percentile(least, int(name[1:]), method="inverted_cdf")
        assert us >= bound > 0
    late = row["parts"]["late"]["p90_us"]
    assert late >= np.percentile(least, 90, method="inverted_cdf") - 0.1 * STALL_S * 1e6  # less its own time
    assert row["started_late"] >= sum(each > 1e5 for each in least) - 1
    assert (row["iters"], row["failed"], row["verified"], row["slots"]) == (num, 0, True, 1)


@pytest.mark.parametrize("transport", sorted({"loopback", "shm"} & set(HERE)))
def test_requests_under_way_together_keep_their_blocks_apart(transport: str) -> None:
    arrivals = Arrivals.random(40, 2000, seed=2)
    lengths = [40, 100, 10_000_000, 0] * 10
    _, row = migrate.rows("qwen3-8b", lengths, transport, tp="8", arrivals=arrivals)
    assert (row["verified"], row["iters"], row["left_out"], row["failed"]) == (True, 20, 20, 0)
    assert row["arrivals"] == "Poisson, 2000/s"
    assert row["p50_low_us"] <= row["p50_us"] <= row["p50_high_us"]
    assert "p50_us_95" in brief({"kind": "migrate", **row})


def test_requests_are_served_once_each_and_failures_are_kept() -> None:
    seen = []

    def serve(slot: int, index: int) -> None:
        seen.append(index)
        if index % 10 == 3:
            raise KVLinkError(f"no {index}")

    served = open_loop([0.0] * 50, serve, 4)
    assert sorted(seen) == list(range(50))
    assert [str(each.error) for each in served if each.error] == ["no 3", "no 13", "no 23", "no 33", "no 43"]
    assert open_loop([], serve, 4) == []


def test_what_is_no_failure_of_kvlink_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError):
        open_loop([0.0], lambda slot, index: print(1 // index), 2)


def test_arrivals_are_made_from_the_options(tmp_path: Path) -> None:
    assert workload(40, "", 100, None, None) == (40, None)
    lengths, arrivals = workload(40, "", 2000, 50.0, None)
    assert arrivals is not None
    assert (lengths, len(arrivals.at_s)) == ([40] * 2000, 2000)
    assert arrivals.at_s[-1] == pytest.approx(2000 / 50, rel=0.1)
    lengths, arrivals = workload(40, "azure-2023-conv", 5, None, 2.0)
    assert arrivals is not None
    assert lengths == workload(40, "azure-2023-conv", 5, None, None)[0]
    assert Arrivals.of_trace([Request(3, 1, 1)], 2.0) == ("trace × 2", [1.5])


@pytest.mark.parametrize("options", [("", 1.0, 1.0), ("azure-2023-conv", 1.0, 1.0), ("", None, 1.0)])
def test_arrivals_that_make_no_sense_are_refused(options: tuple[str, float | None, float | None]) -> None:
    trace, rate, speed = options
    with pytest.raises(ConfigError, match="--speed"):
        workload(40, trace, 10, rate, speed)


# Which of the ranked values bound a quantile: tables of the sign test have these for the median.
@pytest.mark.parametrize(
    ("count", "share", "low", "high"),
    [
        (5, 0.5, None, None), (6, 0.5, 1, 6), (10, 0.5, 2, 9), (20, 0.5, 6, 15), (100, 0.5, 40, 61),
        (100, 0.99, 97, None), (3687, 0.999, 3679, None), (3688, 0.999, 3680, 3688),
    ],
)  # fmt: skip
def test_intervals_of_quantiles_are_exact(
    count: int, share: float, low: int | None, high: int | None
) -> None:
    assert quantile_interval(list(range(count, 0, -1)), share) == (low, high)


@given(st.lists(st.floats(0, 1e9), max_size=200))
def test_intervals_hold_the_quantile_that_was_seen(values: list[float]) -> None:
    row = quantiles_us(values)
    for name in ("p50", "p90", "p99", "p999"):
        low, middle, high = (row[f"{name}_{end}us"] for end in ("low_", "", "high_"))
        assert middle is not None or not values or high is None
        assert low is None or middle is None or low <= middle
        assert high is None or middle is None or middle <= high


@pytest.mark.parametrize("shape", [(), ("--json",)])
def test_the_command_takes_a_rate(shape: tuple[str, ...]) -> None:
    options = "migrate --transport loopback --model qwen3-8b --tp 8 --tokens 40 --rate 500 --requests 20"
    done = CliRunner().invoke(app, [*options.split(), *shape])
    assert done.exit_code == 0, done.output
    if shape:
        machine, cold, row, noise = map(json.loads, done.output.splitlines())
        assert (machine["kind"], cold["kind"], noise["kind"]) == ("machine", "cold", "noise")
        assert (row["iters"], row["tokens"], row["p999_high_us"]) == (20, 40, None)
        assert row["arrivals"] == "Poisson, 500/s"


def queued(rate: float, num: int = 60, slots: int = 4, service_s: float = 0.01) -> list[Served]:
    """Serves arrivals at a multiple of what the slots can take, in virtual time."""
    free, found = [0.0] * slots, []
    for at_s in gamma_times(num, rate * slots / service_s, 3):
        slot = min(range(slots), key=free.__getitem__)
        began = max(at_s, free[slot])
        free[slot] = began + service_s
        found.append(Served(1e6 * (began - at_s), 1e6 * (free[slot] - at_s)))
    return found


@pytest.mark.parametrize(("rate", "unstable"), [(0.3, False), (0.8, False), (2.0, True), (4.0, True)])
def test_a_queue_that_grows_throughout_is_unstable(rate: float, unstable: bool) -> None:
    assert is_unstable(queued(rate)) is unstable
    assert not is_unstable(queued(rate)[:2]), "two requests show nothing"


def test_the_rate_below_the_first_unstable_one_is_that_of_saturation() -> None:
    row = {"transport": "shm", "failed": 0, "tokens": 16}
    rows = [
        row | {"offered_per_s": rate, "achieved_per_s": min(rate, 30), "unstable": rate > 25}
        for rate in (40, 10, 20)
    ]
    [found] = saturation(
        [*rows, row | {"offered_per_s": 5, "achieved_per_s": 5, "unstable": False, "tokens": 256}]
    )
    assert (found["stable_per_s"], found["unstable_per_s"], found["most_achieved_per_s"]) == (20, 40, 30)


def test_bursts_come_at_once_and_gamma_pauses_are_burstier() -> None:
    bursts = Arrivals.random(12, 100, burst=4)
    assert [len(set(bursts.at_s[at : at + 4])) for at in (0, 4, 8)] == [1, 1, 1]
    assert bursts.name == "Poisson, 100/s, bursts of 4"
    pauses = [np.diff(Arrivals.random(4000, 100, burstiness).at_s) for burstiness in (1.0, 0.25)]
    assert [float(np.mean(each)) for each in pauses] == pytest.approx([0.01, 0.01], rel=0.1)
    assert float(np.std(pauses[1])) > 1.6 * float(np.std(pauses[0]))
    with pytest.raises(ConfigError, match="--burstiness"):
        workload(40, "", 10, None, None, 0.5)


def test_a_quantile_without_support_is_none_and_a_failure_is_infinite() -> None:
    few, many = quantiles_us(range(1, 17)), quantiles_us([*range(1, 1000), math.inf])
    assert (few["p50_us"], few["p99_us"], few["max_us"]) == (8, None, 16)
    assert (many["p99_us"], many["max_us"]) == (990, math.inf)
    assert brief({"kind": "pull", "transport": "shm", **few})["p99_us"] == "max 16"
