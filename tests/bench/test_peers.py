# SPDX-License-Identifier: Apache-2.0
"""The contest with other libraries: played by kvlink, bare ways and, where `make peers` was run, the peers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.harness import machine
from kvlink.benchmarks.harness.block_draws import Order
from kvlink.benchmarks.harness.processes import BenchError
from kvlink.benchmarks.harness.results import brief
from kvlink.benchmarks.harness.statistics import quantile_interval, quantiles_us
from kvlink.benchmarks.peers import contender, contest, run, setup
from kvlink.benchmarks.peers.adapters.blocks import Blocks
from kvlink.benchmarks.peers.contender import (
    BARE,
    KVLINK,
    ContenderInfo,
    Draw,
    Moved,
    Shape,
    limit_of,
    of_blocks,
    of_burst,
)
from kvlink.benchmarks.peers.modes import HOST, MODES, PATHS, Mode
from kvlink.benchmarks.peers.pair import Pair
from kvlink.benchmarks.workloads.suites import Group, Point, Suite
from kvlink.errors import ConfigError

pytestmark = pytest.mark.verify

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "peers"
SMALL = of_blocks(4096, 8)
SWEEP = Point("kv-two", 100, 16, (Group(3, 64, 16, 100), Group(2, 24, 16, 30)), (2,))
"""Two kinds of caches, with a last page that is partly used."""
MEASURED = {
    *quantiles_us([1.0]), "quantiles_us", "gib_per_s", "cpu_s_per_gib", "transfers", "compared", "turns", "verified",
    "other_load",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "LEAST_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(contender, "_TURN_BYTES", 1 << 17)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "shape", [SMALL, of_blocks(16_384, 1), of_burst("suite", SWEEP, 2)], ids=["blocks", "block", "burst"]
)
def test_who_is_here_is_measured_and_who_is_not_is_named(path: str, shape: Shape, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        rows = list(contest.rows(path, shape, 0, tmp_path, log))
    ran = [row for row in rows if "why_not" not in row]
    assert {row["peer"] for row in ran} == {KVLINK, BARE}
    for row in ran:
        assert set(row) >= MEASURED
        assert row["verified"] is True
        assert row["turns"] * shape.transfers == row["transfers"]
        assert 0 <= row["other_load"] <= 1
    absent = {(row["peer"], row["mode"]): row["why_not"] for row in rows if "why_not" in row}
    assert set(absent) >= {(mode.peer, mode.name) for mode in MODES if mode.path == path}
    assert all("not installed" in absent[mode.peer, mode.name] for mode in MODES if mode.path == path)
    assert "run\n    make peers" in setup.advice(rows, tmp_path)


@pytest.mark.parametrize("shape", [of_blocks(4096, 8), of_burst("suite", SWEEP, 2)], ids=["blocks", "burst"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.peer}-{mode.name}")
def test_a_peer_moves_every_byte(mode: Mode, shape: Shape, tmp_path: Path) -> None:
    python = ENVIRONMENTS / mode.peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment for {mode.peer}: make peers")
    with (tmp_path / "log").open("w") as log:
        pair = Pair(mode, python, shape, 7, log)
        try:
            draws = shape.draws(Order(), np.random.default_rng(1), 1)
            pair.prepare(draws)
            moved = pair.move()
            assert len(moved.us) == 1
            assert moved.cpu_ns > 0
            assert pair.wrong() == 0
            pair.prepare(draws)
            assert pair.wrong() == 2  # poisoned and not moved
        finally:
            pair.close()


class Liar:
    """A contender that moves nothing, or fails."""

    order = Order()
    info = ContenderInfo("liar", "default", HOST, "1", "")

    def __init__(self, fails: bool) -> None:
        self._fails = fails
        self._draws: Sequence[Draw] = ()

    def prepare(self, draws: Sequence[Draw]) -> None:
        self._draws = draws

    def move(self) -> Moved:
        if self._fails and len(self._draws) > 1:
            raise BenchError("it broke")
        return Moved([1.0] * (len(self._draws) - 1), 1)

    def wrong(self) -> int:
        return len(self._draws)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_peer_that_lies_or_breaks_is_a_row_that_says_so(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "_gather", lambda *_: ([Liar(fails)], []))
    with (tmp_path / "log").open("w") as log:
        [row] = contest.rows(HOST, SMALL, 0, tmp_path, log)
    assert row.get("why_not") == ("it broke" if fails else None)
    assert row.get("verified") == (None if fails else False)


def test_a_peer_process_that_dies_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with (tmp_path / "log").open("w") as log, pytest.raises(BenchError, match="nixl default ended"):
        Pair(MODES[0], python, SMALL, 7, log)


def test_a_launcher_that_dies_is_reported(tmp_path: Path) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nexit 3\n")
    launcher.chmod(0o755)
    mode = next(mode for mode in MODES if mode.launched)
    with (tmp_path / "log").open("w") as log, pytest.raises(BenchError, match="openmpi get did not start"):
        Pair(mode, tmp_path / "python", SMALL, 7, log)


def test_the_adapters_protocol_answers_errors(tmp_path: Path) -> None:
    folder = Path(contest.__file__).parent
    asked = json.dumps({"do": "connect", "arguments": {"card": "{}"}}) + "\n"
    done = subprocess.run(
        [sys.executable, "-m", "adapters", "nixl"], cwd=folder, input=asked, capture_output=True, text=True
    )
    assert "error" in json.loads(done.stdout)
    assert done.returncode == 0


@pytest.mark.parametrize("groups", [[(8, 64)], [(5, 64), (3, 24)]])
def test_blocks_know_what_they_should_hold(groups: list[tuple[int, int]]) -> None:
    here, there = Blocks(groups, seed=3), Blocks(groups, seed=3)
    ids = np.array([1, 5], np.int32)
    assert here.equal(ids, ids)
    assert not here.equal(ids, np.array([2, 5], np.int32))
    assert not here.equal(ids, np.array([1, 6], np.int32))
    here.poison(ids[:1])
    assert not here.equal(ids, ids)
    assert here.equal(ids[1:], ids[1:])
    assert there.equal(ids, ids)


def test_blocks_keep_their_bytes_in_other_memory() -> None:
    blocks, ids = Blocks([(8, 64)], seed=3), np.arange(8, dtype=np.int32)
    memory = np.zeros(blocks.num_bytes, np.uint8)
    blocks.move_to(memory)
    assert blocks.address == memory.ctypes.data
    assert blocks.equal(ids, ids)
    memory[100] ^= 1
    assert not blocks.equal(ids, ids)


def row(
    peer: str, mode: str, p50_us: float, cpu: float = 1.0, blocks: int = 256, path: str = HOST
) -> dict[str, Any]:
    return {
        "peer": peer, "mode": mode, "path": path, "block_bytes": 16_384, "blocks": blocks, "p50_us": p50_us,
        "cpu_s_per_gib": cpu,
    }  # fmt: skip


def test_each_transport_has_the_bare_calls_of_its_kind_of_memory_as_limit() -> None:
    bare = [
        row(BARE, "memcpy", 90),
        row(BARE, "memcpy, 2 threads", 80),
        row(BARE, "process_vm_readv, 2 threads", 100),
    ]
    limits = {mode: limit_of(row(KVLINK, mode, 100), bare) for mode in ("shm", "cma", "fault+cma")}
    assert {mode: limit and limit["p50_us"] for mode, limit in limits.items()} == {
        "shm": 80, "cma": 100, "fault+cma": 100
    }  # fmt: skip
    assert limit_of(row(KVLINK, "cma", 100), bare[:2]) is None


def test_a_tour_takes_every_block_once_and_is_not_counted() -> None:
    made, seen = contest.Score(), []

    class Tourist(Liar):
        def move(self) -> Moved:
            seen.extend(draw.here[0][0].tolist() for draw in self._draws)
            return super().move()

    contest._tour(Tourist(fails=False), made, SMALL)
    assert sorted(chain.from_iterable(seen)) == list(range(SMALL.geometries[0].num_blocks))
    assert made.turns == -(-len(seen) // (1 + SMALL.transfers))
    assert made.wrong == len(seen)


def test_a_tour_of_a_burst_takes_every_page_of_every_group() -> None:
    shape = of_burst("suite", SWEEP, 2)
    for group, geometry in enumerate(shape.geometries):
        taken = {
            page
            for turn in shape.tour()
            for draw in turn
            for request in draw.here
            for page in request[group].tolist()
        }
        assert taken == set(range(geometry.num_blocks))


@pytest.mark.parametrize("order", [Order(), Order(2)])
def test_no_page_is_twice_in_a_burst_or_in_what_warms_it_up(order: Order) -> None:
    shape = of_burst("suite", SWEEP, 3)
    first, *others = shape.draws(order, np.random.default_rng(2), 5)
    assert [len(draw.there) for draw in others] == [3] * len(others)
    for end in ("there", "here"):
        for group, pages in enumerate(shape.blocks):
            drawn = [request[group] for draw in (first, *others) for request in getattr(draw, end)]
            assert [len(ids) for ids in drawn] == [order.run, *[pages] * (len(drawn) - 1)]
            assert len(np.unique(np.concatenate(drawn))) == sum(map(len, drawn))


def test_the_bytes_of_a_burst_are_those_of_its_rows() -> None:
    shape = of_burst("suite", SWEEP, 2)
    assert shape.num_bytes == 2 * (3 * 100 * 64 + 2 * 30 * 24)
    assert shape.pieces == 2 * (3 * 7 + 2 * 2)


def test_shapes_and_paths_are_checked() -> None:
    assert run.shapes(None, None) == [of_blocks(*each) for each in run.SHAPES]
    assert run.shapes([4096], [1, 2]) == [of_blocks(4096, 1), of_blocks(4096, 2)]
    suite = Suite("suite", (SWEEP._replace(batches=(1, 64)),), 1, 1, 1)
    assert run.bursts(suite, 1 << 20) == [of_burst("suite", SWEEP, 1)]
    with pytest.raises(ConfigError, match="--pool-gib"):
        run.bursts(suite, 1 << 10)
    for size, blocks in ((12, 1), (1 << 20, 1024)):
        with pytest.raises(ConfigError, match="at most 512 MiB"):
            run.shapes([size], [blocks])
    unmeasured = list(chain.from_iterable(run.contests("host", [], 0, Path(), sys.stderr)))
    assert all(row["why_not"] for row in unmeasured)
    with pytest.raises(ConfigError, match="choose from host, tcp"):
        run.check_paths("wire")


def test_rows_say_how_sure_their_tails_are() -> None:
    few, many = ([float(us) for us in range(count, 0, -1)] for count in (8, 1000))
    made = [contest._row(Liar.info, SMALL, contest.Score(us=us)) for us in (few, many)]
    assert (made[0]["p90_high_us"], made[0]["p99_high_us"]) == (None, None)
    assert [(row["p90_us"], row["p99_us"]) for row in made] == [(None, None), (900, 990)]
    for name, share in (("p90", 0.9), ("p99", 0.99)):
        assert (made[1][f"{name}_low_us"], made[1][f"{name}_high_us"]) == quantile_interval(many, share)
    shown = brief({"kind": "peers", **made[1]})
    assert {"p50_us", "p99_us"} < set(shown)
    assert not [name for name in shown if "_low_" in name or "_high_" in name]


def test_the_command_prints_machine_rows_and_noise(tmp_path: Path) -> None:
    options = ["--block-bytes", "4096", "--blocks", "8", "--path", "host", "--seconds", "0", "--json"]
    places = ["--environments", str(tmp_path), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(app, ["peers", *options, *places])
    assert done.exit_code == 0, done.output
    first, *rows, noise = map(json.loads, done.stdout.splitlines())
    assert noise["kind"] == "noise"
    assert first["kind"] == "machine"
    assert first["cores"] >= 1
    assert {row["kind"] for row in rows} == {"peers"}
    measured = [row["peer"] for row in rows if "p50_us" in row]
    assert KVLINK in measured
    assert BARE in measured


def test_other_load_leaves_our_own_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100.0, 200.0, 10.0), (108.0, 210.0, 13.0)])  # busy, whole, ours
    monkeypatch.setattr(machine, "_times", lambda: next(times))
    assert machine.OtherLoad().share() == pytest.approx((8 - 3) / 10)


def test_times_of_this_machine_rise() -> None:
    busy, whole, ours = machine._times()
    assert 0 < ours <= busy < whole
