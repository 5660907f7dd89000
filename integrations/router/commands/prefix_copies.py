# SPDX-License-Identifier: Apache-2.0
"""Decides which servers get a prefix when, and reads from their counters whether they copied or computed it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError

Row = dict[str, Any]

_LABEL = re.compile(r'(?:^|,)(?:source|result)="(\w+)"')
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?(?:e\+?\d\d?)?")
_LONGEST_LINE = 4_096
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_BY_RESULT = "vllm:kvlink_turns_total"
_SOURCES = {"pulled": "external_kv_transfer", "cached": "local_cache_hit", "computed": "local_compute"}
_OWN = {"shared", "offered", "short"}
"""Results of prefixes that the server gives, not of those that it looks for."""


def of_text(text: str) -> Row:
    """Returns the part of a request that holds a prefix as text. Raises ConfigError if it is empty."""
    if not text:
        raise ConfigError("the prefix is empty")
    return {"prompt": text}


def of_tokens(text: str) -> Row:
    """Returns the part of a request that holds a prefix as token ids. Raises ConfigError for anything else."""
    tokens = _list(text, "--tokens-file")
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ConfigError("--tokens-file must hold a JSON list of token ids")
    return {"prompt": tokens}


def of_chat(text: str) -> Row:
    """Returns the part of a request that holds a chat. Raises ConfigError for anything else."""
    messages = _list(text, "--chat")
    if not all(isinstance(message, dict) for message in messages):
        raise ConfigError("--chat must hold a JSON list of messages")
    return {"messages": messages}


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
