# SPDX-License-Identifier: Apache-2.0
"""Misspelt options are told of, with the name that was meant; transports have the names that people use for them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from kvlink import BlockPool, Worker
from kvlink.config import WorkerConfig, env_names, unknown
from kvlink.doctor import Verdict, software
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.transfer.transport_names import select

BUILT_IN = ["shm", "verbs", "tcp"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("KVLINK_TRANSPORT", "KVLINK_TRANSPORTS"),
        ("KVLINK_TIMEOUT", "KVLINK_TIMEOUT_S"),
        ("KVLINK_ADVERTISE_HOST", "KVLINK_ADVERTISE"),
        ("KVLINK_COORDINATORS", "KVLINK_COORDINATOR"),
        ("KVLINK_HOSTNAME", "KVLINK_HOST"),
        ("KVLINK_XYZZY", ""),
    ],
)
def test_the_nearest_option_is_named(written: str, meant: str) -> None:
    assert unknown({written: "1", "KVLINK_PORT": "1", "HOME": "/"}) == {written: meant}


def test_what_kubernetes_sets_for_services_is_not_misspelt() -> None:
    links = {
        "KVLINK_COORDINATOR_SERVICE_HOST": "10.0.0.1",
        "KVLINK_COORDINATOR_SERVICE_PORT": "7400",
        "KVLINK_COORDINATOR_SERVICE_PORT_GRPC": "7400",
        "KVLINK_COORDINATOR_PORT": "tcp://10.0.0.1:7400",
        "KVLINK_COORDINATOR_PORT_7400_TCP_ADDR": "10.0.0.1",
    }
    assert unknown(links) == {}
    del links["KVLINK_COORDINATOR_SERVICE_HOST"]
    assert set(unknown(links)) == set(links)


def test_variables_of_the_tests_are_not_misspelt() -> None:
    assert unknown({"KVLINK_TEST_SEED": "1"}) == {}


@pytest.fixture
def misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_names, "_warned", set())
    monkeypatch.setenv("KVLINK_TRANSPORT", "tcp")
    monkeypatch.setenv("KVLINK_XYZZY", "1")


@pytest.mark.usefixtures("misspelt")
def test_a_worker_warns_once_of_options_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, 8)))
    with caplog.at_level(logging.WARNING, "kvlink"):
        for name in ("first", "second"):
            Worker(pool, name, transports="shm").close()
    assert [record.getMessage() for record in caplog.records] == [
        "KVLINK_TRANSPORT is no option of kvlink and has no effect; did you mean KVLINK_TRANSPORTS?",
        "KVLINK_XYZZY is no option of kvlink and has no effect; `kvlink config` lists the options",
    ]


@pytest.mark.usefixtures("misspelt")
def test_an_environment_that_is_handed_off_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    WorkerConfig.from_env({"KVLINK_TRANSPORT": "tcp"})
    assert not caplog.records


def test_the_doctor_names_the_option_that_was_meant() -> None:
    check = software.options({"KVLINK_TRANSPORT": "tcp"}, BUILT_IN)
    assert check.verdict is Verdict.WARN
    assert check.evidence == "no such option: KVLINK_TRANSPORT (did you mean KVLINK_TRANSPORTS?)"


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("rdma", ["verbs"]),
        ("tcp,rdma", ["tcp", "verbs"]),
        ("rdma,verbs", ["verbs"]),
        ("fault+rdma", ["fault+verbs"]),
        ("^rdma", ["shm", "tcp"]),
        ("all", BUILT_IN),
        (" all ", BUILT_IN),
        ("fabric", ["fabric"]),
        ("tcp,fault+fabric", ["tcp", "fault+fabric"]),
        ("^fabric", BUILT_IN),
    ],
)
def test_names_that_people_use_for_transports(spec: str, chosen: list[str]) -> None:
    assert select(spec, BUILT_IN) == chosen


@pytest.mark.parametrize("spec", ["all,tcp", "^all", "fault+all"])
def test_all_stands_alone(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no transport '(fault\+)?all'"):
        select(spec, BUILT_IN)


def config_command(**env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVLINK_")}
    return subprocess.run(
        [sys.executable, "-m", "kvlink", "config", "--json"],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_config_checks_the_spelling_of_transports() -> None:
    done = config_command(KVLINK_TRANSPORTS="smh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvlink: there is no transport 'smh'")
    assert config_command(KVLINK_TRANSPORTS="rdma,tcp").returncode == 0


def test_the_command_config_warns_of_options_that_are_none() -> None:
    done = config_command(KVLINK_LEASE="5")
    assert done.returncode == 0
    assert "did you mean KVLINK_LEASE_S?" in done.stderr
