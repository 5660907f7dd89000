# SPDX-License-Identifier: Apache-2.0
"""doctor and the command line on NIXL: which releases, where the backend is, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlink.cli.commands import app
from kvlink.doctor import nixl
from kvlink.doctor.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the backend, as its wheel has it."""
    folder = tmp_path / "kvlink_nixl"
    folder.mkdir()
    (folder / nixl.LIBRARY).touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize("release", ["1.0.0", "1.3.2", "1.5.1"])
def test_releases_that_were_compared(release: str) -> None:
    assert nixl.accepts(release)


@pytest.mark.parametrize("release", ["0.10.1", "1.5.2", "2.0.0", "1.5", "1.5.1rc1", ""])
def test_releases_that_were_not(release: str) -> None:
    assert not nixl.accepts(release)


def test_the_plugin_and_doctor_know_the_same_releases() -> None:
    header = (ROOT / "integrations" / "nixl" / "release.h").read_text()
    assert f'kOldestRelease[] = "{nixl.OLDEST}", kNewestRelease[] = "{nixl.NEWEST}"' in header


def test_doctor_says_what_is_missing() -> None:
    check = nixl.check()
    assert check.verdict is Verdict.PASS
    assert "absent" in check.evidence


def test_doctor_says_that_another_release_refuses(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "releases", lambda: {"nixl-cu12": "1.6.0"})
    check = nixl.check()
    assert check.verdict is Verdict.WARN
    assert "refuses to load" in check.evidence
    assert check.fix == "pip install nixl-cu12==1.5.1"
    monkeypatch.setattr(nixl, "releases", lambda: {"nixl-cu12": "1.4.0"})
    assert nixl.check().verdict is Verdict.PASS
    assert str(installed) in nixl.check().evidence


def test_the_command_prints_the_folder_and_a_line_for_each_engine(installed: Path) -> None:
    shown = CliRunner().invoke(app, ["nixl-plugin"])
    assert shown.exit_code == 0
    assert f"export NIXL_PLUGIN_DIR={installed}" in shown.output
    assert '"backends": ["KVLINK"]' in shown.output
    told = json.loads(CliRunner().invoke(app, ["nixl-plugin", "--json"]).output)
    assert told["folder"] == str(installed)
    assert set(told["engines"]) == {"vLLM", "Dynamo KVBM"}


def test_without_the_backend_the_command_says_how_to_get_it() -> None:
    result = CliRunner().invoke(app, ["nixl-plugin"])
    assert "pip install packaging/nixl" in str(result.exception)
