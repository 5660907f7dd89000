# SPDX-License-Identifier: Apache-2.0
"""Each command refuses each wrong path, host, port, address, number and name with one sentence, before it starts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvlink import cli
from kvlink.cli import app, main
from kvlink.cli.plugins import GROUP

UNREADABLE = ("/nowhere/x", "/", "/proc/self/mem", "/dev/null")
UNWRITABLE = ("/nowhere/x/y", "/", "/proc/x", "/sys/x")
NO_FOLDER = ("/proc/x", "/sys/x", "/dev/null", "/etc/hostname")
NO_HOST = ("10.0.0.5:7400", "http://10.0.0.5", "a b", "-x", "", "256.1.1.1", "x" * 300, "[::1", "*")
NO_ADDRESS = ("nowhere", "h:x", "h:99999", ":", "http://127.0.0.1:1", "a b:1", "127.0.0.1:0", "h:1,")
NO_URL = (
    "nowhere",
    "ftp://x",
    "http://",
    "http://a b",
    "http://h:x",
    "http://h:99999",
    "http://h:0",
    "http://u:p@h",
)
NO_NAME = ("bogus", "ä b", ",")

# What an option takes, where it is not a number. Text that kvlink only passes on cannot be wrong here.
WRONG: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--tenants", "--calibrate", "--prompt-file", "--tokens-file"), UNREADABLE),
    **dict.fromkeys(("--chat", "results"), UNREADABLE),
    **dict.fromkeys(("--log", "--output", "--token"), UNWRITABLE),
    **dict.fromkeys(("--dir", "--environments"), NO_FOLDER),
    "--chart": ("/proc/x", "/dev/null"),
    "--report": ("anything without --day-one",),
    **dict.fromkeys(("--host", "--http-host"), NO_HOST),
    "--coordinator": NO_ADDRESS,
    **dict.fromkeys(("--prefill", "--decode", "servers"), NO_URL),
    "--trace": ("/nowhere/x", "/", "/dev/null"),
    **dict.fromkeys(("--transport", "--store", "--order", "--layout", "--path", "--validate"), NO_NAME),
    **dict.fromkeys(("--engine", "--pp", "--tp", "--gpus", "--replicas", "--workers"), NO_NAME),
    **dict.fromkeys(("--tokens", "--rate", "--slots", "--cpus", "--memory"), NO_NAME),
    **dict.fromkeys(("before", "after", "--command"), NO_NAME),
    "--device": (*NO_NAME, "cuda:x"),
    "--model": (*NO_NAME, "/nowhere/x"),
    "--tenant": ("coordinator", "a/b", "", "*"),
}
FREE = {("drain", "what"), ("replicate", "--model"), ("replicate", "--prompt"), ("report", "--title")}
NUMBERS = (int, float, list)
NEEDED = {
    "bench compare": ["/nowhere/b"],
    "coordinator": ["--port", "0"],
    "replicate": ["http://127.0.0.1:9", "--model", "m"],
    "router": ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9", "--port", "0"],
    "top": ["--rounds", "1"],
}
BESIDE = {
    "--http-host": ["--http-port", "0"],
    "--order": ["--transport", "shm"],
}


def leaves() -> Iterator[tuple[str, Any]]:
    """Each command with its words."""
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    todo: list[tuple[str, Any]] = [("", typer.main.get_command(app))]
    while todo:
        words, command = todo.pop()
        if words in others:
            command = typer.main.get_command(others.pop(words).load())
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        else:
            todo += [(f"{words} {name}".strip(), inner[name]) for name in inner]


LEAVES = dict(sorted(leaves()))
SAID = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SAID:
    """Runs a command line in an empty folder, and returns its status and what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return int(str(end.value.code or 0)), capsys.readouterr().err

    return run


def wrong_values(command: str, option: Any) -> Iterator[str]:
    name = option.opts[0]
    kind = option.type_descriptor.annotation
    if (command, name) in FREE or getattr(option, "is_flag", False):
        return
    if (kind in NUMBERS and name not in WRONG) or "int" in str(kind) or kind in (int, float):
        yield from ("x", "", "1,x")
        if option.min is not None:
            yield str(option.min - 1)
        if option.max is not None:
            yield str(option.max + 1)
    else:
        yield from WRONG[name]


