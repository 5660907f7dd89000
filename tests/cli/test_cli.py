# SPDX-License-Identifier: Apache-2.0
"""The shell as an operator meets it: real processes, their exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import closed_port

from kvlink import __version__
from kvlink.config import CATALOGUE

HEAVY = ("grpc", "numpy", "torch", "kvlink._core", "kvlink.worker", "kvlink.benchmarks")


def kvlink(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVLINK_")}
    return subprocess.run(
        [sys.executable, "-m", "kvlink", *arguments],
        env=environment | {"COLUMNS": "100"} | env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def plugin(folder: Path, name: str, target: str, source: str) -> dict[str, str]:
    """Installs a package by hand that adds one command; returns the environment that sees it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvlink.commands]\n{name} = {target}\n")
    (folder / f"{target.partition(':')[0]}.py").write_text(source)
    return {"PYTHONPATH": str(folder)}


def test_help_lists_the_commands_without_loading_what_they_need() -> None:
    program = (
        "import sys\nfrom kvlink.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\nassert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "coordinator", "status", "doctor", "topology", "config", "version", "bench"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("arguments", [("version",), ("--version",)])
def test_version(arguments: tuple[str, ...]) -> None:
    done = kvlink(*arguments)
    assert (done.returncode, done.stdout) == (0, f"kvlink {__version__}\n")
    assert rows(kvlink("version", "--json")) == [{"kvlink": __version__}]


@pytest.mark.parametrize("arguments", [("nothing",), ("version", "--nothing"), ("bench", "nothing"), ()])
def test_bad_usage_exits_2(arguments: tuple[str, ...]) -> None:
    assert kvlink(*arguments).returncode == 2


def test_an_error_is_one_sentence_and_debug_shows_where_it_came_from() -> None:
    done = kvlink("config", KVLINK_PORT="many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvlink: KVLINK_PORT='many' is not a whole number")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in kvlink("--debug", "config", KVLINK_PORT="many").stderr


def test_config_names_the_source_of_every_value() -> None:
    done = kvlink("config", "--json", KVLINK_PORT="7401")
    found = {row["name"]: row for row in rows(done)}
    assert list(found) == [setting.env for setting in CATALOGUE]
    assert (found["KVLINK_PORT"]["value"], found["KVLINK_PORT"]["source"]) == (7401, "KVLINK_PORT")
    assert (found["KVLINK_HOST"]["value"], found["KVLINK_HOST"]["source"]) == ("127.0.0.1", "default")
    assert "7401" in kvlink("config", KVLINK_PORT="7401").stdout


def test_topology() -> None:
    (row,) = rows(kvlink("topology", "--json"))
    assert row["num_threads"] >= 1
    assert row["nodes"][0]["memory_bytes"] > 0
    assert "socket(s)" in kvlink("topology").stdout


def test_doctor_is_good_here_and_fails_where_something_does() -> None:
    done = kvlink("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert {row["verdict"] for row in rows(done)} <= {"pass", "warn"}
    broken = kvlink("doctor", KVLINK_HOST="192.0.2.1")
    assert broken.returncode == 1
    assert "fix: set KVLINK_HOST" in broken.stdout


def test_status_where_no_coordinator_is() -> None:
    done = kvlink("status", "--coordinator", "127.0.0.1:9")  # discard: nobody listens there
    assert (done.returncode, done.stdout) == (1, "")
    assert "kvlink coordinator" in done.stderr
    assert "Traceback" not in done.stderr
    assert kvlink("status", "--coordinator", "nowhere").returncode == 2


def test_a_coordinator_serves_and_ends_on_sigterm() -> None:
    program = [sys.executable, "-m", "kvlink", "coordinator", "--port", "0", "--reflection"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            (counts,) = rows(kvlink("status", "--coordinator", address, "--json"))
            assert (counts["coordinator"], counts["workers"]) == (address, 0)
            assert "0 workers" in kvlink("status", KVLINK_COORDINATOR=address).stdout
            assert kvlink("coordinator", "--port", address.rpartition(":")[2]).returncode == 2
        finally:
            process.terminate()
    assert process.returncode == 0


def first_line(*arguments: str) -> tuple[dict[str, Any], str]:
    """Starts a server, ends it after its first line, and returns that line and the rest of its output."""
    program = [sys.executable, "-m", "kvlink", *arguments, "--port", "0", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
        finally:
            process.terminate()
        return ready, process.stdout.read()


def test_a_coordinator_whose_store_does_not_answer_does_not_say_that_it_serves() -> None:
    with closed_port() as nobody:
        program = [
            sys.executable,
            "-m",
            "kvlink",
            "coordinator",
            "--port",
            "0",
            "--store",
            f"etcd://{nobody}",
        ]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
            finally:
                process.terminate()
            logged = process.communicate()[1]
    assert "its store does not answer; calls are refused until it does" in said
    assert "coordinator serving" not in logged
    assert logged.count("lost etcd") <= 2


def test_servers_say_as_json_where_they_listen() -> None:
    pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")
    ready, rest = first_line("coordinator")
    assert (set(ready), rest) == ({"coordinator", "status_page", "problem"}, "")
    assert (ready["status_page"], ready["problem"]) == (None, "")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", ready["coordinator"])
    nobody = "http://127.0.0.1:9"
    ready, rest = first_line("router", "--prefill", nobody, "--decode", nobody)
    assert (set(ready), rest) == ({"router"}, "")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", ready["router"])


def test_the_line_of_a_coordinator_has_the_url_of_its_page() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'kvlink[metrics]'")
    pytest.importorskip("aiohttp", reason="pip install 'kvlink[metrics]'")
    ready, rest = first_line("coordinator", "--http-port", "0")
    assert rest == ""
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", ready["status_page"])


def test_a_command_of_another_package_runs_with_its_options(tmp_path: Path) -> None:
    source = (
        "import typer\napp = typer.Typer()\n"
        "@app.command()\ndef one(loud: bool = False):\n    print('one', loud)\n"
        "@app.command()\ndef bad():\n    raise typer.Exit(1)\n"
    )
    env = plugin(tmp_path, "extra", "kvlink_test_plugin:app", source)
    assert "Commands of kvlink_test_plugin" in kvlink("--help", **env).stdout
    assert kvlink("extra", "one", "--loud", **env).stdout == "one True\n"
    assert kvlink("extra", "bad", **env).returncode == 1
    assert "one" in kvlink("extra", "--help", **env).stdout


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('out of order')", "import nothing_like_this", "app = 3"]
)
def test_a_broken_package_breaks_only_its_own_command(tmp_path: Path, source: str) -> None:
    env = plugin(tmp_path, "extra", "kvlink_test_plugin:app", source)
    assert kvlink("version", **env).returncode == 0
    assert kvlink("--help", **env).returncode == 0
    done = kvlink("extra", "anything", **env)
    assert done.returncode == 2
    assert done.stderr.startswith("kvlink: `kvlink extra` comes from kvlink_test_plugin:app")
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_to_the_end() -> None:
    program = [sys.executable, "-m", "kvlink", "config", "--json"]
    unread, output = os.pipe()
    os.close(unread)
    with subprocess.Popen(program, stdout=output, stderr=subprocess.PIPE) as process:
        os.close(output)
        assert process.stderr is not None
        assert process.stderr.read() == b"kvlink: the reader of the output closed it before all was written\n"
    assert process.returncode == 1
