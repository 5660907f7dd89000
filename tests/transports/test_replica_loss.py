# SPDX-License-Identifier: Apache-2.0
"""Coordinators and etcd die under real pulls: what has met goes on, whole, and what is claimed by id comes through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from control.fleet import Fleet, three_of_each
from transports.pairs import Pair
from transports.processes import PATIENCE
from transports.test_owner_death import Load, claim

from kvlink.errors import CoordinatorUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 * PATIENCE)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with three_of_each() as fleet:
        yield fleet


@pytest.fixture
def pair(distant: str, fleet: Fleet, new_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> Pair:
    # A captured warning would keep its exception, and that the pair.
    caplog.set_level(logging.ERROR, "kvlink")
    return new_pair(distant, coordinator=fleet.addresses)


@pytest.fixture
def load(pair: Pair) -> Iterator[Load]:
    load = Load(pair)
    load.goes_on()
    yield load
    load.goes_on()
    load.stop()


def hand_off(pair: Pair, request_id: str) -> None:
    pair.offer([20, 21], request_id=request_id, publish=True)
    claim(pair, request_id)


def test_each_coordinator_and_each_member_of_etcd_dies_in_turn(pair: Pair, fleet: Fleet, load: Load) -> None:
    for number, victim in enumerate(fleet.replicas):
        pair.offer([20, 21], request_id=f"before-{number}", publish=True, ttl_s=60 * PATIENCE)
        victim.kill()
        hand_off(pair, f"replica-{number}")
        claim(pair, f"before-{number}")
        victim.start()
    for number in range(3):
        pair.offer([20, 21], request_id=f"member-before-{number}", publish=True, ttl_s=60 * PATIENCE)
        fleet.etcd.kill(number)
        hand_off(pair, f"member-{number}")
        claim(pair, f"member-before-{number}")
        fleet.etcd.start(number)
        fleet.etcd.wait()


def test_without_etcd_pulls_go_on_and_newcomers_are_told(
    pair: Pair, fleet: Fleet, load: Load, distant: str, new_pair: Callable[..., Pair]
) -> None:
    for number in range(3):
        fleet.etcd.kill(number)
    load.goes_on()
    with pytest.raises(CoordinatorUnavailable, match="does not reach its store: etcd at"):
        pair.another_reader("late")
    load.goes_on()
    for number in range(3):
        fleet.etcd.start(number)
    fleet.etcd.wait()
    hand_off(pair, "after")
    pair.another_reader("late").close()
