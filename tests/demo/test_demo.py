# SPDX-License-Identifier: Apache-2.0
"""`kvlink demo` with real processes, and proof that its verdict can be bad."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from kvlink import StaleBlocks
from kvlink import demo as demo_package
from kvlink.coordinator.coordinator import Coordinator
from kvlink.demo import run
from kvlink.demo.processes import Child, ChildError, Host
from kvlink.demo.route import Cluster, Route
from kvlink.demo.servers import NUM_NEW_TOKENS, PROMPTS, Decode, Prefill, Reference
from kvlink.errors import ConfigError
from kvlink.runtime.background import ControlThread
from kvlink.transfer.engine import host_transports

AVAILABLE = [name for name, why_not in host_transports().items() if not why_not]


def demo(
    *transports: str, json_lines: bool = True, engine: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """`kvlink.demo.run` in a process of its own, with extra environment variables."""
    call = f"import sys, kvlink.demo as d; sys.exit(d.run({list(transports) or None}, {json_lines}, engine={engine!r}))"
    return subprocess.run(
        [sys.executable, "-c", call], env=os.environ | env, capture_output=True, text=True, timeout=110
    )


def rows_of(output: str) -> dict[str, dict[str, Any]]:
    """Every line of `output` must be a JSON row."""
    return {row["transport"]: row for row in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def everything() -> subprocess.CompletedProcess[str]:
    return demo()


def test_tokens_are_equal_on_every_transport_of_this_machine(
    everything: subprocess.CompletedProcess[str],
) -> None:
    rows = rows_of(everything.stdout)
    assert list(rows) == AVAILABLE
    assert {"loopback", "shm", "tcp"} <= set(rows)
    assert all(row["tokens_equal"] and not row["error"] for row in rows.values()), everything.stdout
    assert everything.returncode == 0, everything.stderr


@pytest.mark.parametrize("transport", AVAILABLE)
def test_a_row_says_what_was_moved_and_how(
    everything: subprocess.CompletedProcess[str], transport: str
) -> None:
    row = rows_of(everything.stdout)[transport]
    longest = max(len(text.encode()) for text in PROMPTS.values())
    assert row["engine"] == "a small transformer in numpy"
    assert row["path"] == transport
    assert transport in row["explanation"]
    assert row["processes"] == (1 if transport == "loopback" else 2)
    assert row["prompts"] == len(PROMPTS)
    assert row["tokens"] == len(PROMPTS) * NUM_NEW_TOKENS
    assert row["bytes"] >= longest * 2 * 4 * 4 * 64 * 4  # K and V, layers, heads, head_dim, float32
    assert row["p50_us"] > 0
    assert row["gib_per_s"] > 0


def test_it_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    done = demo("loopback", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_continuous_batching_of_transformers_gives_the_tokens_of_one_process() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.19", reason="pip install 'kvlink[demo]'")
    done = demo("shm", engine="transformers")
    assert done.returncode == 0, done.stderr
    assert (
        rows_of(done.stdout)["shm"]["engine"]
        == f"continuous batching of transformers {transformers.__version__}"
    )


def test_corrupted_transfers_are_a_bad_row_and_a_bad_exit_code() -> None:
    result = demo("fault+shm", "shm", json_lines=False, KVLINK_FAULT="corrupt-data@every:1")
    failures = [line for line in result.stdout.splitlines() if " failed: " in line]
    assert result.returncode == 1
    assert len(failures) == 1
    assert failures[0].startswith(
        "fault+shm failed: the bytes for 'less than a block' differ from those offered"
    )
    assert "the bytes differ from those offered in 20 of 20 timed pulls" in failures[0]
    assert re.search(r"^shm +shm +2 .* yes, 160 *$", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("FAILED over fault+shm. Next: kvlink doctor\n")
    assert "shm …" in result.stderr, "without a terminal it says what it does"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"transports": ["carrier-pigeon"]}, "'carrier-pigeon'"),
        ({"transports": ["shm", "verbs"]}, r"--transport verbs cannot work here: \S"),
        ({"transports": ["shm"], "device": "cuda"}, "--transport shm|needs|'shm'"),
        ({"engine": "vllm"}, "--engine 'vllm': write one of numpy, transformers"),
        ({"engine": "numpy", "device": "cuda"}, "on the CPU only"),
        ({"engine": "transformers", "pp": "2:1"}, "only the engine numpy splits layers"),
    ],
    ids=lambda given: " ".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_what_cannot_work_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    why_not = host_transports() | {"verbs": "this machine has no RDMA device"}
    monkeypatch.setattr("kvlink.demo.show.host_transports", lambda: why_not)
    monkeypatch.setattr("kvlink.demo.show.Cluster", None)
    with pytest.raises(ConfigError, match=says):
        run(**given)


@pytest.mark.parametrize(
    ("found", "missing"), [("5.18.3", r"transformers 5\.19"), (None, "transformers")], ids=["old", "absent"]
)
def test_a_library_that_is_needed_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, found: str | None, missing: str
) -> None:
    monkeypatch.setattr(demo_package, "version", lambda name: found)
    monkeypatch.setattr(demo_package, "find_spec", lambda name: name == "torch" or found)
    with pytest.raises(ConfigError, match=rf"needs {missing}: run pip install 'kvlink\[demo\]'"):
        run(["loopback"], engine="transformers")


class HereChild(Child):
    """Hosts roles in this process, so that a test can reach into them. Loopback needs no more."""

    def __init__(self) -> None:
        self.host = Host()

    def call(self, role: str, do: str, *, within_s: float = 60.0, **arguments: Any) -> Any:
        reply = self.host.answer(role, do, arguments)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply


@pytest.fixture
def coordinator() -> Iterator[str]:
    thread = ControlThread("coordinator")
    yield thread.run(Coordinator().start())
    thread.close()


@pytest.mark.parametrize("corrupt", [False, True])
def test_one_changed_block_changes_the_tokens(
    coordinator: str, monkeypatch: pytest.MonkeyPatch, corrupt: bool
) -> None:
    """Between pull and decode, what one block holds is negated."""
    generate = Decode._generate

    def corrupt_and_generate(decode: Decode, blocks: list[int], *given: Any) -> list[int]:
        if corrupt:
            decode.layers()[1][:, blocks[0]] *= -1
        return generate(decode, blocks, *given)

    monkeypatch.setattr(Decode, "_generate", corrupt_and_generate)
    here = HereChild()
    row = Route("loopback", here, here, lambda: None).try_out(coordinator, Reference().tokens)
    assert row.tokens_equal is not corrupt
    assert row.good is not corrupt
    assert ("the tokens for 'a page' differ from the single-process run" in row.error) is corrupt
    assert ("the bytes differ from those offered in 20 of 20 timed pulls" in row.error) is corrupt


def test_a_handoff_that_is_used_twice_is_no_pull(coordinator: str) -> None:
    prefill, decode = Prefill("loopback", coordinator), Decode("loopback", coordinator)
    with closing(prefill), closing(decode):
        handoff = prefill.prefill("once", "Only once")["handoff"]
        decode.decode(handoff, num_tokens=2)
        with pytest.raises(StaleBlocks, match="request once"):
            decode.decode(handoff, num_tokens=2)


def test_a_killed_role_fails_its_row_with_a_reason() -> None:
    with Cluster() as cluster:
        coordinator = cluster.start()
        prefill, decode = cluster.hosts("tcp")
        steps = 0

        def kill_decode() -> None:
            nonlocal steps
            steps += 1
            if steps == 2:
                os.kill(decode.pid, signal.SIGKILL)

        row = Route("tcp", prefill, decode, kill_decode).try_out(coordinator, cluster.expected)
    assert not row.good
    assert f"the decode process {decode.pid} " in row.error


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child("reference")
    yield child
    child.close()


def test_a_stopped_child_is_killed_within_the_deadline(child: Child) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildError, match=r"did not answer reference open within 0.5 s and was killed"):
        child.call("reference", "open", within_s=0.5)
    assert not alive(child.pid)


def test_a_child_that_died_is_reported_with_its_status(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: not alive(child.pid))
    with pytest.raises(ChildError, match=r"reference process \d+ (ended with status -9 in|ended before) ref"):
        child.call("reference", "open")


def test_children_are_forks_of_a_process_with_one_thread(child: Child) -> None:
    parent = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1


def test_an_import_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise SystemExit(7)")
    done = demo("shm", engine="transformers", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "ChildError: the prefill process did not start; see its messages above" in done.stderr


def test_children_end_with_a_parent_that_was_killed() -> None:
    program = (
        "from kvlink.demo.route import Cluster\n"
        "import time\n"
        "with Cluster() as cluster:\n"
        "    cluster.start()\n"
        "    print(*cluster.pids(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        parent.kill()
    eventually(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    """Whether a process of this id runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
