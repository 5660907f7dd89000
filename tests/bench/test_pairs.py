# SPDX-License-Identifier: Apache-2.0
"""Migrations between sides of different tensor-parallel degrees: every byte at every rank, and the limit beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvlink import BlockPool
from kvlink.benchmarks import app
from kvlink.benchmarks.harness import block_draws
from kvlink.benchmarks.harness.contents import Contents
from kvlink.benchmarks.harness.processes import BenchError
from kvlink.benchmarks.measurements import migrate, rank_handoffs, rank_shares
from kvlink.benchmarks.measurements.rank_handoffs import Bench
from kvlink.benchmarks.workloads.block_budget import LAYOUTS, Cache, Degrees, taken_from
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, Order, assign, dense
from kvlink.transfer.engine import host_transports

pytestmark = pytest.mark.verify

HERE = [name for name, why_not in host_transports().items() if not why_not]
APART = [name for name in HERE if name != "loopback"]
DEGREES = (1, 2, 4, 8)
TOKENS = 75  # the last block is partial


@pytest.fixture
def model(tmp_path: Path) -> str:
    """With 8 KV heads, small enough for 8 ranks a side."""
    return written(tmp_path, num_key_value_heads=8, num_attention_heads=8, head_dim=16)


@pytest.fixture
def latent(tmp_path: Path) -> str:
    """Every rank of it holds the same."""
    return written(tmp_path, kv_lora_rank=56, qk_rope_head_dim=8, num_attention_heads=8)


def written(folder: Path, **config: int) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, **config}))
    return str(path)


def whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cold, row = rows
    assert cold["kind"] == "cold"
    return row


def test_claims_are_compared_with_those_of_as_many_ranks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, ranks = rank_handoffs._claims, []

    async def noted(client: Any, request_id: str, of: int) -> None:
        ranks.append(of)
        await claims(client, request_id, of)

    monkeypatch.setattr(rank_handoffs, "_claims", noted)
    row = whole(list(migrate.rows(model, TOKENS, "loopback", "1:2", iters=1, pp="1:2")))
    assert set(ranks) == {4}
    assert row["of_bare_claim"] > 0


PAIRS = [(prefill, decode, "NHD") for prefill in DEGREES for decode in DEGREES]


@pytest.mark.parametrize(
    ("prefill", "decode", "layout"), [*PAIRS, (1, 8, "HND"), (8, 1, "HND"), (2, 4, "HND"), (4, 2, "HND")]
)
def test_every_degree_hands_off_to_every_other(model: str, prefill: int, decode: int, layout: str) -> None:
    pair = f"{prefill}:{decode}"
    row = whole(list(migrate.rows(model, TOKENS, "loopback", pair, iters=2, layout=layout)))
    assert row["verified"] is True
    assert (row["tp"], row["layout"], row["prefill_ranks_read"]) == (pair, layout, f"{prefill} of {prefill}")
    assert row["bytes"] == TOKENS * 2 * 2 * 8 * 16 * 2
    assert row["of_limit"] > 0


@pytest.mark.parametrize(
    ("tp", "stages", "layout"),
    [("1", "2:1", "NHD"), ("1", "1:2", "NHD"), ("2:4", "2:1", "HND"), ("2:1", "3:2", "NHD")],
)
def test_every_pipeline_hands_off_to_every_other(tmp_path: Path, tp: str, stages: str, layout: str) -> None:
    deeper = written(tmp_path, num_hidden_layers=5, num_key_value_heads=8, num_attention_heads=8, head_dim=16)
    rows = list(migrate.rows(deeper, TOKENS, "loopback", tp, iters=2, layout=layout, pp=stages))
    row = whole(rows)
    assert row["verified"] is True
    assert row["pp"] == stages
    ranks = int(tp[0]) * int(stages[0])
    assert row["prefill_ranks_read"] == f"{ranks} of {ranks}"
    assert row["bytes"] == TOKENS * 5 * 2 * 8 * 16 * 2
    assert row["of_limit"] > 0


def test_pipelines_that_have_no_layers_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be split into 3 stages"):
        next(migrate.rows(model, 40, "loopback", pp="3:1"))
    with pytest.raises(ConfigError, match="PP '2' is not known; write 2:1"):
        next(migrate.rows(model, 40, "loopback", pp="2"))


@pytest.mark.parametrize("transport", APART)
@pytest.mark.parametrize("pair", ["2:4", "4:2"])
def test_ranks_are_processes(model: str, transport: str, pair: str) -> None:
    row = whole(list(migrate.rows(model, TOKENS, transport, pair, iters=3)))
    assert row["verified"] is True
    assert row["cpu_s_per_gib"] > 0
    assert row["limit"].partition(",")[0] in (
        "memcpy",
        "non-temporal copy",
        "process_vm_readv",
        "socket stream",
    )


@pytest.mark.parametrize(
    ("pair", "read", "copies"), [("8:1", "1 of 8", 1), ("8:2", "2 of 8", 2), ("2:8", "2 of 2", 8)]
)
def test_what_all_ranks_hold_is_read_once_by_each(latent: str, pair: str, read: str, copies: int) -> None:
    row = whole(list(migrate.rows(latent, TOKENS, "loopback", pair, iters=2)))
    assert row["verified"] is True
    assert row["prefill_ranks_read"] == f"{read}, {pair[0]} hold the same"
    assert row["bytes"] == copies * TOKENS * 2 * 64 * 2


def test_ranks_with_heads_in_common_share_the_readers() -> None:
    layouts = [dense(geometry) for geometry in Cache("qwen2.5-7b", Degrees(8, 4)).prefill(1)]
    for decode_size, read in ((4, 4), (8, 8)):
        decode = dense(Cache("qwen2.5-7b", Degrees(8, decode_size)).decode(1)[0])
        assert taken_from(layouts, decode) == f"{read} of 8, 2 hold the same"


def test_nobody_keeps_blocks_of_requests_that_are_over(latent: str) -> None:
    cache = Cache(latent, Degrees(4, 1))
    with migrate._opened(cache, 40, "loopback", 1) as (owners, workers, baselines, _):
        bench = Bench(owners, workers, cache, [TOKENS], block_draws.Order())
        bench.run(3, baselines)
        assert [owner.side.call("leases")["active"] for owner in owners[0]] == [0] * 4


@pytest.mark.parametrize("pair", ["1:2", "4:2"])
def test_flipped_bytes_of_any_rank_are_not_verified(
    model: str, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:1")
    assert whole(list(migrate.rows(model, TOKENS, "fault+loopback", pair, iters=2)))["verified"] is False


def test_one_byte_of_the_last_rank_counts(model: str) -> None:
    cache = Cache(model, Degrees(2, 4))
    with migrate._opened(cache, 40, "loopback", 1) as (owners, workers, baselines, _):
        bench = Bench(owners, workers, cache, [TOKENS], block_draws.Order())
        bench.run(1, baselines)
        request = bench._draw(TOKENS, 40)
        baselines.run("memcpy", request)
        assert bench._landed(request)
        pool = workers[-1].pool
        pool.numpy()[int(request.ids[0]) * pool.layout.block_stride] ^= 1
        assert not bench._landed(request)


def test_a_limit_that_leaves_something_out_is_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of = rank_shares.pieces_of
    monkeypatch.setattr(rank_shares, "pieces_of", lambda *given: pieces_of(*given)[:-1])
    with pytest.raises(BenchError, match="the limit is invalid"):
        list(migrate.rows(model, TOKENS, "loopback", "2:4", iters=2))


@pytest.mark.parametrize("order", LAYOUTS.values())
@pytest.mark.parametrize(("prefill", "decode"), [(1, 8), (4, 2), (8, 8)])
def test_pieces_bring_every_byte_and_adjoin_nowhere(order: Order, prefill: int, decode: int) -> None:
    model = Geometry(num_layers=2, total_heads=8, row_bytes=16, num_blocks=12, block_tokens=4)
    owners = [dense(replace(model, tp_rank=rank, tp_size=prefill), order) for rank in range(prefill)]
    readers = [dense(replace(model, tp_rank=rank, tp_size=decode), order) for rank in range(decode)]
    sources = [filled(layout) for layout in owners]
    owner_ids, ids, tokens = np.array([7, 8, 2, 11], np.uint32), np.array([3, 4, 5, 0], np.uint32), 14
    for reader in readers:
        pool = BlockPool.allocate(reader)
        for owner, source in zip(owners, sources, strict=True):
            if found := assign(reader, owner):
                rows = rank_shares.pieces_of(
                    rank_shares.End(owner, owner.layers, owner_ids, 0),
                    rank_shares.End(reader, reader.layers, ids, 0),
                    found.heads,
                    tokens,
                )
                for start, end, size in rows.astype(int):
                    pool.numpy()[end : end + size] = source.numpy()[start : start + size]
                ends = rows[:, :2] + rows[:, 2:]
                assert not np.any(np.all(ends[:-1] == rows[1:, :2], axis=1))
        assert Contents(reader, 3).equal(pool, ids, owner_ids, tokens)


def filled(layout: Any) -> BlockPool:
    pool = BlockPool.allocate(layout)
    Contents(layout, 3).fill(pool)
    return pool


@pytest.mark.parametrize("order", LAYOUTS.values())
def test_a_rank_has_the_words_of_its_heads(order: Order) -> None:
    model = Geometry(num_layers=1, total_heads=4, row_bytes=16, num_blocks=3, block_tokens=2)
    all_heads = filled(dense(model)).numpy().reshape(2, 3, 2, 4, 16)  # planes, blocks, tokens, heads, bytes
    for rank in range(2):
        held = filled(dense(replace(model, tp_rank=rank, tp_size=2), order)).numpy()
        shape = (2, 3, 2, 2, 16)
        rows = held.reshape(shape) if order is Order.NHD else held.reshape(shape).swapaxes(2, 3)
        assert np.array_equal(rows, all_heads[:, :, :, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_longer_pieces_where_a_heads_tokens_adjoin(model: str, layout: str) -> None:
    row = whole(list(migrate.rows(model, TOKENS, "loopback", "4:8", iters=1, layout=layout)))
    planes, blocks = 4, 5
    assert row["ops"] == 8 * planes * (blocks if layout == "HND" else TOKENS)


@pytest.mark.parametrize("text", ["", "0", "2:", ":4", "2:0", "2:4:8", "x", "1000", "2-4"])
def test_other_degrees_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="for one rank's share"):
        next(migrate.rows("qwen3-8b", 40, "loopback", text))


def test_heads_that_ranks_cannot_share_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="one must divide the other"):
        next(migrate.rows(model, 40, "loopback", "3:1"))
    with pytest.raises(ConfigError, match="write NHD or HND"):
        next(migrate.rows(model, 40, "loopback", layout="NDH"))


def test_the_command_takes_several_pairs(model: str) -> None:
    command = f"migrate --transport loopback --tokens 40 --tp 2:1,1:2 --model {model} --layout HND"
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert done.exit_code == 0, done.output
    _, *rows, _ = map(json.loads, done.output.splitlines())
    assert [(row["kind"], row["tp"]) for row in rows] == [
        (kind, tp) for tp in ("2:1", "1:2") for kind in ("cold", "migrate")
    ]
