# SPDX-License-Identifier: Apache-2.0
"""Which lanes a change touches, and how a lane's output is counted."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def lanes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lanes", ROOT / ".ci" / "lanes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("csrc/transports/verbs/queue_pair.cc", ["transports", "sanitizers", "rdma"]),
        (
            "csrc/engine/lane.cc",
            ["transports", "capi", "simulate", "instructions", "sanitizers", "mutation", "soak"],
        ),
        ("csrc/device/cuda_copier.cc", ["transports", "sanitizers", "gpu"]),
        ("kvlink/coordinator/store/etcd/sync.py", ["processes", "simulate", "deploy", "docs", "mutation"]),
        ("kvlink/worker/worker.py", ["transports", "processes", "docs", "mutation"]),
        ("kvlink/monitoring/status_page/page.js", ["processes", "pages", "docs"]),
        ("integrations/vllm/decode/loads.py", ["processes", "docs", "mutation", "engines"]),
        ("docs/operate/coordinator.md", ["docs"]),
        ("docs/operate/monitoring.md", ["docs", "newcomer"]),
        ("docs/examples/streaming.py", ["processes", "docs", "newcomer"]),
        ("integrations/deploy/chart/values.yaml", ["deploy"]),
        ("tests/netns/test_two_hosts.py", ["netns"]),
        ("tests/transfer/test_pool.py", []),
        ("tests/mutation/known.py", ["mutation"]),
        ("README.md", ["newcomer"]),
        ("Makefile", ["processes", "deploy", "pythons", "image", "extras", "newcomer", "release"]),
        (".ci/lanes.json", []),
    ],
)
def test_a_path_touches_its_lanes(lanes: ModuleType, path: str, names: list[str]) -> None:
    assert lanes.touched([path]) == names


def test_every_file_has_a_row(lanes: ModuleType) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout: git ls-files says " + listed.stderr.strip())
    lanes.touched(listed.stdout.splitlines())


def test_some_path_touches_each_lane(lanes: ModuleType) -> None:
    """A lane that no change touches would stay green on paper."""
    assert {lane for _, found in lanes.TOUCHED for lane in found} == set(lanes.LANES)


def result(lane: str, ended: str, status: int = 0, commit: str = "HEAD") -> dict[str, Any]:
    green = None if status else {"commit": commit, "ended": ended}
    counts = {"passed": 3, "failed": status, "skipped": 0, "seed": 1, "seconds": 61}
    return {"lane": lane, "status": status, "commit": commit, "ended": ended, "green": green, **counts}


def test_the_newest_result_of_a_lane_is_kept_with_its_last_green_run(lanes: ModuleType) -> None:
    red, green, older = result("docs", "3", 1), result("docs", "2"), result("docs", "1")
    for order in permutations((red, green, older)):
        (kept,) = lanes.newest(*([each] for each in order)).values()
        assert kept == red | {"green": green["green"]}
    both = lanes.newest([result("netns", "1"), result("gone", "1")], [red])
    assert list(both) == ["netns", "docs"]
    assert json.loads(lanes.text_of(both.values())) == list(both.values())


def score(module: str, ended: str, killed: int) -> dict[str, Any]:
    counts = {
        "survived": 100 - killed,
        "timeout": 0,
        "equivalent": 0,
        "planted": [2, 3],
        "kinds": {"unit": [killed, 100]},
    }
    return {"module": module, "score": killed, "interval": [1, 2], "commit": "abc", "ended": ended, **counts}


@pytest.fixture
def checkout(lanes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes the lanes those of a small repository, and returns a function that calls git there."""
    if not shutil.which("git"):
        pytest.skip("no git on this machine: apt-get install git")
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    monkeypatch.setattr(lanes, "RESULTS", tmp_path / "build" / "lanes")
    monkeypatch.setattr(lanes, "SCORES", tmp_path / "build" / "mutation")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")
    (tmp_path / ".ci").mkdir()
    for name in ("lanes", "mutation"):
        (tmp_path / "build" / name).mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    lanes._git("init", "--quiet", "--initial-branch=main")

    def git(*command: str, **files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            lanes._git("add", str(path))
        return str(lanes._git(*command))

    git("commit", "--quiet", "--message=first", docs__a="1", tests__netns__a="1")
    return git


def test_a_lane_is_stale_when_its_sources_change_after_its_last_green_run(
    lanes: ModuleType, checkout: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = checkout("rev-parse", "--short", "HEAD")
    for name in lanes.LANES:
        each = result(name, "2026-01-02 00:00" if name == "docs" else "2026-01-01 00:00", commit=first)
        (lanes.RESULTS / f"{name}.json").write_text(json.dumps(each))
    assert lanes.stale() == []
    checkout("commit", "--quiet", "--message=second", docs__a="2", tests__netns__a="2")
    assert [name for name, _ in lanes.stale()] == ["netns", "docs"], "the oldest is first"
    lanes.main(["show"])
    assert (
        f"docs         green at {first}, 2026-01-02 00:00; 1 of its files changed since: make docs"
        in capsys.readouterr().out
    )
    red = result("docs", "2026-01-03 00:00", 1) | {"green": {"commit": first, "ended": "2026-01-02 00:00"}}
    (lanes.RESULTS / "docs.json").write_text(json.dumps(red))
    (lanes.RESULTS / "pages.json").unlink()
    (lanes.RESULTS / "image.json").write_text(
        json.dumps(result("image", "2026-01-01 00:00", commit="0123456"))
    )
    assert dict(lanes.stale())["pages"] == "was never green: make test-pages"
    assert [name for name, _ in lanes.stale()] == ["pages", "image", "netns", "docs"], "never, gone, old, red"


def test_the_record_is_a_commit_of_its_own_and_merges_by_the_newest(
    lanes: ModuleType, checkout: Callable[..., str]
) -> None:
    def ran(ended: str) -> None:
        (lanes.RESULTS / "docs.json").write_text(json.dumps(result("docs", ended)))
        lanes.record()

    ran("1")
    checkout("checkout", "--quiet", "-b", "side", docs__b="not committed")
    ran("3")
    assert checkout("show", "--name-only", "--format=", "HEAD") == ".ci/lanes.json"
    checkout("commit", "--quiet", "--message=b")
    checkout("checkout", "--quiet", "main")
    ran("2")
    with pytest.raises(subprocess.CalledProcessError):
        checkout("merge", "--quiet", "side")
    lanes.resolve()
    (merged,) = json.loads((lanes.ROOT / lanes.RECORD).read_text())
    assert (merged["ended"], merged["green"]["ended"]) == ("3", "3")
    checkout("commit", "--quiet", "--no-edit")


def test_the_newest_score_of_each_module_is_kept_beside_the_lanes(
    lanes: ModuleType, checkout: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [result("docs", "1"), score("lease", "2", 71), score("plan", "1", 60)]
    (lanes.ROOT / lanes.RECORD).write_text(lanes.text_of(kept))
    for ended, killed in (("3", 92), ("1", 50)):
        (lanes.SCORES / "lease.json").write_text(json.dumps(score("lease", ended, killed)))
        lanes.record()
        (lanes.SCORES / "lease.json").unlink()
    recorded = json.loads((lanes.ROOT / lanes.RECORD).read_text())
    assert [each.get("score", each.get("lane")) for each in recorded] == ["docs", 60, 92]
    lanes.main(["show"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "of lease" in line)
    assert line == (
        "mutants of lease         92 % killed (1 to 2 %), 8 survive, 0 time-outs, 0 equivalent, planted 2 of 3; "
        "unit 92 of 100; at abc, 3"
    )


def test_a_path_without_a_row_is_named(lanes: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"elsewhere/file\.c: no row of TOUCHED"):
        lanes.touched(["elsewhere/file.c"])


def test_counts_come_from_closing_lines_alone(lanes: ModuleType) -> None:
    output = """
    test_that_2 failed before
    [==========] Running 471 tests from 40 test suites.
    [  PASSED  ] 471 tests.
    === 2 failed, 120 passed, 3 skipped, 1 error in 12.34s ===
    119 passed, 4 skipped in 0.51s
    """
    shown = "\n".join(line.strip() for line in output.splitlines())
    assert lanes.counts(shown) == {"passed": 710, "failed": 3, "skipped": 7}
