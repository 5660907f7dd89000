# SPDX-License-Identifier: Apache-2.0
"""Code blocks of pages that are no command lines: Python runs as it stands, JSON and YAML can be read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import eventually

from kvlink import BlockPool, Geometry, PrefillRate, Worker, dense
from kvlink.coordinator import Coordinator
from kvlink.runtime.background import ControlThread

DOCS = Path(__file__).resolve().parents[2] / "docs"
MONITORING, TRANSFORMERS = "operate/monitoring.md", "servers/transformers.md"
WHOLE = ("getting-started/cookbook.md", "reference/python-api.md")
"""Their blocks follow each other."""
PREFIXES = "getting-started/prefixes.md"


def blocks(language: str) -> list[tuple[str, str]]:
    """Returns page and text of each block."""
    return [
        (str(path.relative_to(DOCS)), text)
        for path in sorted(DOCS.rglob("*.md"))
        for text in re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    ]


def program(page: str, number: int = 0) -> str:
    return [text for where, text in blocks("python") if where == page][number]


def test_each_program_is_run() -> None:
    """A new one needs a test below."""
    found = [page for page, _ in blocks("python") if page not in WHOLE]
    assert found == [PREFIXES, MONITORING, TRANSFORMERS, TRANSFORMERS]


@pytest.mark.parametrize("page", WHOLE)
def test_the_blocks_of_a_page_are_one_program_that_runs(page: str, tmp_path: Path) -> None:
    text = "\n".join(block for where, block in blocks("python") if where == page)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_worker_in_a_program_adds_its_metrics_to_a_registry() -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="pip install 'kvlink[metrics]'")
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, 8)), huge_pages=False)
    before = set(prometheus.REGISTRY._collector_to_names)
    with Worker(pool, "monitored", transports="loopback") as worker:
        exec(program(MONITORING), {"worker": worker})
        (added,) = set(prometheus.REGISTRY._collector_to_names) - before
        try:
            assert b'kvlink_active_leases{worker="monitored"} 0.0' in prometheus.generate_latest()
        finally:
            prometheus.REGISTRY.unregister(added)


def test_a_prefix_is_found_and_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    control, coordinator = ControlThread.shared(), Coordinator()
    address = control.run(coordinator.start())
    layout = dense(Geometry(2, 1, 64, 8, model="llama at 1a2b"))
    names: dict[str, Any] = {}
    exec(program(PREFIXES), names)
    with (
        Worker(BlockPool.allocate(layout), "owner", transports="loopback", coordinator=address) as owner,
        Worker(BlockPool.allocate(layout), "reader", transports="loopback", coordinator=address) as reader,
    ):
        owner.pool.numpy()[:] = 7
        names["share"](owner, [5, 2, 3, 4])
        assert eventually(lambda: names["fetch"](reader, [1, 0, 6, 7], PrefillRate(100.0))) == 64
        assert reader.pool.numpy().reshape(4, 8, -1)[:, [1, 0, 6, 7]].min() == 7
        assert names["fetch"](reader, [1, 0, 6, 7], PrefillRate(1e12)) == 0
    control.run(coordinator.close())
    pulled, computed = capsys.readouterr().out.splitlines()
    assert pulled.startswith("pulls 64 tokens: pull ")
    assert computed.startswith("computes 64 tokens: pull ")


@pytest.mark.verify
def test_transformers_hand_a_request_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which is prefill and decode at once. Its cache is small: the default takes most memory."""
    pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'kvlink[demo]'")
    from kvlink.integrations.transformers.demo import tiny_llama

    small = partial(transformers.generation.ContinuousBatchingConfig, num_blocks=8, max_batch_tokens=64)
    monkeypatch.setattr(transformers.generation, "ContinuousBatchingConfig", small)
    names: dict[str, Any] = {
        "model": tiny_llama(),
        "generation_config": transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        "prompt_token_ids": list(range(1, 40)),
    }
    try:
        exec(program(TRANSFORMERS), names)
    finally:
        if "handoff" in names:
            names["handoff"].close()
        if "manager" in names:
            names["manager"].stop(block=True)
    assert len(names["output"].generated_tokens) == 128


@pytest.mark.verify
@pytest.mark.parametrize(("page_size", "num_copied"), [(16, 1), (256, 0)])
def test_a_request_of_transformers_moves(page_size: int, num_copied: int) -> None:
    """The page's own page size is more than this request has tokens, so that there is nothing to copy."""
    pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'kvlink[demo]'")
    from kvlink.integrations.transformers import KVLinkHandoff
    from kvlink.integrations.transformers.demo import tiny_llama

    prompt, num_new = list(range(1, 40)), 128
    with ExitStack() as opened:
        managers, ends = [], []
        for name in ("source", "target"):
            manager = tiny_llama().init_continuous_batching(
                transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
                transformers.generation.ContinuousBatchingConfig(
                    page_size=page_size, num_blocks=1024 // page_size, max_batch_tokens=64
                ),
            )
            ends.append(opened.enter_context(KVLinkHandoff(manager, name)))
            manager.start()
            opened.callback(manager.stop, block=True)
            managers.append(manager)
        managers[0].add_request(prompt, "alone", max_new_tokens=num_new)
        expected = managers[0].get_result("alone").generated_tokens
        managers[0].add_request(prompt, "moves", max_new_tokens=num_new)
        active = managers[0].batch_processor.scheduler.active_requests
        eventually(lambda: "moves" in active and len(active["moves"].generated_tokens) > 20)
        names: dict[str, Any] = {"source": ends[0], "target": ends[1], "request_id": "moves"}
        exec(program(TRANSFORMERS, 1), names)
        assert managers[1].get_result(names["moved_id"]).generated_tokens == expected
        assert ends[1].stats().fetched == num_copied


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_json_is_json(page: str, text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize(("page", "text"), [each for each in blocks("yaml") if "{{" not in each[1]])
def test_yaml_is_yaml(page: str, text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)
