# SPDX-License-Identifier: Apache-2.0
"""The simulator: against the cost model for one pull, figures derived by hand for few, and laws for any number."""

from __future__ import annotations

from math import inf

import pytest
from bench.simulated_paths import COST, MODEL, PATHS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.benchmarks.simulation.engine import Fate, Fleet, Job, Outcome, Rails, Simulation
from kvlink.benchmarks.simulation.fleets import Move
from kvlink.benchmarks.simulation.sharing import Flow, Port, level_of, share

ONE = Rails(1, 100.0, 100.0)  # bytes/s: figures that one can follow


def run(fleet: Fleet, *jobs: Job) -> dict[Job, Outcome]:
    return {each.job: each for each in Simulation(fleet, jobs).run()}


# How rails are shared.

sizes = st.floats(0.1, 1e6)


@given(sizes, st.lists(sizes | st.just(inf), min_size=1))
def test_a_level_fills_the_port(capacity: float, wants: list[float]) -> None:
    level = level_of(capacity, wants)
    if level == inf:
        assert sum(wants) < capacity
    else:
        assert sum(min(level, want) for want in wants) == pytest.approx(capacity)


def filled_progressively(flows: list[Flow]) -> dict[Flow, float]:
    """All rates rise together; a flow stops at its ceiling or when a port of it is full. Slow, and obviously right."""
    rates, rising = dict.fromkeys(flows, 0.0), set(flows)
    ports = {port for flow in flows for port in (flow.sender, flow.receiver)}
    while rising:
        room = [flow.ceiling - rates[flow] for flow in rising]
        for port in ports:
            mine = [flow for flow in flows if port in (flow.sender, flow.receiver)]
            if growing := sum(flow in rising for flow in mine):
                room.append((port.capacity - sum(rates[flow] for flow in mine)) / growing)
        step = max(0.0, min(room))
        rates.update({flow: rates[flow] + step for flow in rising})
        full = {
            port
            for port in ports
            if sum(rates[flow] for flow in flows if port in (flow.sender, flow.receiver))
            >= port.capacity * (1 - 1e-12)
        }
        rising -= {
            flow
            for flow in rising
            if rates[flow] >= flow.ceiling * (1 - 1e-12) or flow.sender in full or flow.receiver in full
        }
    return rates


@given(st.data())
def test_rates_stay_max_min_fair_whatever_comes_and_goes(data: st.DataObject) -> None:
    senders, receivers = ([Port(data.draw(st.integers(1, 20))) for _ in range(3)] for _ in range(2))
    flows: list[Flow] = []
    for step in data.draw(st.lists(st.sampled_from(["come", "come", "go", "change"]), max_size=25)):
        if step == "go" and flows:
            share(flows.pop(data.draw(st.integers(0, len(flows) - 1))).end())
        elif step == "change":
            port = data.draw(st.sampled_from(senders))
            port.capacity = data.draw(st.integers(1, 20))
            share([port])
        else:
            ceiling = data.draw(st.just(inf) | st.integers(1, 9))
            flow = Flow(data.draw(st.sampled_from(senders)), data.draw(st.sampled_from(receivers)), ceiling)
            flows.append(flow)
            share([flow.sender, flow.receiver])
        expected = filled_progressively(flows)
        for flow in flows:
            assert flow.rate == pytest.approx(expected[flow])
        for port in senders + receivers:
            assert sum(flow.rate for flow in port.flows) <= port.capacity * (1 + 1e-9)


def test_a_port_that_no_longer_holds_a_flow_back_leaves_it_to_the_other_end() -> None:
    narrow, wide, end = Port(10), Port(100), Port(8)
    others = [Flow(narrow, Port(100)) for _ in range(3)]
    first, second = Flow(narrow, end), Flow(wide, end)
    share([narrow, wide, end, *(flow.receiver for flow in others)])
    assert (first.rate, second.rate) == (2.5, 5.5)
    share([port for flow in others for port in flow.end()])
    assert (first.rate, second.rate) == (4, 4)


# One pull, and few.


