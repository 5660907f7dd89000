# SPDX-License-Identifier: Apache-2.0
"""The benchmarks at tiny sizes: that rows are whole, and that `verified` can be false. Timings gate nothing."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvlink import BlockPool, _core
from kvlink.benchmarks import app
from kvlink.benchmarks.harness import machine, results
from kvlink.benchmarks.harness.block_draws import Order, pieces_of
from kvlink.benchmarks.harness.contents import Contents
from kvlink.benchmarks.harness.statistics import quantiles_us
from kvlink.benchmarks.measurements import migrate, pull, rank_handoffs
from kvlink.benchmarks.peers import contender
from kvlink.benchmarks.workloads.arrivals import Arrivals
from kvlink.benchmarks.workloads.block_budget import Cache
from kvlink.benchmarks.workloads.models import MODELS
from kvlink.errors import ConfigError
from kvlink.layout import dense
from kvlink.transfer.engine import host_transports

pytestmark = pytest.mark.verify

HERE = [name for name, why_not in host_transports().items() if not why_not]
PULL_FIELDS = {
    "transport", "block_bytes", "blocks", "bytes", "iters", "order", "memory", "cpus", "min_us", "gib_per_s", "limit",
    "limit_us", "limits_us", "limit_gib_per_s", "of_limit", "overhead_us", "cpu_s_per_gib", "cpu_of_limit",
    "histogram_us", "verified", "compared", "transfers", *quantiles_us([1.0]),
}  # fmt: skip


def moved(*arguments: Any, **more: Any) -> dict[str, Any]:
    """Returns the row of a migration, after that of the first handoffs."""
    cold, row = migrate.rows(*arguments, **more)
    assert cold["kind"] == "cold"
    assert cold["first_us"] > 0
    return row


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "LEAST_MEMORY_BYTES", 1 << 20)


@pytest.mark.parametrize("transport", HERE)
@pytest.mark.parametrize(("block_bytes", "blocks", "iters"), [(4096, 8, 40), (65_536, 48, 3)])
def test_a_row_of_pull_is_whole(transport: str, block_bytes: int, blocks: int, iters: int) -> None:
    [row] = pull.rows(transport, block_bytes, blocks, iters)
    assert set(row) == PULL_FIELDS
    assert (row["verified"], row["compared"], row["transfers"]) == (True, iters, iters)
    assert row["bytes"] == block_bytes * blocks
    assert row["iters"] == iters
    assert 0 < row["min_us"] <= row["p50_us"] <= row["max_us"]
    assert sum(times for _, times in row["histogram_us"]) == iters
    assert row["of_limit"] == pytest.approx(row["gib_per_s"] / row["limit_gib_per_s"])
    assert row["cpu_s_per_gib"] > 0


@pytest.mark.parametrize("transport", HERE)
def test_one_block_has_a_floor_in_microseconds(transport: str) -> None:
    [row] = pull.rows(transport, 16_384, 1, 40)
    assert row["verified"] is True
    assert row["overhead_us"] == pytest.approx(row["p50_us"] - row["limit_us"])
    assert not any("threads" in name for name in row["limits_us"])


@pytest.mark.parametrize("transport", [name for name in HERE if name != "loopback"])
def test_the_limit_of_a_large_pull_has_as_many_threads_as_kvlink(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two threads of kvlink are faster than "the limit", which one thread sets."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    [row] = pull.rows(transport, 65_536, 48, 3)
    names = set(row["limits_us"])
    assert {name.partition(",")[0] for name in names} == {name for name in names if "threads" not in name}
    assert sum("2 threads" in name for name in names) * 2 == len(names)
    assert row["limit_us"] == min(row["limits_us"].values())


@pytest.mark.skipif(bool(_core.probe("fabric")[0]), reason=_core.probe("fabric")[0] or "it runs here")
def test_what_no_copy_reaches_has_no_limit() -> None:
    [row] = pull.rows("fabric", 65_536, 48, 3)
    assert (row["verified"], row["limit"], row["limits_us"]) == (True, "none: perftest measures verbs", {})


@pytest.mark.parametrize("memory", ["own", "anonymous", "huge"])
def test_memory_of_others_is_pulled(memory: str) -> None:
    if "cma" not in HERE:
        pytest.skip("cma does not run here")
    [row] = pull.rows("cma", 65_536, 8, 3, memory=memory)
    assert (row["verified"], row["memory"]) == (True, memory)


def test_memory_that_a_transport_cannot_use_is_refused() -> None:
    for transport, memory in (("shm", "huge"), ("tcp", "anonymous"), ("cma", "mine")):
        with pytest.raises(ConfigError, match="memory"):
            next(pull.rows(transport, 4096, 8, 1, memory=memory))


@pytest.mark.parametrize("transport", HERE)
@pytest.mark.parametrize(
    ("fault", "block_bytes", "blocks"),
    [("corrupt-data@every:5", 4096, 8), ("corrupt-data@40..48", 65_536, 32)],
)
def test_flipped_bytes_of_any_pull_are_seen(
    transport: str, fault: str, block_bytes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of large pulls, each of which is compared."""
    monkeypatch.setenv("KVLINK_FAULT", fault)
    [row] = pull.rows(f"fault+{transport}", block_bytes, blocks, 60)
    assert (row["verified"], row["compared"]) == (False, 60)
    assert results.fails(row)


