# SPDX-License-Identifier: Apache-2.0
"""kvlink replicate: which prefixes are copied, and where."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kvlink.errors import ConfigError
from kvlink.integrations.router.commands.replicate import Counters, app, in_rounds, outcome

TOKENS = 1576
KEY = "sk-not-to-be-shown"


class Target:
    """A server that answers as vLLM does, and counts where the tokens of a prompt came from."""

    def __init__(self, pulled: int = 1536, **results: int) -> None:
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.pulled, self.results = pulled, results
        self.has_metrics = self.has_kvlink = True
        self.reads_until_counted = 0
        self.gone = Event()
        self.answer: Callable[[BaseHTTPRequestHandler], None] | None = None
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                send(self, 200, target.metrics()) if target.has_metrics else send(self, 404, "")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                target.asked.append((self.path, self.headers["Authorization"], body))
                if target.answer:
                    target.answer(self)
                else:
                    send(self, 200, json.dumps({"usage": {"prompt_tokens": TOKENS}}))

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def metrics(self) -> str:
        """Returns what was there before, and what the request has added, if it is counted."""
        counted = bool(self.asked)
        if counted and self.reads_until_counted:
            self.reads_until_counted -= 1
            counted = False
        tokens = {"external_kv_transfer": self.pulled, "local_compute": TOKENS - self.pulled}
        lines = [
            f'vllm:prompt_tokens_by_source_total{{engine="{engine}",model_name="a",source="{source}"}} '
            f"{100.0 + (tokens.get(source, 0) + engine) // 2 * counted}"
            for engine in (0, 1)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ]
        if self.has_kvlink:
            lines.append("# TYPE vllm:kvlink_turns_total counter")
            lines += [
                f'vllm:kvlink_turns_total{{engine="0",result="{name}"}} {7.0 + (n if counted else 0)}'
                for name, n in {"shared": 0, **self.results}.items()
            ]
        return "\n".join(lines) + "\n"


def send(handler: BaseHTTPRequestHandler, status: int, text: str, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())


@pytest.fixture
def start() -> Iterator[Callable[[Target], Target]]:
    with ExitStack() as stack:

        def started(target: Target) -> Target:
            stack.callback(target.server.server_close)
            stack.callback(target.server.shutdown)
            stack.callback(target.gone.set)
            Thread(target=target.server.serve_forever, daemon=True).start()
            return target

        yield started


def replicate(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlink", "replicate", "--model", "a", "--pause-s", "0", *arguments],
        env={**os.environ, **env},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


Start = Callable[[Target], Target]


def test_each_server_is_asked_for_one_token_and_its_counters_say_what_it_did(start: Start) -> None:
    first, second = start(Target(pulled=0)), start(Target(found=1, loaded=1))
    servers = (f"{first.url}/v1/", second.url, first.url)  # the first one is named twice
    done = replicate(*servers, "--prompt", "You are", "--json", VLLM_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    one, other = rows(done)
    assert (one["server"], one["state"], one["computed"], one["pulled"]) == (first.url, "computed", TOKENS, 0)
    assert one["note"] == "no peer had more of it, or share_prefixes is off"
    assert (other["server"], other["state"], other["tokens"]) == (second.url, "copied", TOKENS)
    assert (other["pulled"], other["cached"], other["computed"]) == (1536, 0, 40)
    assert (other["results"], other["note"]) == ({"found": 1, "loaded": 1}, "")
    body = {"model": "a", "prompt": "You are", "max_tokens": 1, "temperature": 0}
    assert first.asked == second.asked == [("/v1/completions", f"Bearer {KEY}", body)]


def test_people_read_a_line_for_each_server(start: Start) -> None:
    done = replicate(start(Target(loaded=1)).url, "--prompt", "You are")
    assert done.stdout.startswith("http://127.0.0.1:")
    assert done.stdout.endswith("; 1,536 tokens pulled, 0 in its cache, 40 computed; loaded 1\n")
    assert ": copied in " in done.stdout


def test_a_prompt_that_is_counted_after_its_answer(start: Start) -> None:
    target = Target()
    target.reads_until_counted = 2
    (row,) = rows(replicate(start(target).url, "--json", stdin="You are"))
    assert (row["state"], row["pulled"]) == ("copied", 1536)
    assert target.asked[0][2]["prompt"] == "You are"
    assert target.asked[0][1] is None


def test_prefixes_from_files(start: Start, tmp_path: Path) -> None:
    target = start(Target())
    messages = [{"role": "system", "content": "You are"}]
    for option, text in (("prompt", "Text\n"), ("tokens", "[1, 2]"), ("chat", json.dumps(messages))):
        (tmp_path / option).write_text(text)
    for option, name in (("--prompt-file", "prompt"), ("--tokens-file", "tokens"), ("--chat", "chat")):
        assert replicate(target.url, option, str(tmp_path / name)).returncode == 0
    assert [(path, body.get("prompt"), body.get("messages")) for path, _, body in target.asked] == [
        ("/v1/completions", "Text\n", None),
        ("/v1/completions", [1, 2], None),
        ("/v1/chat/completions", None, messages),
    ]


def test_servers_without_the_counters_say_so(start: Start) -> None:
    foreign, silent = Target(pulled=0), Target()
    foreign.has_kvlink = silent.has_metrics = False
    one, other = rows(replicate(start(foreign).url, start(silent).url, "--prompt", "You", "--json"))
    assert (one["state"], one["note"]) == (
        "computed",
        "no counters of kvlink: this server pulls from no peer",
    )
    assert (other["state"], other["note"]) == (
        "answered",
        "copied or computed is not known: the server has no such counters",
    )


def refuse(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 401, f"\x1b[31mno {KEY}" + "!" * 500)


def redirect(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 307, "elsewhere", Location="http://127.0.0.1:9/")


def garble(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, '{"usage": []}')


def speak_something_else(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"220 mail\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (refuse, "/v1/completions answered HTTP 401:  [31mno …!!!"),
        (redirect, "/v1/completions answered HTTP 307: elsewhere"),
        (garble, "the answer is not that of a completion"),
        (speak_something_else, "no HTTP from /v1/completions: BadStatusLine"),
    ],
)
def test_a_server_that_fails_is_named_and_the_others_are_asked(
    start: Start, answer: Callable[[BaseHTTPRequestHandler], None], why: str
) -> None:
    bad, good = start(Target()), start(Target())
    bad.answer = answer
    done = replicate(bad.url, good.url, "--prompt", "You are", "--json", VLLM_API_KEY=KEY)
    failed, copied = rows(done)
    assert (failed["server"], failed["state"], copied["state"]) == (bad.url, "failed", "copied")
    assert failed["note"].startswith(why)
    assert len(failed["note"]) <= 200
    assert (done.returncode, done.stderr) == (1, f"kvlink: 1 of 2 servers failed: {bad.url}\n")
    assert KEY not in done.stdout


def test_a_server_that_is_not_there_and_those_that_do_not_end_their_answers(start: Start) -> None:
    def wait(handler: BaseHTTPRequestHandler) -> None:
        handler.server.target.gone.wait()  # type: ignore[attr-defined]

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while not handler.server.target.gone.is_set():  # type: ignore[attr-defined]
            handler.wfile.write(b" ")

    silent, endless = start(Target()), start(Target())
    for target, answer in ((silent, wait), (endless, trickle)):
        target.answer = answer
        target.server.target = target  # type: ignore[attr-defined]
    nobody = "http://127.0.0.1:9"
    done = replicate(nobody, silent.url, endless.url, "--prompt", "You", "--timeout-s", "0.3", "--json")
    assert done.returncode == 1
    late = "no answer to /v1/completions within 0.3 s; --timeout-s waits longer"
    assert [row["note"] for row in rows(done)] == ["no connection: Connection refused", late, late]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "the prefix is empty"),
        (("--prompt", "a", "--chat", "b"), "give the prefix by one of"),
        (("--prompt-file", "/nowhere"), "cannot read /nowhere: No such file"),
        (("--tokens-file", "words"), "--tokens-file names a file that is not JSON"),
        (("--tokens-file", "mixed"), "--tokens-file must hold a JSON list of token ids"),
        (("--chat", "mixed"), "--chat must hold a JSON list of messages"),
        (("--chat", "none"), "--chat must name a file with a JSON list that is not empty"),
        (("--prompt-file", "binary"), "the prefix is not text in UTF-8"),
        (("http://me:secret@127.0.0.1:9", "--prompt", "a"), "SERVERS: a value is not a base URL of a server"),
        (("http://127.0.0.1:many", "--prompt", "a"), "SERVERS: 'http://127.0.0.1:many' is not a base URL"),
        (
            ("http://127.0.0.1:9/?a=b", "--prompt", "a"),
            "SERVERS: 'http://127.0.0.1:9/?a=b' is not a base URL",
        ),
    ],
)
def test_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    Path("words").write_text("You are")
    Path("mixed").write_text('[1, {"a": 2}, true]')
    Path("none").write_text("[]")
    Path("binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as refused:
        app(["http://127.0.0.1:9", "--model", "a", *arguments], standalone_mode=False)
    assert str(refused.value).startswith(why)
    assert "secret" not in str(refused.value)


def test_a_key_that_no_header_can_carry_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", f"{KEY}\n")
    with pytest.raises(ConfigError) as refused:
        app(["http://127.0.0.1:9", "--model", "a", "--prompt", "a"], standalone_mode=False)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("failing", "at_once", "rounds"),
    [
        ((), 8, [[0], [1, 2], [3, 4, 5, 6], [7, 8, 9]]),
        ((), 3, [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        ((), 1, [[number] for number in range(10)]),
        ((0, 2), 8, [[0], [1], [2, 3], [4, 5, 6], [7, 8, 9]]),
    ],
)
def test_rounds_double_with_the_servers_that_hold_the_prefix(
    failing: Sequence[int], at_once: int, rounds: list[list[int]]
) -> None:
    asked: list[list[int]] = []

    def ask_all(servers: Sequence[str]) -> list[dict[str, Any]]:
        asked.append([int(server) for server in servers])
        return [{"state": "failed" if int(one) in failing else "copied", "server": one} for one in servers]

    def pause() -> None:
        pauses.append(len(asked))

    pauses: list[int] = []
    servers = [str(number) for number in range(10)]
    assert [row["server"] for row in in_rounds(servers, at_once, ask_all, pause)] == servers
    assert asked == rounds
    assert pauses == list(range(1, len(rounds)))  # none after the last round


def counted(pulled: int, cached: int, computed: int, **results: int) -> Counters:
    tokens = {"external_kv_transfer": pulled, "local_cache_hit": cached, "local_compute": computed}
    return Counters(tokens, results, True)


@pytest.mark.parametrize(
    ("found", "state", "note"),
    [
        (counted(900, 0, 100), "copied", ""),
        (counted(0, 960, 40), "held", ""),
        (counted(500, 460, 40), "copied", ""),
        (counted(256, 0, 744), "computed", ""),
        (counted(0, 0, 1000), "computed", "no peer had more of it, or share_prefixes is off"),
        (counted(0, 0, 1000, shared=1), "computed", "no peer had more of it, or share_prefixes is off"),
        (counted(0, 0, 1000, computed_is_faster=1), "computed", ""),
        (counted(900, 0, 300), "copied", "other requests are counted, too"),
        (counted(0, 0, 999), "answered", "copied or computed is not known: the server has not counted the prompt yet"),
        (None, "answered", "copied or computed is not known: the server has no such counters"),
    ],
)  # fmt: skip
def test_a_copy_differs_from_a_computation(found: Counters | None, state: str, note: str) -> None:
    row = outcome(found, 1000)
    assert (row["state"], row["note"]) == (state, note)


def test_what_is_no_sample_is_left_out() -> None:
    text = (
        '# HELP vllm:kvlink_turns_total Turns{result="found"} 3\n'
        'vllm:prompt_tokens_by_source_created{source="local_compute"} 1.7e+09\n'
        'vllm:prompt_tokens_by_source_total{model_name="a{1}",source="local_compute"} 1.5e+06\n'
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} NaN\n'
        'vllm:kvlink_turns_total{result="found",engine="0"} 2.0\n'
    )
    assert Counters.of(text) == Counters({"local_compute": 1_500_000}, {"found": 2}, True)


@pytest.mark.parametrize("value", ["1e999", "1.2.3", "1e99999999", "9" * 999, "-1", ""])
def test_what_is_no_count_is_left_out(value: str) -> None:
    assert Counters.of(f'vllm:kvlink_turns_total{{result="found"}} {value}\n').results == {}


def test_a_long_line_takes_no_longer_than_it_is() -> None:
    """In a process that may use 10 s of a CPU: a search from each of its commas took half a minute."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (10, 10)); "
        "from kvlink.integrations.router.commands.replicate import Counters; "
        "line = 'vllm:kvlink_turns_total{' + ',result=\"a\"' * 50_000; "
        "print(Counters.of(line * 2))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
