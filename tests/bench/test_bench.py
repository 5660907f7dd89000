# SPDX-License-Identifier: Apache-2.0
"""The benchmarks at tiny sizes: that rows are whole, and that `verified` can be false. Timings gate nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvlink import BlockPool
from kvlink.benchmarks import app
from kvlink.benchmarks.harness import machine
from kvlink.benchmarks.harness.block_draws import Order, pieces_of
from kvlink.benchmarks.harness.contents import Contents
from kvlink.benchmarks.harness.quantiles import quantiles_us
from kvlink.benchmarks.measurements import migrate, plan, pull, rank_handoffs
from kvlink.benchmarks.workloads.block_budget import Cache
from kvlink.benchmarks.workloads.models import MODELS
from kvlink.errors import ConfigError
from kvlink.layout import dense
from kvlink.transfer.engine import host_transports

pytestmark = pytest.mark.verify

LOOP = [*rank_handoffs.PHASES, rank_handoffs.OVERHEAD]
ROWS = [*LOOP, rank_handoffs.LIMIT]
HERE = [name for name, why_not in host_transports().items() if not why_not]
PULL_FIELDS = {
    "transport", "block_bytes", "blocks", "bytes", "iters", "order", "min_us", "p50_us", "p99_us", "gib_per_s",
    "cpu_s_per_gib", "verified", "verified_pulls", "limit", "limit_gib_per_s", "of_limit", "read_us", "gb_per_s",
    *quantiles_us([1.0]),
}  # fmt: skip


def more_fields(transport: str) -> set[str]:
    """Where the limit is the better of two copies, the plain one is given as well."""
    return {"of_memcpy"} if transport in ("loopback", "shm") else set()


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "_LEAST_SECTION_BYTES", 1 << 20)


@pytest.mark.parametrize("transport", HERE)
@pytest.mark.parametrize(("block_bytes", "blocks", "iters"), [(4096, 8, 40), (65_536, 48, 3)])
def test_a_row_of_pull_is_whole(transport: str, block_bytes: int, blocks: int, iters: int) -> None:
    [row] = pull.rows(transport, block_bytes, blocks, iters)
    assert set(row) == PULL_FIELDS | more_fields(transport)
    assert row["verified"] is True
    assert row["bytes"] == block_bytes * blocks
    assert 1 <= row["verified_pulls"] <= row["iters"] == iters
    assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
    assert row["of_limit"] == pytest.approx(row["gib_per_s"] / row["limit_gib_per_s"])
    assert row["cpu_s_per_gib"] > 0


@pytest.mark.parametrize("transport", HERE)
def test_one_block_has_a_floor_in_microseconds(transport: str) -> None:
    [row] = pull.rows(transport, 16_384, 1, 40)
    assert set(row) == PULL_FIELDS | more_fields(transport) | {"limit_us", "overhead_us"}
    assert row["verified"] is True
    assert row["verified_pulls"] == 40
    assert row["overhead_us"] == pytest.approx(row["p50_us"] - row["limit_us"])


@pytest.mark.parametrize("transport", HERE)
def test_flipped_bytes_are_not_verified(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:5")
    [row] = pull.rows(f"fault+{transport}", 4096, 8, 40)
    assert row["verified"] is False
    assert row["verified_pulls"] == 40


def test_runs_are_pulled_as_runs() -> None:
    [row] = pull.rows("shm" if "shm" in HERE else "loopback", 4096, 10, 40, "runs:4")
    assert row["verified"] is True
    assert row["order"] == "runs:4"


def test_blocks_of_an_allocator_are_pulled_and_migrated() -> None:
    transport = "shm" if "shm" in HERE else "loopback"
    [row] = pull.rows(transport, 4096, 10, 40, "allocator:4")
    assert row["verified"] is True
    assert row["order"] == "allocator:4"
    for row in migrate.rows("qwen3-8b", [100, 40, 300], transport, tp="8", iters=4, order="allocator:4:1"):
        assert row["verified"] is True
        assert row["order"] == "allocator:4:1"


def test_larger_blocks_are_fewer_and_prefill_makes_a_share_of_ttft() -> None:
    size = {"tokens": 100, "transport": "loopback", "tp": "8", "iters": 3}
    small = list(migrate.rows("qwen3-8b", **size))
    large = list(migrate.rows("qwen3-8b", **size, block_tokens=64, prefill_ms=50))
    assert large[0]["ops"] < small[0]["ops"]
    assert large[0]["bytes"] == small[0]["bytes"]
    assert all(row["verified"] for row in large)
    assert "of_ttft" not in small[0]
    whole = large[ROWS.index("whole")]
    assert whole["of_ttft"] == pytest.approx(whole["p50_us"] / (50_000 + whole["p50_us"]))


def test_runs_are_migrated_as_runs() -> None:
    runs, *_ = migrate.rows("qwen3-8b", 1000, "loopback", tp="8", iters=3, order="runs:100")
    random, *_ = migrate.rows("qwen3-8b", 1000, "loopback", tp="8", iters=3)
    assert runs["ops"] < random["ops"] / 10


@pytest.mark.parametrize("order", ["", "sorted", "runs", "runs:", "runs:0", "runs:-1", "runs:x", "random:2"])
def test_unknown_orders_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="write random, runs:K"):
        next(pull.rows("loopback", 4096, 8, 1, order))


def test_pulls_larger_than_the_pools_may_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="ask for fewer blocks"):
        next(pull.rows("loopback", 1 << 20, 4096))


def test_rows_without_a_wish_are_those_of_the_bars() -> None:
    assert pull.shapes(None, None) == [(16_384, 4096), (65_536, 4096), (16_384, 1)]
    assert pull.shapes([4096], None) == [(4096, 4096)]
    assert pull.shapes(None, 7) == [(16_384, 7), (65_536, 7)]


@pytest.mark.parametrize("run", [1, 3, 8])
def test_a_draw_has_whole_runs_and_no_block_twice(run: int) -> None:
    rng = np.random.default_rng(run)
    draws = Order(run).draw(rng, 96, 4, 10)
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
def test_rows_of_migrate_are_whole(transport: str) -> None:
    rows = list(migrate.rows("Qwen3-8B", 100, transport, tp="8", iters=3))
    assert [row["phase"] for row in rows] == ROWS
    for row in rows:
        assert row["verified"] is True
        assert row["bytes"] == 100 * 36 * 2 * 128 * 2
        assert row["cpu_s_per_gib"] > 0
        assert row["ops"] > 0
        assert 0 <= row["p50_us"] <= row["p99_us"]
    whole = rows[ROWS.index("whole")]["p50_us"]
    assert all(row["p50_us"] <= whole for row in rows)


def test_overhead_is_what_each_request_did_not_spend_reading() -> None:
    [request] = ([row["p50_us"] for row in migrate.rows("qwen3-8b", 40, "loopback", tp="8", iters=1)],)
    us = dict(zip(ROWS, request, strict=True))
    assert us["overhead"] == pytest.approx(us["whole"] - us["wire"])
    assert us["overhead"] >= us["offer"] + us["plan"]


@pytest.mark.parametrize("transport", sorted({"loopback", "shm"} & set(HERE)))
def test_requests_of_several_slots_keep_their_blocks_apart(transport: str) -> None:
    rows = list(migrate.rows("qwen3-8b", [40, 100], transport, tp="8", iters=30, slots=3))
    assert [row["phase"] for row in rows] == LOOP  # nobody is late: nothing was due
    for row in rows:
        assert (row["verified"], row["iters"], row["slots"], row["failed"]) == (True, 30, 3, 0)
        assert row["made_per_s"] > 0


def test_wrong_bytes_in_a_slot_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:1")
    rows = migrate.rows("qwen3-8b", 40, "fault+loopback", iters=4, slots=2)
    assert not any(row["verified"] for row in rows)


def test_there_are_no_more_slots_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "most_blocks", lambda _: 7)
    rows = migrate.rows("qwen3-8b", 40, "loopback", tp="8", iters=4, slots=100)
    assert {row["slots"] for row in rows} == {2}


def posted(ns: float | None) -> dict[str, Any]:
    return {
        "layout": plan.PROMISED.name, "descriptors": 40_960, "bytes": 40_960 * 4096, "fresh_ns_per_descriptor": 22.0,
        "posted_ns_per_descriptor": ns,
    }  # fmt: skip


def test_planning_and_posting_is_judged_by_the_promised_transfer() -> None:
    [held] = plan.verdicts([posted(100.0), posted(8.0) | {"layout": "another"}])
    assert (held["kind"], held["blocks"], held["block_bytes"], held["holds"]) == ("bar", 40_960, 4096, True)
    assert held["got"] == pytest.approx(122 * 0.04096)
    [broken] = plan.verdicts([posted(101.0)])
    assert broken["holds"] is False
    assert not list(plan.verdicts([posted(None)]))


def test_the_promised_transfer_is_a_case() -> None:
    first = next(plan.rows())
    judged = {name: first[name] for name in ("layout", "descriptors", "bytes")}
    assert judged == {name: posted(None)[name] for name in judged}


@pytest.mark.parametrize(
    "command", ["pull --block-bytes 4096 --blocks 8 --iters 4", "migrate --tokens 40 --tp 8"]
)
def test_results_end_with_what_others_did(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.OtherLoad, "share", lambda _: 0.25)
    arguments = [*command.split(), "--transport", "loopback"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    *_, last = map(json.loads, done.output.splitlines())
    assert last == {"kind": "noise", "of": f"bench {arguments[0]}", "other_load": 0.25}
    assert "other processes had 25.0% of all CPU time" in CliRunner().invoke(app, arguments).output
    monkeypatch.setattr(machine.OtherLoad, "share", lambda _: 0.001)
    assert "other processes" not in CliRunner().invoke(app, arguments).output


def test_requests_of_a_trace_are_migrated_one_after_the_other() -> None:
    rows = list(migrate.rows("qwen3-8b", [100, 40, 10_000_000], "loopback", tp="8", iters=4))
    assert [row["phase"] for row in rows] == ROWS
    for row in rows:
        assert row["verified"] is True
        assert (row["tokens"], row["left_out"], row["iters"]) == (70, 1, 4)
        assert row["bytes"] == 70 * 36 * 2 * 128 * 2


def test_flipped_bytes_of_a_migration_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:1")
    assert not any(row["verified"] for row in migrate.rows("qwen3-8b", 40, "fault+loopback", iters=2))


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
