# SPDX-License-Identifier: Apache-2.0
"""The commands: their output, and their errors for wrong arguments."""

from __future__ import annotations

import ctypes
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console
from waiting import closed_port

from kvlink.cli import commands, main
from kvlink.cli.commands import app
from kvlink.cli.plugins import GROUP
from kvlink.cli.status import _row
from kvlink.cli.tables import Fitted, _table, age_text, plain_table, size_text
from kvlink.hardware.host_identity import this_host
from kvlink.layout import Geometry, dense
from kvlink.layout.model_identity import identity_text
from kvlink.types import TransportCard, WorkerCard

LOOKING = ("doctor", "topology", "config")
COMMANDS = ("coordinator", "top", "version", "bench", "router")


def kvlink(*arguments: str, stdout: Any = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KVLINK_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-m", "kvlink", *arguments],
        env=own | env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


# Where it goes.


@pytest.mark.parametrize("command", LOOKING)
def test_a_terminal_that_is_not_utf_8(command: str) -> None:
    done = kvlink(command, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert kvlink(command, PYTHONIOENCODING="utf-8").returncode == 0


def test_letters_that_an_encoding_lacks_have_others_in_their_place() -> None:
    assert " x " in kvlink("topology", PYTHONIOENCODING="ascii").stdout
    done = kvlink("config", PYTHONIOENCODING="ascii", KVLINK_TLS_CA="/été/→")
    assert r"/\xe9t\xe9/->" in done.stdout


@pytest.mark.parametrize(
    "arguments", [*((each,) for each in LOOKING), ("config", "--json"), ("--version",), ("-h",)]
)
def test_a_full_disk_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = kvlink(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (
        1,
        "kvlink: cannot write to standard output: No space left on device\n",
    )


def test_a_daemon_without_stdout_works() -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m kvlink config >&-"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


# How wide.


@pytest.mark.parametrize("command", ["topology", "config"])
def test_without_a_terminal_tables_are_80_columns_wide(command: str) -> None:
    lines = kvlink(command).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert max(map(len, kvlink(command, COLUMNS="60").stdout.splitlines())) <= 60


def test_wide_shows_all_columns_before_and_behind_the_command() -> None:
    narrow = kvlink("config", COLUMNS="80").stdout
    assert "not shown: default, source (--wide shows all)" in narrow
    for arguments in ("--wide", "config"), ("config", "--wide"):
        wide = kvlink(*arguments, COLUMNS="80").stdout
        assert "not shown" not in wide
        assert re.search(r"KVLINK_PORT +0 +0 +default +Sets the port on which tcp", wide)


def shown(table: Fitted, width: int) -> str:
    console = Console(width=width, record=True, file=sys.stderr)
    console.print(table)
    return console.export_text()


def test_the_least_important_columns_are_left_out_and_named() -> None:
    table = plain_table("a", "b", "c", "d")
    table.add_row("a" * 20, "b" * 20, "c" * 20, "d" * 20)
    fitted = Fitted(table, ("d", "b"))
    assert [letter for letter in "abcd" if letter * 20 in shown(fitted, 100)] == ["a", "b", "c", "d"]
    assert [letter for letter in "abcd" if letter * 20 in shown(fitted, 66)] == ["a", "b", "d"]
    assert [letter for letter in "abcd" if letter * 20 in shown(fitted, 44)] == ["b", "d"]
    assert "not shown: a, c (--wide shows all)" in shown(fitted, 44)
    assert [letter for letter in "abcd" if letter * 20 in shown(fitted, 20)] == ["d"]


def test_nothing_is_cut_off_at_any_width() -> None:
    cells = {
        "worker": "prefill-0",
        "of limit": "0.82",
        "a longer head": "1",
        "limit": "non-temporal copy",
        "p50": "11,170",
    }
    table = plain_table(*cells)
    table.add_row(*cells.values())
    for width in range(9, 90):
        heads, _, values, *_ = shown(Fitted(table, ("worker", "p50")), width).splitlines()
        named = re.split(r"\s{2,}", heads.strip())
        assert re.split(r"\s{2,}", values.strip()) == [cells[name] for name in named], width
        assert max(len(heads.rstrip()), len(values.rstrip())) <= width


def test_words_are_broken_between_and_not_within() -> None:
    table = plain_table("id", "why")
    table.add_row("worker-1", "this sentence is longer than what a line of this terminal has room for")
    lines = shown(Fitted(table), 60).splitlines()
    assert {len(line) <= 60 for line in lines} == {True}
    words = " ".join(" ".join(lines).split())
    assert words.endswith("worker-1 this sentence is longer than what a line of this terminal has room for")


def test_a_row_of_a_benchmark_is_readable_at_80_columns() -> None:
    row = {
        "transport": "shm", "block_bytes": 16384, "blocks": 4096, "bytes": 67108864, "iters": 20, "order": "random",
        "min_us": 5559.2, "p50_us": 11169.85, "p90_us": 19466.3, "p99_us": 73132.3, "gib_per_s": 5.59,
        "limit": "non-temporal copy", "of_limit": 0.82, "cpu_s_per_gib": 0.089, "verified": True, "other": None,
    }  # fmt: skip
    text = shown(_table([row], "bench pull"), 80)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("block bytes", "p50 us", "GiB/s", "16 KiB", "11,170", "shm"):
        assert words in text, text
    assert "67,108,864" not in shown(_table([row], ""), 300)


# For people.


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (16384, "16 KiB"),
        (1536, "1.50 KiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (42, "42 s"), (90, "1.5 min"), (3600, "1.0 h"), (86400 * 12, "12 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_status_says_when_a_worker_started_and_not_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = 1_795_590_548_997_790_078
    monkeypatch.setattr(time, "time", lambda: epoch / 1e9 + 7200)
    text = identity_text("a" * 16, {"weights": "1", "name": "/models/llama"})
    layout = (dense(Geometry(1, 1, 64, 8, model=text)),)
    ways = (TransportCard("tcp", b"", (), b""),)
    card = WorkerCard("prefill-0", epoch, b"", "10.0.0.1:7", this_host(), layout, (1 << 27,), ways)
    assert _row(card, {}, as_json=True)["model"] == text
    assert _row(card, {}, as_json=False)["model"] == "a" * 16 + " /models/llama"
    text = shown(_table([_row(card, {}, as_json=False)], ""), 300)
    assert "2.0 h ago" in text
    assert "128 MiB" in text
    assert not re.search(r"\d{6}|\d,\d{3},", text)
    assert _row(card, {}, as_json=True)["epoch"] == epoch


# Ways in.


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help(command: str) -> None:
    done = kvlink(command, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: kvlink" in done.stdout


def test_help_is_a_command_too() -> None:
    assert kvlink("help", "version").stdout == kvlink("version", "--help").stdout
    assert kvlink("help").stdout == kvlink("--help").stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvlink do", {"doctor"}),
        ("kvlink bench p", {"pull", "plan", "peers"}),
        ("kvlink router --pre", {"--prefill"}),
        ("kvlink demo --transport s", {"shm"}),
        ("kvlink bench pull --transport shm,c", {"shm,cma", "shm,cuda"}),
        ("kvlink predict --model qwen2", {"qwen2.5-7b"}),
    ],
)
def test_shells_complete_commands_and_those_of_other_packages(words: str, offered: set[str]) -> None:
    at = str(len(words.split()) - 1)
    done = kvlink(_KVLINK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=at)
    assert set(done.stdout.split()) == offered, done.stderr


def test_completion_knows_the_transports() -> None:
    from kvlink.cli.checks import TRANSPORTS
    from kvlink.transfer.engine import available_transports
    from kvlink.transfer.transport_names import NAMED_ONLY

    assert (*available_transports(), *NAMED_ONLY) == TRANSPORTS


def test_a_table_of_constants_shows_no_progress() -> None:
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "kvlink", "config"]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=terminal, env=os.environ | {"TERM": "xterm"}
    )
    os.write(terminal, b"end")
    assert (done.returncode, os.read(screen, 100)) == (0, b"end")
    os.close(screen)
    os.close(terminal)


def test_certs_as_json(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    done = kvlink("certs", "--dir", str(tmp_path / "a b"), "--json")
    assert done.returncode == 0, done.stderr
    made = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith("{") for line in made)
    assert f'"KVLINK_TLS_CERT": "{tmp_path}/a b/default.pem"' in made[1]
    again = kvlink("certs", "--dir", str(tmp_path / "a b"), "--renew")
    assert f"KVLINK_TLS_CERT='{tmp_path}/a b/default.pem'" in again.stdout


def test_q_ends_top() -> None:
    with closed_port() as nobody:
        screen, terminal = pty.openpty()
        command = [sys.executable, "-m", "kvlink", "top", "--coordinator", nobody]
        with subprocess.Popen(
            command, stdin=terminal, stdout=terminal, env=os.environ | {"TERM": "xterm"}
        ) as process:
            os.close(terminal)
            assert os.read(screen, 1)  # it has drawn: it listens
            os.write(screen, b"xq")
            assert process.wait(60) == 0
        os.close(screen)


UNREADABLE = ("/nowhere/x", "/", "/proc/self/mem", "/dev/null", "LOCKED/file")
UNWRITABLE = ("/nowhere/x/y", "/", "/proc/x", "/sys/x", "LOCKED/x", "LOCKED/file")
NO_FOLDER = ("/proc/x", "/sys/x", "/dev/null", "/etc/hostname", "LOCKED/x")
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
    **dict.fromkeys(("--chat", "--suite", "results", "files"), UNREADABLE),
    **dict.fromkeys(("--log", "--output", "--token"), UNWRITABLE),
    **dict.fromkeys(("--dir", "--environments"), NO_FOLDER),
    "--chart": ("/proc/x", "/dev/null", "LOCKED/x"),
    "--report": ("anything without --day-one",),
    **dict.fromkeys(("--host", "--http-host"), NO_HOST),
    "--coordinator": NO_ADDRESS,
    **dict.fromkeys(("--prefill", "--decode", "servers"), NO_URL),
    "--trace": ("/nowhere/x", "/", "/dev/null"),
    **dict.fromkeys(("--transport", "--store", "--order", "--layout", "--path", "--validate"), NO_NAME),
    **dict.fromkeys(("--engine", "--pp", "--tp", "--gpus", "--replicas", "--workers"), NO_NAME),
    **dict.fromkeys(("--tokens", "--rate", "--slots", "--cpus", "--memory", "--beside"), NO_NAME),
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


@pytest.fixture
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which nobody may write, and a file that nobody may read, also as root."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "file").write_text("{}")
    (folder / "file").chmod(0)
    folder.chmod(0o500)
    with without_rights_over_files():
        with pytest.raises(PermissionError):
            (folder / "file").read_text()
        yield folder
    folder.chmod(0o700)


@contextmanager
def without_rights_over_files() -> Iterator[None]:
    """Disables CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of this thread until the end of the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; again for capabilities above 31
    assert libc.capget(version_3, rights) == 0
    effective, rights[0] = rights[0], rights[0] & ~0b110
    assert libc.capset(version_3, rights) == 0
    yield
    rights[0] = effective
    assert libc.capset(version_3, rights) == 0


@pytest.mark.parametrize("command", LEAVES)
def test_a_wrong_argument_is_one_sentence_and_status_2(
    said: SAID, command: str, tmp_path: Path, locked: Path
) -> None:
    wrong = []
    for words in lines_of(command):
        line = [word.replace("LOCKED", str(locked)) for word in words]
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
    assert found == commands.REPEATABLE


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

    monkeypatch.setattr(commands, "app", fail)
    assert said("version") == (status, f"kvlink: {says}\n" if says else "")


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        ("KeyboardInterrupt", 130),
        ("ImportError('initialization failed') from KeyboardInterrupt()", 130),  # by a native module
        ("ImportError('broken') from ValueError()", 1),
    ],
)
def test_ctrl_c_while_modules_load_is_no_traceback(raised: str, status: int) -> None:
    program = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer':\n"
        f"            raise {raised}\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from kvlink.cli import main\n"
        "main(['version'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (status, status == 1)


def test_kvlink_alone_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().out
    assert end.value.code == 2
    assert shown.count("\n") < 12
    for command in ("doctor", "demo", "bench pull", "coordinator", "config", "--help"):
        assert f"kvlink {command} " in shown