def test_runs_are_pulled_as_runs() -> None:
    [row] = pull.rows("shm" if "shm" in HERE else "loopback", 4096, 10, 40, "runs:4")
    assert row["verified"] is True
    assert row["order"] == "runs:4"


def test_larger_blocks_are_fewer_and_prefill_makes_a_share_of_ttft() -> None:
    size = {"tokens": 100, "transport": "loopback", "tp": "8", "iters": 3}
    small = moved("qwen3-8b", **size)
    large = moved("qwen3-8b", **size, block_tokens=64, prefill_ms=50)
    assert large["ops"] < small["ops"]
    assert large["bytes"] == small["bytes"]
    assert large["verified"] is True
    assert "of_ttft" not in small
    assert large["of_ttft"] == pytest.approx(large["p50_us"] / (50_000 + large["p50_us"]))


def test_runs_are_migrated_as_runs() -> None:
    runs = moved("qwen3-8b", 1000, "loopback", tp="8", iters=3, order="runs:100")
    random = moved("qwen3-8b", 1000, "loopback", tp="8", iters=3)
    assert runs["ops"] < random["ops"] / 10


@pytest.mark.parametrize("order", ["", "sorted", "runs", "runs:", "runs:0", "runs:-1", "runs:x", "random:2"])
def test_unknown_orders_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="write random, or runs:K"):
        next(pull.rows("loopback", 4096, 8, 1, order))


def test_pulls_larger_than_the_pools_may_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="ask for fewer blocks"):
        next(pull.rows("loopback", 1 << 20, 4096))


def test_rows_without_a_wish_are_enough_to_fit_a_cost_model_with_its_error() -> None:
    assert pull.shapes(None, None) == [
        (16_384, 4096), (65_536, 4096), (16_384, 1), (4096, 256), (65_536, 256)
    ]  # fmt: skip
    assert pull.shapes([4096], None) == [(4096, 4096)]
    assert pull.shapes(None, 7) == [(16_384, 7), (65_536, 7)]


@pytest.mark.parametrize("run", [1, 3, 8])
def test_a_draw_has_whole_runs_and_no_block_twice(run: int) -> None:
    rng = np.random.default_rng(run)
    draws = Order(run).draw(rng, 96, [10] * 4)
    drawn = np.concatenate(draws)
    assert len(np.unique(drawn)) == 40
    assert drawn.max() < 96
    for ids in draws:
        breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1) + 1
        assert all(at % run == 0 for at in breaks)


def test_pieces_merge_what_adjoins_at_both_ends() -> None:
    from_ids = np.array([5, 6, 7, 9], np.uint32)
    to_ids = np.array([2, 3, 8, 9], np.uint32)
    assert pieces_of(from_ids, to_ids, 16, 1000, 2000).tolist() == [
        [1080, 2032, 32],
        [1112, 2128, 16],
        [1144, 2144, 16],
    ]


