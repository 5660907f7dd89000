# SPDX-License-Identifier: Apache-2.0
"""Members of etcd and coordinators are killed, stopped and told to end under load: no acknowledged handoff is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from control.etcd_cluster import EtcdCluster
from outages.programs import Coordinator
from outages.scene import Scene, on_loopback

pytestmark = pytest.mark.timeout(300)

_FOR_S = 6.0
On = tuple[Scene, EtcdCluster]
Ends = Callable[[], object]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    with on_loopback(tmp_path_factory.mktemp("logs")) as on:
        yield on


def of_member(etcd: EtcdCluster, leads: bool, stops: bool) -> tuple[Ends, Ends]:
    """How it falls, and how it comes back."""
    leader = etcd.leader()
    number = leader if leads else (leader + 1) % 3
    if stops:
        return partial(etcd.send, number, signal.SIGSTOP), partial(etcd.send, number, signal.SIGCONT)

    def back() -> None:
        etcd.start(number)
        etcd.wait()

    return partial(etcd.kill, number), back


@pytest.mark.parametrize("stops", [True, False], ids=["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_member_of_etcd(on: On, leads: bool, stops: bool) -> None:
    scene, etcd = on
    seen = scene.disturb(*of_member(etcd, leads, stops), _FOR_S)
    assert not seen.totals.refused
    assert seen.within(8.0)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_coordinator(on: On, how: signal.Signals) -> None:
    scene, _ = on
    victim = scene.programs[0]
    assert isinstance(victim, Coordinator)

    def back() -> None:
        if how is signal.SIGSTOP:
            victim.send(signal.SIGCONT)
            return
        assert victim.process.wait(timeout=10) == (0 if how is signal.SIGTERM else -how)
        victim.kill()
        victim.start()

    seen = scene.disturb(partial(victim.send, how), back, _FOR_S)
    assert not seen.totals.refused
    assert seen.within(10.0 if how is signal.SIGSTOP else 3.0)
