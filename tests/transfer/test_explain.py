# SPDX-License-Identifier: Apache-2.0
"""Paths are explained in `explain()`, in the log of a library, and at the end of the demo."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from transfer_stats import TransferStats

from kvlink import BlockPool, Worker
from kvlink.demo.route import Row
from kvlink.demo.show import print_verdict
from kvlink.layout import Geometry, dense
from kvlink.transfer.explain import Part, PathTaken, paths_taken
from kvlink.transfer.path_log import PathLog
from kvlink.transfer.peer import Peer, Refusal

NO_RDMA = Refusal("verbs", "no RDMA device here")
PATH = PathTaken("owner", "tcp", 1, (), (), (), (NO_RDMA,), 80, 1 << 20, 1000.0, 1500.0, False)
GOOD = Row("engine", "shm", "shm", 2, 5, 160, 1 << 20, 900.0, 10.9, True)


@pytest.mark.parametrize("measured_us", [500.0, 1000.0, 2000.0])
def test_a_prediction_within_a_factor_of_two_is_shown(measured_us: float) -> None:
    assert f"predicted 1000 us, took {measured_us:.0f} us" in str(replace(PATH, measured_us=measured_us))


@pytest.mark.parametrize("measured_us", [0.0, 499.0, 2001.0])
def test_a_prediction_that_missed_is_not_shown(measured_us: float) -> None:
    missed = replace(PATH, measured_us=measured_us)
    assert "predicted" not in str(missed)
    assert f"bytes, took {measured_us:.0f} us" in str(missed)
    assert missed.predicted_us == 1000.0


def part(
    owner: str,
    *refused: Refusal,
    left_out: tuple[str, ...] = (),
    path: tuple[str, str] = ("verbs", "mlx5_0:1->mlx5_1:1"),
) -> Part:
    stats = TransferStats(bytes=1 << 20, num_ops=80, num_segments=80, total_ns=1_000_000)
    transfer = SimpleNamespace(stats=lambda: stats, done=lambda: True)
    peer = SimpleNamespace(
        transport=path[0],
        connection=SimpleNamespace(paths=lambda: [path[1]]),
        nics_left_out=left_out,
        bounces_at=(),
        refused=refused,
    )
    return cast(Part, (SimpleNamespace(worker_id=owner, soft=False), peer, transfer))


def test_an_absent_transport_is_named_once() -> None:
    away = ("mlx5_2:1: is DOWN",)
    other = Refusal("shm", "c is on another host")
    parts = [part("a", NO_RDMA, left_out=away), part("b", NO_RDMA, left_out=away), part("c", NO_RDMA, other)]
    paths = paths_taken(parts, {"b": "cut"})
    assert [path.refused for path in paths] == [(NO_RDMA,), (), (other,)]
    assert [path.nics_left_out for path in paths] == [away, (), ()]
    assert [path.restarted for path in paths] == ["", "cut", ""]
    assert " ".join(map(str, paths)).count("no RDMA device") == 1


def test_libfabric_is_a_network_and_its_provider_is_named() -> None:
    (path,) = paths_taken([part("a", left_out=("mlx5_2:1: is DOWN",), path=("fabric", "efa"))], {})
    assert "a over fabric (1 lane(s) efa, not encrypted)" in str(path)
    assert "mlx5" not in str(path), "verbs left that out"
    assert path.brief.endswith("not encrypted")


def peer(owner: str, transport: str, *refused: Refusal) -> Peer:
    taken: Any = SimpleNamespace(card=SimpleNamespace(worker_id=owner), transport=transport, refused=refused)
    return cast(Peer, taken)


def test_each_path_is_logged_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    log = PathLog()
    with caplog.at_level(logging.INFO, "kvlink"):
        for owner, transport in (("a", "tcp"), ("a", "tcp"), ("b", "tcp"), ("a", "verbs"), ("a", "verbs")):
            log.opened(peer(owner, transport, *([NO_RDMA] if transport == "tcp" else [])))
    assert [record.getMessage() for record in caplog.records] == [
        "reads from owner=a transport=tcp; not verbs: no RDMA device here",
        "reads from owner=b transport=tcp; not verbs: no RDMA device here",
        "reads from owner=a transport=verbs",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_the_log_of_paths_does_not_grow_with_owners_that_come_and_go() -> None:
    log = PathLog()
    for number in range(5000):
        log.opened(peer(f"owner-{number}", "tcp"))
    assert len(log._logged) == 4096


def test_a_worker_tells_how_it_is_reached_and_how_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    layout = dense(Geometry(1, 1, 64, 8))
    with (
        caplog.at_level(logging.INFO, "kvlink"),
        Worker(BlockPool.allocate(layout), "owner", transports="shm,tcp") as owner,
        Worker(BlockPool.allocate(layout), "reader", transports="tcp") as reader,
    ):
        for number in range(3):
            reader.pull(owner.offer(f"r{number}", [1]), into=[2]).wait()
    output = [record.getMessage() for record in caplog.records if record.name == "kvlink.path"]
    assert output == [
        f"started worker=owner agent={owner.card.agent} transports=shm,tcp",
        f"started worker=reader agent={reader.card.agent} transports=tcp",
        "reads from owner=owner transport=tcp",
    ]


SERVER = """
import kvlink
layout = kvlink.dense(kvlink.Geometry(1, 1, 64, 8))
with kvlink.Worker(kvlink.BlockPool.allocate(layout), "owner") as owner, kvlink.Worker(
    kvlink.BlockPool.allocate(layout), "reader"
) as reader:
    reader.pull(owner.offer("r", [1]), into=[2]).wait()
"""


@pytest.mark.parametrize(("misspelt", "lines"), [({}, 0), ({"KVLINK_TRANSPORT": "tcp"}, 1)])
def test_a_server_without_logging_sees_warnings_only(misspelt: dict[str, str], lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER],
        env={"PATH": "/bin"} | misspelt,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", lines), done.stderr


def verdict(rows: list[Row], absent: dict[str, str]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_verdict(rows, absent, console)
    return cast(io.StringIO, console.file).getvalue()


def test_the_demo_ends_with_a_verdict_and_the_next_command() -> None:
    slower = replace(GOOD, transport="tcp", gib_per_s=1.0)
    assert verdict([slower, GOOD], {"verbs": "no RDMA device"}).splitlines() == [
        "not on this machine: verbs: no RDMA device",
        "OK: 320 tokens, each as in the single-process run, over 2 transports.",
        "Next: kvlink bench pull --transport shm, or kvlink doctor for what would be faster here",
    ]
    assert "over 1 transport.\n" in verdict([GOOD], {})
    bad = replace(GOOD, transport="cma", tokens_equal=False)
    assert (
        verdict([GOOD, bad, Row(transport="tcp", error="why")], {})
        == "FAILED over cma, tcp. Next: kvlink doctor\n"
    )
