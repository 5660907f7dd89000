# SPDX-License-Identifier: Apache-2.0
"""Makes rows of results files, and reports of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvlink.benchmarks.report.command import app

EVIL = "<script>alert(1)</script>"


def peers_row(peer: str, mode: str, p50_us: float, size: int = 16_384, blocks: int = 256) -> dict[str, Any]:
    return {
        "kind": "peers", "peer": peer, "mode": mode, "path": "host", "version": "1", "settings": EVIL,
        "block_bytes": size, "blocks": blocks, "p50_us": p50_us, "p50_low_us": 0.9 * p50_us,
        "p50_high_us": 1.1 * p50_us, "p99_us": 2 * p50_us, "gib_per_s": size * blocks / 2**30 / p50_us * 1e6,
        "cpu_s_per_gib": 0.2, "verified": True,
    }  # fmt: skip


def pull_row(p50_us: float = 1e4, **more: Any) -> dict[str, Any]:
    return {
        "kind": "pull", "transport": "cma", "block_bytes": 16_384, "blocks": 4096, "p50_us": p50_us,
        "p99_us": 2 * p50_us, "gib_per_s": 6.2, "cpu_s_per_gib": 0.3, "verified": True, "limit": "process_vm_readv",
        "limit_gib_per_s": 6.4, "of_limit": 6.2 / 6.4,
    } | more  # fmt: skip


def migrate_row(**more: Any) -> dict[str, Any]:
    return {
        "kind": "migrate", "transport": "shm", "model": "qwen3-8b", "tokens": 4096, "tp": "1", "p50_us": 900.0,
        "p99_us": None, "max_us": 1200.0, "offer_us": 100.0, "claim_us": 300.0, "wire_us": 500.0, "verified": True,
        "failed": 0,
    } | more  # fmt: skip


def simulation_row(workers: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "simulation", "model": "m", "path": "gpudirect", "load": 0.5, "popular": 0.0, "lease_s": 30.0,
        "workers": workers, "requests": 10, "p50_us": 9.0 * workers, "p99_us": 20.0 * workers, "gib_per_s": 3.0,
        "expired": 2,
    } | more  # fmt: skip


def rows(scale: float = 1.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"kind": "machine", "cpu": EVIL, "cores": 2}]
    found.append({"kind": "noise", "of": EVIL, "other_load": 0.125})
    for size in (4096, 16_384, 65_536):
        found.append(peers_row("kvlink", "shm", scale * (5 + size / 50), size))
        found.append(peers_row("bare", "memcpy", size / 60, size))
        found.append(peers_row("nixl", "default", size / 9, size))
    found.append(peers_row("kvlink", "shm", scale * 7, 16_384, 1))
    found.append({"kind": "peers", "peer": "mooncake", "mode": EVIL, "path": "tcp", "why_not": "make peers"})
    found += [migrate_row(), pull_row(), simulation_row(2), simulation_row(4, p50_us=None, p99_us=None)]
    found += [
        {"kind": "growth", "of": "peers", "cost": EVIL, "number": number, "value": value}
        for number, value in ((1, 2.0), (8, 0.0), (64, 9.0))
    ]
    exponent = {"exponent": 0.36, "to": 64, "needs": "at most 1.25", "holds": True}
    found.append({"kind": "exponent", "of": "peers", "cost": EVIL, **exponent})
    found.append({"kind": "control", "what": EVIL, "workers": 2, "p50_us": 500.0, "coordinator_cpu_us": 80.0})
    return found


def written(folder: Path, name: str, given_rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, given_rows)))
    return path


def page_of(folder: Path, given_rows: list[dict[str, Any]], *more: str) -> str:
    page = folder / "report.html"
    done = CliRunner().invoke(app, [str(written(folder, "run", given_rows)), "-o", str(page), *more])
    assert done.exit_code == 0, done.output
    return page.read_text()


def contest_rows(ours_us: float, others_us: float) -> list[dict[str, Any]]:
    return [
        peers_row("kvlink", "shm", ours_us),
        peers_row("kvlink", "cma", 9 * ours_us),
        peers_row("nixl", "fast", others_us),
        peers_row("nixl", "default", 3 * others_us),
        peers_row("bare", "memcpy", 0.8 * ours_us),
        peers_row("bare", "process_vm_readv, 2 threads", 6.3 * ours_us),
    ]