@pytest.mark.parametrize("model", ["qwen2.5-7b", "deepseek-v3"])
def test_every_byte_counts(model: str) -> None:
    layout = dense(Cache(model).prefill(6)[0])
    owner, reader = BlockPool.allocate(layout), BlockPool.allocate(layout)
    contents = Contents(layout, 1)
    contents.fill(owner)
    contents.fill(reader)
    ids, tokens = np.array([4, 1, 3], np.uint32), 2 * layout.block_tokens + 5
    assert contents.equal(reader, ids, ids, tokens)
    assert not contents.equal(reader, ids, ids[::-1].copy(), tokens)
    plane_bytes = layout.num_blocks * layout.block_stride
    row_bytes = layout.block_stride // layout.block_tokens
    last = len(layout.planes) - 1
    for plane, block, byte in [(0, 4, 0), (last, 1, layout.block_stride - 1), (last, 3, 5 * row_bytes - 1)]:
        at = plane * plane_bytes + block * layout.block_stride + byte
        reader.numpy()[at] ^= 1
        assert not contents.equal(reader, ids, ids, tokens)
        reader.numpy()[at] ^= 1
    reader.numpy()[last * plane_bytes + 3 * layout.block_stride + 5 * row_bytes] ^= 1  # after the last token
    assert contents.equal(reader, ids, ids, tokens)
    contents.poison(reader, ids[:1])
    assert not contents.equal(reader, ids, ids, tokens)


@pytest.mark.parametrize("transport", HERE)
def test_a_row_of_migrate_is_whole(transport: str) -> None:
    row = moved("Qwen3-8B", 100, transport, tp="8", iters=3)
    assert (row["verified"], row["compared"], row["failed"]) == (True, 3, 0)
    assert row["bytes"] == 100 * 36 * 2 * 128 * 2
    assert row["cpu_s_per_gib"] > 0
    assert row["ops"] > 0
    assert 0 < row["p50_us"] <= row["max_us"]
    assert all(0 <= row[f"{part}_us"] <= row["p50_us"] for part in rank_handoffs.PARTS)
    assert row["p99_us"] is None, "three requests have no 99th percentile"


def test_overhead_is_what_each_request_did_not_spend_reading() -> None:
    row = moved("qwen3-8b", 40, "loopback", tp="8", iters=1)
    assert row["overhead_us"] == pytest.approx(row["p50_us"] - row["wire_us"])
    assert row["overhead_us"] >= row["offer_us"] + row["plan_us"]


@pytest.mark.parametrize("transport", sorted({"loopback", "shm"} & set(HERE)))
def test_requests_of_several_slots_keep_their_blocks_apart(transport: str) -> None:
    row = moved("qwen3-8b", [40, 100], transport, tp="8", iters=30, slots=3)
    assert (row["iters"], row["slots"], row["failed"], row["late_us"]) == (30, 3, 0, 0)
    assert row["achieved_per_s"] > 0
    assert (row["verified"], row["compared"], row["transfers"]) == (None, 4, 30)


def beside_row(monkeypatch: pytest.MonkeyPatch, transport: str) -> dict[str, Any]:
    monkeypatch.setattr(rank_handoffs, "_MOST_BATCHES", 1)
    cold, _, row = migrate.rows("qwen3-8b", 40, transport, tp="8", iters=2, beside="cpu")
    assert (cold["kind"], row["kind"]) == ("cold", "beside")
    return row


