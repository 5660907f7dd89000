# SPDX-License-Identifier: Apache-2.0
"""Cuts links between etcd members, coordinators and workers, one way and both. No acknowledged handoff may be lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from control.etcd_cluster import need_etcd, need_etcdctl
from netns.lan import Lan
from outages.programs import Coordinator, LoadProcess, Program
from outages.scene import Scene, make_token, secrets_of, ticket_secret

pytestmark = pytest.mark.timeout(400)

_MEMBERS = ["m0", "m1", "m2"]
_FOR_S = 12.0  # longer than a lease


class Members:
    """Runs an etcd of three members, each on a host of its own."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self._lan, self._folder = lan, folder
        self._processes = [self._start(name) for name in _MEMBERS]

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        at = f"http://{self._lan.address(name)}"
        options = {
            "name": name,
            "data-dir": str(self._folder / f"data-{name}"),
            "listen-client-urls": f"{at}:2379,http://127.0.0.1:2379",
            "advertise-client-urls": f"{at}:2379",
            "listen-peer-urls": f"{at}:2380",
            "initial-advertise-peer-urls": f"{at}:2380",
            "initial-cluster": ",".join(f"{each}=http://{self._lan.address(each)}:2380" for each in _MEMBERS),
            "logger": "zap",
            "log-level": "error",
        }
        command = [*self._lan.inside(name), "etcd", *(f"--{key}={value}" for key, value in options.items())]
        with (self._folder / f"etcd-{name}").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def addresses(self) -> str:
        return ",".join(f"{self._lan.address(name)}:2379" for name in _MEMBERS)

    def leader(self) -> str:
        """Waits until the cluster has a leader, and returns its name."""
        while True:
            for name in _MEMBERS:
                ask = ["env", "ETCDCTL_API=3", "etcdctl", "--endpoints=127.0.0.1:2379", "endpoint", "status"]
                output = subprocess.run(
                    [*self._lan.inside(name), *ask], capture_output=True, text=True
                ).stdout
                if output.split(", ")[4:5] == ["true"]:
                    return name
            time.sleep(0.1)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


On = tuple[Lan, Members, Scene]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    """Starts three members, two coordinators and a load, each on a host of its own."""
    need_etcd()
    need_etcdctl()
    folder = tmp_path_factory.mktemp("cut")
    token = make_token(folder)
    lan = Lan([*_MEMBERS, "a", "b", "load"])
    programs: list[Program] = []
    members = Members(lan, folder)
    env = {"KVLINK_INSECURE": "1"}
    try:
        members.leader()
        for name in ("a", "b"):
            store, options = f"etcd://{members.addresses}/cut", ("--host", lan.address(name))
            programs.append(Coordinator(folder, name, store, lan.inside(name), *options, **env))
        addresses = ",".join(program.address for program in programs)  # type: ignore[attr-defined]
        load = LoadProcess(folder, addresses, ticket_secret(token), lan.inside("load"), **env)
        programs.append(load)
        scene = Scene(folder, programs[:-1], load, secrets_of(token))
        yield lan, members, scene
        assert not load.finish().lost
        scene.check_logs()
    finally:
        for program in programs:
            program.kill()
        members.close()
        lan.close()


@pytest.mark.parametrize(
    ("source", "targets", "both"),
    [("load", ["a"], False), ("b", ["load"], False), ("load", ["a"], True)],
    ids=["workers to a coordinator", "a coordinator to workers", "both ways"],
)
def test_workers_and_a_coordinator(on: On, source: str, targets: list[str], both: bool) -> None:
    """Covers each direction by itself, because clients stay with a coordinator that answered."""
    lan, _, scene = on
    seen = scene.disturb(partial(lan.cut, source, *targets, both=both), lan.mend, _FOR_S)
    assert not seen.totals.refused
    assert seen.within(10.0)


@pytest.mark.parametrize(
    ("source", "targets", "both"),
    [("a", _MEMBERS, False), ("m0", ["a"], False), ("a", _MEMBERS, True)],
    ids=["a coordinator to etcd", "a member to a coordinator", "both ways"],
)
def test_a_coordinator_and_etcd(on: On, source: str, targets: list[str], both: bool) -> None:
    lan, _, scene = on
    seen = scene.disturb(partial(lan.cut, source, *targets, both=both), lan.mend, _FOR_S)
    assert not seen.totals.refused
    assert seen.within(10.0)


@pytest.mark.parametrize("way", ["cannot send", "cannot hear", "isolated"])
def test_etcds_leader_and_the_other_members(on: On, way: str) -> None:
    lan, members, scene = on
    leader = members.leader()
    others = [name for name in _MEMBERS if name != leader]

    def cut() -> None:
        if way == "cannot hear":
            for other in others:
                lan.cut(other, leader)
        else:
            lan.cut(leader, *others, both=way == "isolated")

    seen = scene.disturb(cut, lan.mend, _FOR_S)
    assert not seen.totals.refused
    assert seen.within(10.0)


def test_workers_and_all_coordinators(on: On) -> None:
    """Calls wait while no coordinator can be reached. Leases outlive a cut that is shorter than they are."""
    lan, _, scene = on
    seen = scene.disturb(partial(lan.cut, "load", "a", "b", both=True), lan.mend, _FOR_S / 2)
    assert not seen.totals.refused
    assert seen.within(_FOR_S / 2 + 6.0)
