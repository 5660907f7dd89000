# SPDX-License-Identifier: Apache-2.0
"""Workloads in the formats of public suites: what their files mean, and that every byte of a burst is compared.

The formats are those of InferenceX's kv-transfer (branch collectivex-kv-transfer, kv_sweep.json) and of kvbench in NIXL
(benchmark/kvbench/examples), both under Apache-2.0; the files here are written in them, with values of our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.harness import results
from kvlink.benchmarks.harness.contents import Contents
from kvlink.benchmarks.harness.processes import BenchError
from kvlink.benchmarks.measurements import bursts
from kvlink.benchmarks.peers.contender import Draw
from kvlink.benchmarks.peers.here import Kvlink
from kvlink.benchmarks.workloads.suites import Point, Suite, suite_of
from kvlink.errors import ConfigError
from kvlink.transfer.engine import host_transports

HERE = [name for name, why_not in host_transports().items() if not why_not]
SWEEP: dict[str, Any] = {
    "version": 1,
    "suite": "kv-transfer",
    "workloads": {"kv-dsv4": ["fp8"]},
    "isl_ladder": [200, 8192],
    "page_tokens": [16, 64],
    "batch_sizes": [1, 2, 64],
    "ops": ["pull", "push"],
    "timing": {"warmup_per_trial": 1, "reps_per_trial": 2, "trials_per_point": 2},
    "pool_slack": 2.0,
    "seed": 5,
}
LLAMA = """
model_name: 'LLAMA3.1_8B'
num_layers: 32
num_query_heads_with_mha: 32
query_head_dimension: 128
gqa_num_queries_in_group: 4
num_model_params: 8000000000
"""
QWEN = "{model_name: 'QWEN3_8B', num_layers: 36, num_query_heads: 32, num_kv_heads: 8, query_head_dimension: 128}"
DEEPSEEK = """
model_name: 'DEEPSEEK_R1'
num_layers: 61
num_query_heads: 128
query_head_dimension: 128
embedding_dimension: 7168
rope_mla_dimension: 64
mla_latent_vector_dimension: 512
"""
CONFIGURATION = """
strategy:
  tp_size: {tp}
  pp_size: {pp}
  model_quant_mode: "fp8"
  kvcache_quant_mode: "{dtype}"
runtime:
  isl: 1000
  osl: 100
  num_requests: 10
system:
  hardware: "H100"
  backend: "SGLANG"
  access_pattern: "{pattern}"
  page_size: 16
