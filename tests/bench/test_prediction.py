# SPDX-License-Identifier: Apache-2.0
"""The predictor: against figures derived by hand, a published table, and transfers made up from a known cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlink.benchmarks.harness.results import read_rows
from kvlink.benchmarks.prediction.calibration import (
    Control,
    Fit,
    Sample,
    control_of,
    cross_validated,
    fit,
    samples_of,
)
from kvlink.benchmarks.prediction.command import app
from kvlink.benchmarks.prediction.paths import (
    Machine,
    Path,
    Request,
    pcie_gbps,
    request_of,
    wire_efficiency,
)
from kvlink.benchmarks.workloads.block_budget import Degrees
from kvlink.benchmarks.workloads.models import MODELS
from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import Cost

PLAIN = Path("plain", rails=1, wire_gbps=49, start_us=0, post_ns=0)
ONE_RANK_OF_70B = Request(160 << 20, 40_960, 80)


@pytest.mark.parametrize(
    ("mtu", "roce", "infiniband"), [(1024, 0.923, 0.975), (2048, 0.960, 0.988), (4096, 0.979, 0.994)]
)
def test_headers_take_their_share_of_the_wire(mtu: int, roce: float, infiniband: float) -> None:
    assert wire_efficiency(mtu) == pytest.approx(roce, abs=1e-3)
    assert wire_efficiency(mtu, infiniband=True) == pytest.approx(infiniband, abs=1e-3)


def test_sixteen_lanes_of_generation_5_carry_57_gb() -> None:
    assert pcie_gbps(5) == pytest.approx(57, abs=0.5)


@pytest.mark.parametrize(("million_posts", "ms"), [(0.32, 128), (1, 41), (10, 4.1), (12, 3.4)])
def test_posting_binds_until_the_wire_does(million_posts: float, ms: float) -> None:
    found = replace(PLAIN, post_ns=1e3 / million_posts).predict(ONE_RANK_OF_70B)
    assert found.total_ms == pytest.approx(ms, rel=0.02)
    assert found.bottleneck == ("wire" if million_posts > 11 else "posting")


@pytest.mark.parametrize(
    ("round_trip_us", "piece", "pairs"), [(3, 4096, 3), (5, 8192, 2), (10, 4096, 8), (10, 16_384, 2)]
)
def test_queue_pairs_are_enough_when_the_window_no_longer_binds(
    round_trip_us: float, piece: int, pairs: int
) -> None:
    request = Request(1000 * piece, 1000, 1)
    bound = [
        replace(PLAIN, round_trip_us=round_trip_us, window=16 * number).predict(request).bottleneck
        for number in (pairs - 1, pairs)
        if number
    ]
    assert bound == ["window", "wire"][-len(bound) :]


def test_each_slot_of_a_bounce_buffer_costs_a_launch() -> None:
    direct, bounce, _ = Machine(nics=1).paths(1)
    slots = ONE_RANK_OF_70B.num_bytes / (512 << 10)
    launches = bounce.terms_ms(ONE_RANK_OF_70B)["PCIe"] - direct.terms_ms(ONE_RANK_OF_70B)["PCIe"]
    assert launches == pytest.approx(slots * 0.002)
    assert bounce.predict(ONE_RANK_OF_70B).total_ms > direct.predict(ONE_RANK_OF_70B).total_ms + 0.024


def test_a_slow_bus_binds_a_fast_nic() -> None:
    direct = Machine(pcie=3, gbps=400).paths(1)[0]
    assert direct.predict(ONE_RANK_OF_70B).bottleneck == "PCIe"


@given(st.integers(1, 64), st.integers(1, 2**34), st.integers(1, 10**6))
def test_more_rails_are_never_slower_and_more_bytes_never_faster(
    rails: int, num_bytes: int, pieces: int
) -> None:
    path = Machine(nics=rails).paths(1)[0]
    request = Request(num_bytes, pieces, 10)
    time = path.predict(request).total_ms
    assert replace(path, rails=rails + 1).predict(request).total_ms <= time
    assert path.predict(Request(num_bytes + 1, pieces, 10)).total_ms >= time


@pytest.mark.parametrize(("name", "pieces_each_rank"), [("llama-3.1-70b", 40_960), ("deepseek-v3", 15_616)])
def test_requests_have_the_pieces_of_their_geometry(name: str, pieces_each_rank: int) -> None:
    request = request_of(MODELS[name], 4096, Degrees(8), 16, 1)
    assert request.pieces == 8 * pieces_each_rank
    ranks = 8 if MODELS[name].mla else 1  # every rank of an MLA model has the whole latent
    assert request.num_bytes == 4096 * MODELS[name].token_bytes * ranks
    assert request_of(MODELS[name], 4096, Degrees(8), 16, 4).pieces == request.pieces // 4


def test_pairs_of_degrees_move_the_same_bytes_in_smaller_pieces() -> None:
    model = MODELS["llama-3.1-70b"]
    alike, pair = (request_of(model, 4096, degrees, 16, 1) for degrees in (Degrees(4), Degrees(2, 4)))
    assert pair.num_bytes == alike.num_bytes == 4096 * model.token_bytes
    assert pair.pieces == 16 * alike.pieces, "a token's heads are elsewhere at one end"
    latent = request_of(MODELS["deepseek-v3"], 4096, Degrees(2, 4), 16, 1)
    assert latent.num_bytes == 4 * 4096 * MODELS["deepseek-v3"].token_bytes


# Mooncake's published table of vLLM prefill/decode (vllm-v1-pd-performance.md in its repository): Qwen3-8B, TP8, two
# machines of eight H800 with eight ConnectX-7 of 200 Gb/s of RoCE, one request at a time: tokens and milliseconds.
PUBLISHED = {128: 0.54, 512: 0.92, 1024: 1.50, 4096: 4.75, 8192: 8.84, 32_768: 31.65}


def test_the_published_table_comes_out_within_a_tenth() -> None:
    """From its first and last row, which give the start-up and the time of a piece. All else is the hardware's."""
    asked = {tokens: request_of(MODELS["qwen3-8b"], tokens, Degrees(8), 16, 1) for tokens in PUBLISHED}
    (few, first_ms), (many, last_ms) = (
        (asked[tokens].pieces / 8, PUBLISHED[tokens]) for tokens in (128, 32_768)
    )
    piece_ms = (last_ms - first_ms) / (many - few)
    start_us = (first_ms - few * piece_ms) * 1e3
    path = Path("mooncake", 8, 25 * wire_efficiency(4096), start_us, 0, pcie_gbps(5), rail_ns=piece_ms * 1e6)
    errors = [path.predict(asked[tokens]).total_ms / ms - 1 for tokens, ms in PUBLISHED.items()]
    assert errors[0] == pytest.approx(0, abs=1e-3)
    assert errors[-1] == pytest.approx(0, abs=1e-3)
    assert max(map(abs, errors)) < 0.10