@pytest.mark.parametrize("transport", HERE)
def test_handoffs_beside_a_loop_are_compared_with_those_without(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = beside_row(monkeypatch, transport)
    assert (row["compute"], row["tokens"], row["iters"], row["failed"]) == ("cpu", 40, 64, 0)
    assert (row["verified"], row["compared"]) == (True, 128), "those alone are compared, too"
    assert row["ratio"] == pytest.approx(row["p50_us"] / row["alone_us"])
    assert row["step_ratio"] == pytest.approx(row["step_us"] / row["step_alone_us"])
    assert row["steps"] > 0


def test_wrong_bytes_and_failures_beside_a_loop_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@100")
    wrong = beside_row(monkeypatch, "fault+loopback")
    assert (wrong["verified"], results.fails(wrong)) == (False, True)
    monkeypatch.setenv("KVLINK_FAULT", "fail-data@100..101")
    failed = beside_row(monkeypatch, "fault+loopback")
    assert failed["failed"] > 0
    assert results.fails(failed)
    assert failed["compared"] + failed["failed"] == 128


def test_a_loop_needs_requests_that_come_alone() -> None:
    with pytest.raises(ConfigError, match="omit --rate, --speed and --slots"):
        next(migrate.rows("qwen3-8b", 40, "loopback", beside="cpu", slots=2))


def test_several_prefills_hand_off_to_one_decode() -> None:
    row = moved("qwen3-8b", 40, "loopback", tp="8", iters=6, prefills=3)
    assert (row["verified"], row["compared"], row["prefills"]) == (True, 6, 3)


@pytest.mark.parametrize(
    "how", [{"slots": 2}, {}, {"arrivals": Arrivals.random(4, 100)}], ids=["slots", "one", "open"]
)
def test_wrong_bytes_of_a_migration_are_seen(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:1")
    tokens = [40] * 4 if "arrivals" in how else 40
    row = moved("qwen3-8b", tokens, "fault+loopback", iters=4, **how)
    assert row["verified"] is False
    assert results.fails(row)


@pytest.mark.parametrize("how", [{"slots": 4}, {"arrivals": Arrivals.random(40, 200)}], ids=["slots", "open"])
def test_failed_requests_are_infinitely_long(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in the percentiles and in the exit status: else a peer that dies makes the tail shorter."""
    monkeypatch.setenv("KVLINK_FAULT", "fail-data@30..120")
    tokens = [40] * 40 if "arrivals" in how else 40
    row = moved("qwen3-8b", tokens, "fault+loopback", tp="8", iters=40, **how)
    assert row["failed"] > 0
    assert row["iters"] == 40
    assert row["max_us"] == math.inf
    assert results.fails(row)


def test_there_are_no_more_slots_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "most_blocks", lambda _: 7)
    assert moved("qwen3-8b", 40, "loopback", tp="8", iters=4, slots=100)["slots"] == 2


@pytest.mark.parametrize(
    "command", ["pull --block-bytes 4096 --blocks 8 --iters 4", "migrate --tokens 40 --tp 8"]
)
def test_results_end_with_what_others_did(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.OtherLoad, "share", lambda _: 0.25)
    arguments = [*command.split(), "--transport", "loopback"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    first, *found, last = map(json.loads, done.output.splitlines())
    assert (first["kind"], first["schema"]) == ("machine", results.SCHEMA)
    assert last == {"kind": "noise", "run": first["run"], "of": f"bench {arguments[0]}", "other_load": 0.25}
    assert {row["run"] for row in found} == {first["run"]}
    assert {row["kind"] for row in found} <= {arguments[0], "cold"}
    assert "other processes had 25.0% of all CPU time" in CliRunner().invoke(app, arguments).output
    monkeypatch.setattr(machine.OtherLoad, "share", lambda _: 0.001)
    assert "other processes" not in CliRunner().invoke(app, arguments).output


def test_requests_of_a_trace_are_migrated_one_after_the_other() -> None:
    row = moved("qwen3-8b", [100, 40, 10_000_000], "loopback", tp="8", iters=4)
    assert (row["verified"], row["tokens"], row["left_out"], row["iters"]) == (True, 70, 1, 4)
    assert row["bytes"] == 70 * 36 * 2 * 128 * 2


def test_options_with_several_values_are_a_sweep() -> None:
    command = "migrate --transport loopback --tp 8 --tokens 16,40 --rate 20,5000 --requests 12 --json"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    found = [row for row in map(json.loads, done.output.splitlines()) if row["kind"] == "migrate"]
    assert [(row["tokens"], row["arrivals"]) for row in found] == [
        (tokens, f"Poisson, {rate}/s") for tokens in (16, 40) for rate in (20, 5000)
    ]
    assert all(row["offered_per_s"] > 0 and row["achieved_per_s"] > 0 for row in found)


def test_models_too_large_or_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="more ranks"):
        next(migrate.rows("llama-3.1-405b", 100_000, "loopback"))
    with pytest.raises(ConfigError, match="choose from llama"):
        next(migrate.rows("gpt-2", 10, "loopback"))


@pytest.mark.parametrize(
    ("model", "kib_per_token"),
    [
        ("llama-3.1-8b", 128), ("llama-3.1-70b", 320), ("llama-3.1-405b", 504), ("qwen2.5-7b", 56),
        ("qwen3-8b", 144), ("qwen3-30b-a3b", 96), ("qwen3-235b-a22b", 188), ("deepseek-v3", 68.625),
        ("gpt-oss-120b", 72),
    ],
)  # fmt: skip
def test_geometries_are_those_of_the_models(model: str, kib_per_token: float) -> None:
    assert dense(Cache(model).prefill(1)[0]).token_bytes == kib_per_token * 1024
    assert len(MODELS) == 9