def lines_of(command: str) -> Iterator[list[str]]:
    """Each wrong command line, with the other arguments as they should be."""
    for option in LEAVES[command].params:
        name = option.opts[0]
        for value in wrong_values(command, option) if name != "--help" else ():
            beside = list(NEEDED.get(command, []))
            if name in beside:
                at = beside.index(name)
                del beside[at : at + 2]
            if not name.startswith("--"):
                beside = [word for word in beside if "://" not in word]
            given = [f"{name}={value}"] if name.startswith("--") else [value]
            yield [*command.split(), *given, *beside, *BESIDE.get(name, [])]


@pytest.mark.parametrize("command", LEAVES)
def test_a_wrong_argument_is_one_sentence_and_status_2(said: SAID, command: str, tmp_path: Path) -> None:
    wrong = []
    for line in lines_of(command):
        status, text = said(*line)
        boxed = "Invalid value" in text or "Missing" in text  # the parser's own sentence
        if status != 2 or not text or "Traceback" in text or (text.count("\n") != 1 and not boxed):
            wrong.append((line, status, text[-300:]))
        if left := list(tmp_path.iterdir()):
            wrong.append((line, "left behind", str(left)))
    assert not wrong


def test_every_command_prints_json() -> None:
    without = {
        words for words, command in LEAVES.items() if "--json" not in {p.opts[0] for p in command.params}
    }
    assert without == set()


def test_what_may_be_repeated_is_known() -> None:
    found = {
        p.opts[0] for command in LEAVES.values() for p in command.params if getattr(p, "multiple", False)
    }
    assert found == cli.REPEATABLE


def test_an_option_with_two_values_is_refused(said: SAID) -> None:
    status, text = said("demo", "--transport", "shm", "--transport=tcp")
    assert (status, text) == (
        2,
        "kvlink: --transport is given twice; give it once, with commas between values if it takes a list\n",
    )
    assert said("version", "--json", "--json")[0] == 0


@pytest.mark.parametrize(
    "given", [["--host", "10.0.0.5,*.serving.svc"], ["--host=10.0.0.5", "--host=*.serving.svc"]]
)
def test_hosts_of_certificates_come_with_commas_or_repeated(
    said: SAID, capsys: pytest.CaptureFixture[str], given: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="pip install 'kvlink[certs]'")
    from kvlink.control.security.authority import names_in

    assert said("certs", *given)[0] == 0
    names = names_in((tmp_path / "certs" / "default.pem").read_bytes())
    assert names[-2:] == ["10.0.0.5", "*.serving.svc"]


def test_a_port_that_is_taken_is_refused_before_anything_starts(said: SAID) -> None:
    pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for line in (
            ["coordinator", "--port", port],
            ["coordinator", "--port=0", "--http-port", port],
            ["router", "--prefill=http://127.0.0.1:9", "--decode=http://127.0.0.1:9", "--port", port],
        ):
            status, text = said(*line)
            assert (status, text.count("\n")) == (2, 1)
            assert text.startswith(
                f"kvlink: cannot listen on 127.0.0.1:{port}: Address already in use; choose another"
            )


def test_an_option_without_effect_is_refused(said: SAID) -> None:
    assert said("coordinator", "--port=0", "--http-host", "0.0.0.0") == (
        2,
        "kvlink: --http-host has no effect without --http-port; give both\n",
    )


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "cannot use /x: Permission denied; name another path",
        ),
        (OSError(24, "Too many open files"), 1, "Too many open files; --debug shows where"),
        (OverflowError("int too large"), 2, "an argument is too large a number: int too large"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["path", "machine", "number", "Ctrl-C"],
)
def test_no_error_of_a_command_is_a_traceback(
    said: SAID, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, says: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert said("version") == (status, f"kvlink: {says}\n" if says else "")


def test_kvlink_alone_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().out
    assert end.value.code == 2
    assert shown.count("\n") < 12
    for command in ("doctor", "demo", "bench pull", "coordinator", "config", "--help"):
        assert f"kvlink {command} " in shown