def migrated(claim_us: float, **more: Any) -> dict[str, Any]:
    parts = {
        name: {"p50_low_us": 0.9 * us, "p50_us": us, "p50_high_us": 1.2 * us}
        for name, us in (("offer", 100.0), ("claim", claim_us), ("validate", 2.0), ("settle", 3.0))
    }
    return {
        "kind": "migrate", "slots": 1, "parts": parts, **{f"{name}_us": part["p50_us"] for name, part in parts.items()}
    } | more  # fmt: skip


def test_a_prediction_has_a_control_plane_if_one_was_measured_and_an_error(tmp_path: File) -> None:
    options = ["--tokens", "16", "--tp", "2:4", "--pp", "2:1", "--json"]
    measured = results(tmp_path)
    with measured.open("a") as more:
        more.write("\n" + json.dumps(migrated(700)))
    for calibrated in ([], ["--calibrate", str(measured)]):
        done = CliRunner().invoke(app, [*options, *calibrated])
        assert done.exit_code == 0, done.output
        rows = [row for row in map(json.loads, done.output.splitlines()) if row["kind"] == "prediction"]
        assert {row["control_ms"] for row in rows} == {0.805 if calibrated else None}
        for row in rows:
            assert row["ms_from"] < row["ms"] < row["ms_to"]
            assert row["ms"] > (row["control_ms"] or 0)
            assert row["error_of"] == ("other shapes" if calibrated and row["path"] == "tcp" else "assumed")
    tcp = next(row for row in rows if row["path"] == "tcp")
    assert tcp["ms_to"] - tcp["ms"] == pytest.approx(0.2 * 0.805), (
        "the fit has no error here, the handoffs have"
    )
    assert tcp["ms"] - tcp["ms_from"] == pytest.approx(0.1 * 0.805)


def test_the_control_plane_is_that_of_measured_handoffs_one_at_a_time() -> None:
    rows = [migrated(700), migrated(1e6, slots=4), migrated(900)]
    assert control_of(rows) == pytest.approx(Control(905, 0.9 * 805, 1.2 * 1005))
    assert control_of([]) is None
    few = migrated(700)
    few["parts"]["claim"]["p50_high_us"] = None
    assert control_of([few]) == pytest.approx(Control(805, 402.5, 1610)), "four requests bound no median"


