# SPDX-License-Identifier: Apache-2.0
"""The report of the first day on a host: which steps it has, and that a step that fails does not end it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlink.cli import app
from kvlink.doctor.day_one import Result, Step, report, run, steps, write
from kvlink.errors import ConfigError


def titles(num_gpus: int, *nics: str) -> list[str]:
    return [step.title for step in steps(num_gpus, nics)]


def test_the_steps_follow_the_hardware() -> None:
    bare = titles(0)
    assert bare[-1] == "transports"
    assert "GPUDirect, compared byte by byte" not in {*titles(2), *titles(0, "mlx5_0")}
    assert set(titles(2, "mlx5_0")) - set(titles(1, "mlx5_0")) == {"GPU pulls between two GPUs"}
    assert titles(1, "mlx5_0")[-1] == titles(0, "mlx5_0")[-1] == "RDMA statistics after"


def test_every_command_of_kvlink_parses() -> None:
    for step in steps(2, ["mlx5_0"]):
        if step.command[0] == sys.executable:
            done = CliRunner().invoke(app, [*step.command[3:], "--help"])
            assert done.exit_code == 0, step


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (("sh", "-c", "echo out; echo err >&2; exit 3"), 3, "out\nerr"),
        (("no-such-program",), None, "not installed"),
        (("cat", "/"), 1, "cat: /: Is a directory"),
    ],
)
def test_a_step_that_fails_is_a_result(command: tuple[str, ...], status: int | None, says: str) -> None:
    result = run(Step("step", command))
    assert (result.status, result.output) == (status, says)


@pytest.mark.verify
def test_a_step_that_hangs_is_ended() -> None:
    result = run(Step("step", ("sh", "-c", "echo begun; exec sleep 60"), limit_s=0.5))
    assert (result.status, result.output) == (None, "begun\n\nended after its time limit")


def test_the_report_has_every_step_and_its_output(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    found = [Step("first", ("true",)), Step("second", (sys.executable, "-m", "kvlink", "doctor"))]
    done = [Result(found[0], 0, 0.1, "fine"), Result(found[1], 1, 2.0, "fail  memlock")]
    lines = list(write(path, found, lambda step: done[found.index(step)]))
    assert lines[-1] == f"{path} has 2 steps, of which 1 failed. Please send it back."
    text = path.read_text()
    assert text == report(done)
    assert "| second | 1 | 2.0 |" in text
    assert "`kvlink doctor`\n\n````\nfail  memlock\n````" in text


def test_an_interrupted_run_leaves_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    found = [Step("first", ("true",)), Step("second", ("true",)), Step("third", ("true",))]
    seen: list[str] = []

    def run(step: Step) -> Result:
        seen.append(path.read_text())
        if step.title == "second":
            raise KeyboardInterrupt
        return Result(step, 0, 0.1, "fine")

    with pytest.raises(KeyboardInterrupt):
        list(write(path, found, run))
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == seen[-1]
    assert 'Not complete: the run was interrupted in the step "first".' in seen[0]
    assert 'Not complete: the run was interrupted in the step "second".' in seen[1]
    assert "| first | 0 | 0.1 |" in seen[1]
    assert "Not complete" not in report([])
    with pytest.raises(ConfigError, match="name another file"):
        list(write(path, found, run))


def test_a_report_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("another host's")
    with pytest.raises(ConfigError, match=r"report.md: File exists; name another file by --report"):
        list(write(tmp_path / "report.md", []))
    assert (tmp_path / "report.md").read_text() == "another host's"
