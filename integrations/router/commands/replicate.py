# SPDX-License-Identifier: Apache-2.0
"""`kvlink replicate` copies a prefix that many requests begin with to servers, before those requests come."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvlink.cli.checks import Json, base_urls
from kvlink.cli.examples import examples_of
from kvlink.cli.tables import print_json
from kvlink.errors import ConfigError, KVLinkError
from kvlink.runtime.supervised import start_thread

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_KEY = "VLLM_API_KEY"
_MOST_BYTES = 32 << 20
"""A prefix, or an answer, has at most so many."""
_READ_BYTES = 1 << 16
_MOST_LETTERS = 200
_METRICS_S = 10.0
_COUNTED_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.1


@app.command(epilog=examples_of("replicate"))
def replicate(
    servers: Annotated[
        list[str],
        typer.Argument(metavar="SERVER...", help="Copy to the vLLM servers at these base URLs."),
    ],
    model: Annotated[str, typer.Option(help="Name the model as requests to the servers do.")],
    prompt: Annotated[str, typer.Option(help="Copy the prefix with this text.")] = "",
    prompt_file: Annotated[str, typer.Option(metavar="FILE", help="Copy the text in this file.")] = "",
    tokens_file: Annotated[
        str, typer.Option(metavar="FILE", help="Copy the token ids in this file, a JSON list.")
    ] = "",
    chat: Annotated[
        str, typer.Option(metavar="FILE", help="Copy the chat in this file, a JSON list of messages.")
    ] = "",
    at_once: Annotated[int, typer.Option(min=1, help="Ask at most this many servers at once.")] = 8,
    pause_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Wait this many seconds between rounds, so that servers publish the prefix.",
        ),
    ] = 1.0,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Wait at most this many seconds for a server's answer.")
    ] = 300.0,
    as_json: Json = False,
) -> None:
    """Copy a prefix that many requests begin with to vLLM servers, before those requests come.

    Each server gets a request for one token. With share_prefixes, it pulls what a peer has of the prefix, computes the
    rest, and keeps both in its prefix cache. The command says how many tokens a server pulled and computed. A server
    that predicts that computing is faster computes.

    The first server is asked alone, then two, four, and so on up to --at-once, because each one that has the prefix is
    a source for the others.

    Without an option for the prefix, its text is read from standard input. VLLM_API_KEY is sent as the API key if it is
    set. The exit status is 1 if a server failed; the others are asked all the same.
    """
    urls, key = base_urls(servers, "SERVERS"), _api_key()
    body = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0,
        **_prefix(prompt, prompt_file, tokens_file, chat),
    }

    def ask_all(now: Sequence[str]) -> list[Row]:
        rows: dict[str, Row] = {}

        def ask(url: str) -> None:
            rows[url] = _failed(url, "an unexpected error, see the log", 0.0)  # unless the next line returns
            rows[url] = _copy(url, body, key, timeout_s)

        stopping = Event()
        stopping.set()  # no server is asked a second time
        threads = [start_thread("server copy", partial(ask, url), stopping) for url in now]
        for thread in threads:
            thread.join()
        return [rows[url] for url in now]

    failed = []
    for row in in_rounds(urls, at_once, ask_all, lambda: time.sleep(pause_s)):
        if row["state"] == "failed":
            failed.append(row["server"])
        if as_json:
            print_json(row)
        else:
            typer.echo(sentence(row))
        sys.stdout.flush()
    if failed:
        raise KVLinkError(f"{len(failed)} of {len(urls)} servers failed: {', '.join(failed)}")


def _api_key() -> str:
    key = os.environ.get(_KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{_KEY} has characters that no HTTP header can carry")
    return key


def _prefix(prompt: str, prompt_file: str, tokens_file: str, chat: str) -> Row:
    """Returns the part of a request that holds the prefix. Raises ConfigError if it is not what the option says."""
    if sum(map(bool, (prompt, prompt_file, tokens_file, chat))) > 1:
        raise ConfigError("give the prefix by one of --prompt, --prompt-file, --tokens-file and --chat")
    text = prompt or _read_text(prompt_file or tokens_file or chat)
    if tokens_file:
        tokens = _list(text, "--tokens-file")
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise ConfigError("--tokens-file must hold a JSON list of token ids")
        return {"prompt": tokens}
    if chat:
        messages = _list(text, "--chat")
        if not all(isinstance(message, dict) for message in messages):
            raise ConfigError("--chat must hold a JSON list of messages")
        return {"messages": messages}
    if not text:
        raise ConfigError("the prefix is empty")
    return {"prompt": text}


def _read_text(name: str) -> str:
    """Returns what the file `name` holds, or standard input if it is ""."""
    if not name and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(
            "give the prefix by --prompt, --prompt-file, --tokens-file, --chat, or standard input"
        )
    try:
        with Path(name).open("rb") if name else nullcontext(sys.stdin.buffer) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"the prefix has more than {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("the prefix is not text in UTF-8") from error


class _Refused(Exception):
    """A server did not answer as it should; says why."""


def _copy(url: str, body: Row, key: str, timeout_s: float) -> Row:
    """Lets a server get the prefix, and returns its row."""
    before = _counters(url)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    began = time.monotonic()
    try:
        answer = _call(url, path, timeout_s, json.dumps(body), key)
        row: Row = {
            "server": url,
            "seconds": round(time.monotonic() - began, 3),
            "tokens": _tokens_of(answer),
        }
    except _Refused as error:
        why = "".join(letter if letter.isprintable() else " " for letter in str(error))
        why = (why.replace(key, "…") if key else why)[:_MOST_LETTERS]
        return _failed(url, why, time.monotonic() - began)
    return row | outcome(_counted(url, before, row["tokens"]) if before else None, row["tokens"])


def _failed(url: str, why: str, seconds: float) -> Row:
    return {"server": url, "seconds": round(seconds, 3), "state": "failed", "note": why}


def _tokens_of(answer: str) -> int:
    """Returns how many tokens the prompt of a completion has."""
    try:
        return int(json.loads(answer)["usage"]["prompt_tokens"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise _Refused("the answer is not that of a completion") from None


def _counters(url: str) -> Counters | None:
    try:
        return Counters.of(_call(url, "/metrics", _METRICS_S))
    except _Refused:
        return None


def _counted(url: str, before: Counters, num_tokens: int) -> Counters | None:
    """Returns what the server has counted since, as soon as the prompt is counted, which may be after its answer."""
    ends = time.monotonic() + _COUNTED_WITHIN_S
    while True:
        now = _counters(url)
        counted = now.since(before) if now else None
        if counted is None or counted.has(num_tokens) or time.monotonic() > ends:
            return counted
        time.sleep(_LOOK_EVERY_S)


def _call(url: str, path: str, timeout_s: float, body: str = "", key: str = "") -> str:
    """Sends a request, and returns its answer. Follows no redirect, which would carry the key elsewhere."""
    ends = time.monotonic() + timeout_s
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST" if body else "GET", parts.path + path, body or None, headers)
        answer = connection.getresponse()
        text = _read(answer, ends)
    except TimeoutError:
        raise _Refused(f"no answer to {path} within {timeout_s:g} s; --timeout-s waits longer") from None
    except (OSError, UnicodeError) as error:
        raise _Refused(f"no connection: {getattr(error, 'strerror', '') or error}") from None
    except http.client.HTTPException as error:
        raise _Refused(f"no HTTP from {path}: {type(error).__name__}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise _Refused(f"{path} answered HTTP {answer.status}: {text}")
    return text


def _read(answer: http.client.HTTPResponse, ends: float) -> str:
    data = bytearray()
    while part := answer.read1(_READ_BYTES):
        data += part
        if time.monotonic() > ends:
            raise TimeoutError
        if len(data) > _MOST_BYTES:
            raise _Refused(f"the answer has more than {_MOST_BYTES >> 20} MiB")
    return data.decode(errors="replace")


Row = dict[str, Any]

_LABEL = re.compile(r'(?:^|,)(?:source|result)="(\w+)"')
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?(?:e\+?\d\d?)?")
_LONGEST_LINE = 4_096
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_BY_RESULT = "vllm:kvlink_turns_total"
_SOURCES = {"pulled": "external_kv_transfer", "cached": "local_cache_hit", "computed": "local_compute"}
_OWN = {"shared", "offered", "short"}
"""Results of prefixes that the server gives, not of those that it looks for."""


def _list(text: str, option: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} names a file that is not JSON") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{option} must name a file with a JSON list that is not empty")
    return found


def in_rounds(
    servers: Sequence[str],
    at_once: int,
    ask_all: Callable[[Sequence[str]], list[Row]],
    pause: Callable[[], None],
) -> Iterator[Row]:
    """Yields the servers' rows, round by round. A server that holds the prefix is a source for the next round.

    So rounds double, from one server to `at_once`. If no other server had the prefix, only the first one computes it.
    `pause` returns when the servers of a round may have published the prefix, which they do after their answer.
    """
    asked = sources = 0
    while asked < len(servers):
        now = servers[asked : asked + min(at_once, sources + 1)]
        rows = ask_all(now)
        asked += len(now)
        sources += sum(row["state"] != "failed" for row in rows)
        yield from rows
        if asked < len(servers):
            pause()


@dataclass(frozen=True)
class Counters:
    """Holds what a server has counted since it started."""

    tokens: Mapping[str, int]
    """Tokens of prompts by their source. Empty: the server does not count them."""
    results: Mapping[str, int]
    """Prefixes by what became of them, as kvlink's connector counts them."""
    has_kvlink: bool

    @classmethod
    def of(cls, text: str) -> Counters:
        """Reads the text of /metrics, and adds the engines of the server up."""
        counted: dict[str, dict[str, int]] = {_BY_SOURCE: {}, _BY_RESULT: {}}
        for line in text.split("\n"):
            name, _, rest = line[:_LONGEST_LINE].partition("{")
            labels, _, value = rest.rpartition("} ")
            if name in counted and (label := _LABEL.search(labels)) and _NUMBER.fullmatch(value):
                counted[name][label[1]] = counted[name].get(label[1], 0) + int(float(value))
        return cls(counted[_BY_SOURCE], counted[_BY_RESULT], "vllm:kvlink_" in text)

    def since(self, before: Counters) -> Counters:
        """Returns what was counted after `before`."""

        def more(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
            return {name: count - then.get(name, 0) for name, count in now.items()}

        changed = {name: count for name, count in more(self.results, before.results).items() if count}
        return Counters(more(self.tokens, before.tokens), changed, self.has_kvlink)

    def has(self, num_tokens: int) -> bool:
        """Returns whether a prompt of so many tokens is counted, or never will be."""
        return not self.tokens or sum(self.tokens.values()) >= max(num_tokens, 1)


def outcome(counted: Counters | None, num_tokens: int) -> Row:
    """Returns the columns that say where a prefix came from. `counted` is what was counted meanwhile, if anything."""
    if counted is None or not counted.tokens or not counted.has(num_tokens):
        why = "has not counted the prompt yet" if counted and counted.tokens else "has no such counters"
        return {
            "state": "answered",
            "results": {},
            "note": f"copied or computed is not known: the server {why}",
        }
    tokens = {name: counted.tokens.get(source, 0) for name, source in _SOURCES.items()}
    pulled, cached, computed = tokens.values()
    notes = []
    if not counted.has_kvlink:
        notes.append("no counters of kvlink: this server pulls from no peer")
    elif not pulled and not counted.results.keys() - _OWN and computed > cached:
        notes.append("no peer had more of it, or share_prefixes is off")
    if sum(tokens.values()) > num_tokens:
        notes.append("other requests are counted, too")
    state = "copied" if pulled >= max(computed, 1) else "held" if cached >= computed else "computed"
    return {"state": state, **tokens, "results": dict(counted.results), "note": "; ".join(notes)}


def sentence(row: Row) -> str:
    """Returns a line for people."""
    if row["state"] == "failed":
        return f"{row['server']}: failed after {row['seconds']:.2f} s: {row['note']}"
    parts = [f"{row['state']} in {row['seconds']:.2f} s"]
    if "pulled" in row:
        parts.append(
            f"{row['pulled']:,} tokens pulled, {row['cached']:,} in its cache, {row['computed']:,} computed"
        )
    if row["results"]:
        parts.append(", ".join(f"{name} {count}" for name, count in sorted(row["results"].items())))
    return f"{row['server']}: " + "; ".join([*parts, *filter(None, [row["note"]])])