"""


def sweep(folder: Path, **more: Any) -> Path:
    path = folder / "kv_sweep.json"
    path.write_text(json.dumps(SWEEP | more))
    return path


def kvbench(
    folder: Path, model: str, pattern: str, tp: int = 1, pp: int = 1, dtype: str = "fp8"
) -> list[Path]:
    paths = [folder / "model.yaml", folder / "block-tp1-pp1.yaml"]
    paths[0].write_text(model)
    paths[1].write_text(CONFIGURATION.format(pattern=pattern, tp=tp, pp=pp, dtype=dtype))
    return paths


def test_a_sweep_has_each_prompt_and_page_with_bursts_of_all_sizes(tmp_path: Path) -> None:
    suite = suite_of([sweep(tmp_path)])
    assert (suite.name, suite.trials, suite.bursts) == ("kv-transfer", 2, 2)
    assert [(point.tokens, point.page_tokens) for point in suite.points] == [
        (200, 16), (200, 64), (8192, 16), (8192, 64)
    ]  # fmt: skip
    assert {point.batches for point in suite.points} == {(1, 2, 64)}
    assert [text.partition(":")[0] for text in suite.left_out] == ["push"]


@pytest.mark.parametrize(("at", "pieces"), [(2, 33_192), (3, 9786)])
def test_a_request_has_the_bytes_and_pieces_that_the_suite_computes(
    tmp_path: Path, at: int, pieces: int
) -> None:
    """As plan_config of the suite has them for 8,192 tokens of kv-dsv4, in pages of 16 and 64, and bursts up to 8."""
    point = suite_of([sweep(tmp_path)]).points[at]
    groups = point.groups
    assert sum(group.layers * group.pages * group.page_entries * group.entry_bytes for group in groups) == (
        49_139_712
    )
    assert sum(group.layers * group.pages for group in groups) == pieces
    assert [geometry.num_blocks for geometry in point.geometries(8)] == [
        group.pages * 10 + 8 for group in groups
    ]


def test_a_geometry_of_ours_replaces_that_of_the_suite(tmp_path: Path) -> None:
    [point, *_] = suite_of([sweep(tmp_path)], "qwen3-8b").points
    assert point.workload == "kv-qwen3-8b"
    assert point.groups == ((72, 8 * 128, 16, 200),), "K and V of 36 layers, a byte an element"
    [point, *_] = suite_of([sweep(tmp_path, workloads={"kv-deepseek-v3": ["bf16"]})]).points
    assert point.groups == ((61, 576 * 2, 16, 200),)


@pytest.mark.parametrize(
    ("model", "pattern", "tp", "pp", "dtype", "group"),
    [
        (LLAMA, "block", 1, 1, "fp8", (1, 65_536, 16, 1000)),
        (LLAMA, "layer", 8, 2, "fp8", (16, 256, 16, 1000)),
        (LLAMA, "layer", 1, 1, "fp16", (32, 4096, 16, 1000)),
        (QWEN, "layer", 4, 1, "int8", (36, 512, 16, 1000)),
        (DEEPSEEK, "layer", 8, 1, "fp8", (61, 576, 16, 1000)),
        (DEEPSEEK, "block", 8, 16, "fp8", (1, 4 * 576, 16, 1000)),
    ],
)
def test_kvbench_means_a_ranks_share_in_pages_of_all_layers_or_of_one(
    tmp_path: Path, model: str, pattern: str, tp: int, pp: int, dtype: str, group: tuple[int, ...]
) -> None:
    """io_size of kvbench is entry × page, but every rank has the whole latent, which kvbench divides among them."""
    suite = suite_of(kvbench(tmp_path, model, pattern, tp, pp, dtype))
    [point] = suite.points
    assert point.groups == (group,)
    assert (point.batches, suite.name) == ((10,), "kvbench")


@pytest.mark.parametrize(
    "more",
    [
        {"workloads": {"kv-other": ["fp8"]}}, {"workloads": {"kv-qwen3-8b": ["fp4"]}}, {"workloads": 3},
        {"isl_ladder": []}, {"isl_ladder": [0]}, {"page_tokens": [True]}, {"batch_sizes": "1"}, {"timing": {}},
        {"pool_slack": "2"}, {"pool_slack": 0.5}, {"suite": "ep"},
    ],
)  # fmt: skip
def test_a_sweep_that_means_nothing_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"suite|workload|kv_sweep|cache of"):
        suite_of([sweep(tmp_path, **more)])


def test_files_that_are_no_workload_are_refused(tmp_path: Path) -> None:
    paths = kvbench(tmp_path, LLAMA, "block")
    for files in ([], paths[:1], paths[1:], [*paths, paths[0]], [tmp_path / "nothing.yaml"], [tmp_path]):
        with pytest.raises(ConfigError):
            suite_of(files)
    for text in (
        "[",
        "- 1",
        "a: {",
        "strategy: {tp_size: 1}",
        CONFIGURATION.format(pattern="x", tp=1, pp=1, dtype="fp8"),
    ):
        paths[1].write_text(text)
        with pytest.raises(ConfigError):
            suite_of(paths)


def small(point: Point, *batches: int) -> tuple[Suite, Point]:
    return Suite("kv-transfer", (), trials=2, bursts=2), point._replace(batches=batches)


@pytest.mark.verify
@pytest.mark.parametrize("transport", HERE)
def test_bursts_of_a_cache_of_several_groups_are_pulled(tmp_path: Path, transport: str) -> None:
    suite, point = small(suite_of([sweep(tmp_path)]).points[0], 1, 3, 64)
    one, three, none = bursts.rows(suite, point, transport, 32 << 20)
    assert (one["requests"], three["requests"], one["iters"]) == (1, 3, 4)
    assert (three["verified"], three["compared"]) == (True, 4)
    assert one["bytes"] == 30 * 50 * (576 + 132) + 31 * 2 * 576 + 61 * 128 * 576
    assert three["bytes"] == 3 * one["bytes"]
    assert three["pieces"] == 3 * (60 * 13 + 31 * 2 + 61 * 8)
    assert three["of_limit"] > 0
    assert none["requests"] == 64
    assert "--pool-gib" in none["why_not"]


@pytest.mark.verify
def test_a_request_of_a_burst_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@9")
    suite, point = small(suite_of([sweep(tmp_path)]).points[0], 4)
    [row] = bursts.rows(suite, point, "fault+loopback", 1 << 30)
    assert results.fails({"kind": "burst", **row})


@pytest.mark.verify
def test_a_request_of_a_burst_that_fails_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "fail-data@9..40")
    suite, point = small(suite_of([sweep(tmp_path)]).points[0], 4)
    with pytest.raises(BenchError, match="injected"):
        list(bursts.rows(suite, point, "fault+loopback", 1 << 30))


@pytest.mark.verify
@pytest.mark.parametrize("group", range(4))
def test_a_byte_of_any_group_counts(tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison comes after the pull in one page of one group, so that page is as if it was never pulled."""
    suite, point = small(suite_of([sweep(tmp_path)]).points[0], 2)
    landed = Kvlink._landed

    def spoiled(self: Any, draw: Draw) -> bool:
        contents: Contents = self._contents[group]
        contents.poison(self._worker.pool, draw.here[-1][group][-1:])
        return landed(self, draw)

    monkeypatch.setattr(Kvlink, "bare", lambda _: ())
    monkeypatch.setattr(Kvlink, "_landed", spoiled)
    [row] = bursts.rows(suite, point, "loopback", 1 << 30)
    assert row["verified"] is False


@pytest.mark.verify
def test_other_libraries_move_the_bursts_of_a_suite_in_turns(tmp_path: Path) -> None:
    batches = {"batch_sizes": [2], "isl_ladder": [200], "page_tokens": [16]}
    options = ["--suite", str(sweep(tmp_path, **batches)), "--path", "host", "--seconds", "0", "--json"]
    done = CliRunner().invoke(app, ["peers", *options, "--environments", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = [row for row in map(json.loads, done.stdout.splitlines()) if "p50_us" in row]
    assert {row["kind"] for row in rows} == {"burst"}
    assert {(row["workload"], row["tokens"], row["requests"]) for row in rows} == {("kv-dsv4", 200, 2)}
    assert {row["peer"] for row in rows} == {"kvlink", "bare"}
    assert all(row["verified"] for row in rows)


@pytest.mark.verify
def test_the_command_runs_the_files_of_kvbench(tmp_path: Path) -> None:
    files = map(str, kvbench(tmp_path, QWEN, "layer", 8))
    done = CliRunner().invoke(app, ["suite", *files, "--transport", "loopback", "--json"])
    assert done.exit_code == 0, done.output
    _, row, _ = map(json.loads, done.stdout.splitlines())
    assert (row["kind"], row["requests"], row["iters"], row["verified"]) == ("burst", 10, 24, True)
    assert row["bytes"] == 10 * 1000 * 36 * 256