@settings(max_examples=25)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
@given(st.integers(1, 200_000))
def test_a_pull_alone_takes_what_the_cost_model_says(path: object, tokens: int) -> None:
    assert path in PATHS
    move = Move(MODEL, 8, PATHS[PATHS.index(path)])
    shape = move.shape(tokens)
    job = Job(3.0, shape.num_bytes, move.start_s(tokens), 0, 0)
    took_s = run(Fleet(1, 1, move.rails()), job)[job].took_s
    assert took_s == pytest.approx(move.path.predict(shape).total_ms / 1e3, rel=1e-9)
    if move.path.name == "tcp":
        assert took_s == pytest.approx(COST.predict_us(shape.pieces // 8, shape.num_bytes // 8) / 1e6)


@pytest.mark.parametrize("readers", [1, 2, 7])
def test_readers_of_a_popular_worker_share_its_rails_evenly(readers: int) -> None:
    jobs = [Job(0, 1000, 0.5, 0, reader) for reader in range(readers)]
    for outcome in run(Fleet(1, readers, ONE, lease_s=100), *jobs).values():
        assert outcome.took_s == pytest.approx(0.5 + readers * 10)


def test_a_slow_reader_leaves_its_part_to_the_others() -> None:
    slow = [
        Job(0, 1000, 0, 0, 0),
        Job(0, 1000, 0, 1, 0),
        Job(0, 1000, 0, 2, 0),
    ]  # one reader of three workers
    fast = Job(0, 1000, 0, 0, 1)
    found = run(Fleet(3, 2, ONE), *slow, fast)
    assert found[fast].took_s == pytest.approx(15)  # two thirds of the first worker
    assert found[slow[0]].took_s == pytest.approx(30)


def test_who_comes_later_takes_half() -> None:
    first, second = Job(0, 1000, 0, 0, 0), Job(5, 1000, 0, 0, 1)
    found = run(Fleet(1, 2, ONE), first, second)
    assert (found[first].took_s, found[second].took_s) == pytest.approx((15, 15))


def test_a_decode_worker_has_only_so_many_pulls_under_way() -> None:
    jobs = [Job(0, 1000, 1, sender, 0) for sender in range(3)]
    found = run(Fleet(3, 1, ONE, pulls=1, lease_s=100), *jobs)
    assert [found[job].took_s for job in jobs] == pytest.approx([11, 22, 33])


# Leases that end.


def test_a_pull_is_cut_off_when_its_lease_ends() -> None:
    job, other = Job(2, 1000, 1, 0, 0), Job(2, 300, 0, 1, 0)
    found = run(Fleet(2, 1, ONE, lease_s=5.5), job, other)
    assert (found[other].fate, found[other].took_s) == (Fate.MOVED, pytest.approx(5))
    assert (found[job].fate, found[job].took_s) == (Fate.EXPIRED, 5.5)
    assert found[job].num_bytes == pytest.approx(4 * 50 + 0.5 * 100)  # beside the other, then alone


def test_who_had_to_wait_has_less_of_its_lease_left() -> None:
    first, second = Job(0, 1000, 0, 0, 0), Job(1, 1000, 0, 1, 0)
    found = run(Fleet(2, 1, ONE, pulls=1, lease_s=10.5), first, second)
    assert found[first].fate is Fate.MOVED
    assert (found[second].fate, found[second].num_bytes) == (Fate.EXPIRED, pytest.approx(150))
    found = run(Fleet(2, 1, ONE, pulls=1, lease_s=5), first, second)
    assert [found[job].num_bytes for job in (first, second)] == pytest.approx([500, 100])


# Any number.

some_jobs = st.lists(
    st.builds(
        Job,
        st.floats(0, 50),
        st.floats(1, 2000),
        st.floats(0, 1),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=30,
)


@given(some_jobs, st.sampled_from([2.0, 30.0, 1e6]))
def test_every_job_ends_once_and_no_byte_is_lost_or_made(jobs: list[Job], lease_s: float) -> None:
    fleet = Fleet(4, 4, Rails(3, 50, 40, 30), pulls=2, lease_s=lease_s)
    outcomes = Simulation(fleet, jobs).run()
    assert sorted(map(hash, jobs)) == sorted(hash(each.job) for each in outcomes)
    for each in outcomes:
        assert each.num_bytes <= each.job.num_bytes * (1 + 1e-9)
        assert (
            each.took_s >= each.job.start_s + each.num_bytes / (3 * 30) - 1e-6
        )  # a pull has 30 of a rail at most
        if each.fate is Fate.MOVED:
            assert each.num_bytes == each.job.num_bytes
        assert each.took_s <= lease_s + 1e-6
    if lease_s == 1e6:
        assert all(each.fate is Fate.MOVED for each in outcomes)
    for side, capacity in (("prefill", 150), ("decode", 120)):
        for worker in range(4):
            mine = [each for each in outcomes if getattr(each.job, side) == worker]
            first = min((each.job.at_s for each in mine), default=0.0)
            last = max((each.job.at_s + each.took_s for each in mine), default=0.0)
            assert sum(each.num_bytes for each in mine) <= capacity * (last - first) * (1 + 1e-9) + 1e-6


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1, 2000)), min_size=2, max_size=20))
def test_more_load_makes_nobody_faster(wanted: list[tuple[float, float]]) -> None:
    jobs = [Job(at_s, size, 0.1, 0, reader) for reader, (at_s, size) in enumerate(wanted)]
    fleet = Fleet(1, len(jobs), Rails(2, 50, 40), lease_s=inf)
    fewer, all_of_them = run(fleet, *jobs[1:]), run(fleet, *jobs)
    for job in jobs[1:]:
        assert all_of_them[job].took_s >= fewer[job].took_s - 1e-6