def test_the_ends_of_an_error_hold_every_sample() -> None:
    errors = (-0.2, 0.1, 0.25)
    least, most = Fit(Cost(1, 1, 1), 3, errors).factors
    assert (least, most) == pytest.approx((0.8, 1.25))
    assert all(least <= 1 / (1 + error) <= most for error in errors)


SHAPES = [(1, 16_384), (256, 4 << 20), (256, 1 << 20), (4096, 64 << 20), (4096, 256 << 20)]


def test_a_fit_finds_the_cost_that_made_the_samples() -> None:
    cost = Cost(start_us=7, op_ns=60, gib_per_s=9)
    found = cross_validated([Sample(*shape, cost.predict_us(*shape)) for shape in SHAPES])
    assert found.cost.start_us == pytest.approx(7)
    assert found.cost.op_ns == pytest.approx(60)
    assert found.cost.gib_per_s == pytest.approx(9)
    assert found.worst is not None
    assert found.worst < 1e-6


def test_an_error_is_of_a_shape_that_the_fit_had_not_seen() -> None:
    cost = Cost(start_us=7, op_ns=60, gib_per_s=9)
    made = [Sample(*shape, cost.predict_us(*shape)) for shape in SHAPES]
    odd = made[3]._replace(us=2 * made[3].us)
    assert cross_validated([*made[:3], odd, odd, made[4]]).errors[3] == pytest.approx(-0.5)
    assert cross_validated(made[:3]).worst is None  # three unknowns fit three shapes whatever they are


@given(st.lists(st.floats(1, 1e6), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_no_part_of_a_fit_is_negative(times: list[float]) -> None:
    cost = fit([Sample(*shape, us) for shape, us in zip(SHAPES, times, strict=True)])
    assert cost.start_us >= 0
    assert cost.op_ns >= 0
    assert cost.gib_per_s > 0
    assert math.isfinite(cost.predict_us(1, 1))


def test_too_few_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 shapes"):
        fit([Sample(1, 16_384, 7.0)] * 5)


def results(folder: File, transport: str = "tcp") -> File:
    cost = Cost(start_us=35, op_ns=100, gib_per_s=3)
    rows = [
        {
            "transport": transport,
            "blocks": ops,
            "block_bytes": size // ops,
            "p50_us": cost.predict_us(ops, size),
        }
        for ops, size in SHAPES
    ]
    rows += [
        {"peer": "nixl", "mode": "tcp", "blocks": 1, "block_bytes": 1, "p50_us": 1.0},
        {"kind": "machine"},
    ]
    path = folder / "results"
    path.write_text("a line of a log\n" + "\n".join(map(json.dumps, rows)))
    return path


def test_results_calibrate_their_transport(tmp_path: File) -> None:
    assert list(samples_of(read_rows(results(tmp_path)))) == ["tcp"]
    done = CliRunner().invoke(
        app,
        [
            "--model",
            "qwen3-8b",
            "--tokens",
            "1024",
            "--tp",
            "1",
            "--calibrate",
            str(results(tmp_path)),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    _, fitted, *rows, _ = map(json.loads, done.output.splitlines())
    assert (fitted["transport"], round(fitted["gib_per_s"], 3), fitted["samples"]) == ("tcp", 3, len(SHAPES))
    assert fitted["worst_error"] < 1e-6
    tcp = next(row for row in rows if row["path"] == "tcp")
    assert tcp["ms"] == pytest.approx(0.035 + 36 * 2 * 64 * 1e-4 + 144 / 1024 / 3 * 1e3)


def test_libfabric_is_predicted_from_what_was_measured(tmp_path: File) -> None:
    measured = ["--calibrate", str(results(tmp_path, "fabric"))]
    for calibrated in ([], measured):
        done = CliRunner().invoke(
            app, ["--model", "qwen3-8b", "--tokens", "1024", "--tp", "1", "--json", *calibrated]
        )
        assert done.exit_code == 0, done.output
        found = {row["path"]: row for row in map(json.loads, done.output.splitlines()) if "path" in row}
        assert ("fabric" in found) == bool(calibrated)
    assert found["fabric"]["ms"] == pytest.approx(0.035 + 36 * 2 * 64 * 1e-4 + 144 / 1024 / 3 * 1e3)
    assert (found["fabric"]["error_of"], found["tcp"]["error_of"]) == ("other shapes", "assumed")


@pytest.mark.parametrize("text", ["{", '{"transport": "tcp", "block_bytes": 1, "p50_us": 1}', "", '{"a": 1}'])
def test_files_without_results_are_refused(text: str, tmp_path: File) -> None:
    path = tmp_path / "results"
    path.write_text(text)
    done = CliRunner().invoke(app, ["--calibrate", str(path)])
    assert isinstance(done.exception, ConfigError)
