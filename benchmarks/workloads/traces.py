# SPDX-License-Identifier: Apache-2.0
"""Reads requests from traces of real services, or makes them with the length statistics of published ones."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvlink.errors import ConfigError

_SEED = 20_250_103
_MOST_REQUESTS = 1_000_000
_MOST_LINE = 1 << 20  # characters; hash_ids of 500,000 tokens take a hundredth of it
_MOST_TOKENS = 10_000_000
HASH_TOKENS = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `at_s` is in seconds since the first request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefixes: tuple[int, ...] = field(default=(), compare=False)
    """For each HASH_TOKENS tokens of the prompt, a number that stands for them and all before. Empty if not known."""


def read_trace(path: Path, most: int | None = None) -> list[Request]:
    """Reads Mooncake's JSON lines or Azure's CSV, by the first line; at most `most` requests, in order of time.

    Raises ConfigError that names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _bounded(file)
            first = next(lines, "")
            read = _azure(first, lines) if first.startswith(_AZURE[0]) else _mooncake(first, lines)
            requests = list(islice(read, min(most or _MOST_REQUESTS, _MOST_REQUESTS)))
    except (OSError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{path} is not a readable trace: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no request")
    start = min(request.at_s for request in requests)
    moved = (replace(each, at_s=each.at_s - start) for each in requests)
    return sorted(moved, key=lambda request: request.at_s)


def _bounded(file: IO[str]) -> Iterator[str]:
    for number in range(1, _MOST_REQUESTS + 2):
        line = file.readline(_MOST_LINE)
        if len(line) == _MOST_LINE:
            raise ValueError(f"line {number} has {_MOST_LINE} characters or more")
        if not line:
            return
        yield line


def _mooncake(first: str, others: Iterator[str]) -> Iterator[Request]:
    return (
        _at_line(number, _of_mooncake, line)
        for number, line in enumerate(_and(first, others), 1)
        if line.strip()
    )


def _of_mooncake(line: str) -> Request:
    """Parses milliseconds, token counts, and the hash_ids, one for each HASH_TOKENS tokens of the prompt."""
    entry = json.loads(line)
    request = _request(float(entry["timestamp"]) / 1000, entry["input_length"], entry["output_length"])
    prefixes = entry.get("hash_ids", [])
    if not isinstance(prefixes, list) or not all(
        type(each) is int and 0 <= each < 1 << 63 for each in prefixes
    ):
        raise ValueError("hash_ids is not a list of numbers")
    if len(prefixes) > -(-request.prompt_tokens // HASH_TOKENS):
        raise ValueError(f"{len(prefixes)} hash_ids are too many for {request.prompt_tokens} tokens")
    return replace(request, prefixes=tuple(prefixes))


def _azure(first: str, others: Iterator[str]) -> Iterator[Request]:
    rows = csv.DictReader(_and(first, others), strict=True)
    return (_at_line(number, _of_azure, row) for number, row in enumerate(rows, 2))


def _of_azure(row: Mapping[str, Any]) -> Request:
    at, prompt, output = (row[name] for name in _AZURE)
    whole, _, fraction = at.partition(".")  # units of 100 ns, which datetime does not have
    at_s = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return _request(at_s, int(prompt), int(output))


def _at_line(number: int, read: Callable[[Any], Request], entry: Any) -> Request:
    try:
        return read(entry)
    except KeyError as error:
        raise ValueError(f"line {number} has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"line {number}: {error}") from None


def _and(first: str, others: Iterator[str]) -> Iterator[str]:
    yield first
    yield from others


def _request(at_s: float, prompt: Any, output: Any) -> Request:
    for count in (prompt, output):
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_TOKENS:
            raise ValueError(f"{count!r} is not a number of tokens")
    if not math.isfinite(at_s):
        raise ValueError(f"{at_s!r} is not a time")
    return Request(at_s, prompt, output)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The token counts of a trace by share of its requests with at most as many: (share, tokens), both rising.

    Between two points, the logarithm of the length is assumed to be evenly distributed.
    """

    points: tuple[tuple[float, float], ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draws `count` independent lengths."""
        shares, tokens = zip(*self.points, strict=True)
        drawn = np.exp(np.interp(rng.random(count), shares, np.log(tokens)))
        return [max(1, round(each)) for each in drawn.tolist()]


_SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def _lengths(*tokens: int) -> Lengths:
    return Lengths(tuple(zip(_SHARES, tokens, strict=True)))


# Prompt lengths, output lengths and requests per second, as in the files: Azure LLM inference trace 2023,
# conversation; Mooncake (FAST'25), conversation.
SYNTHETIC = {
    "azure-2023-conv": (
        _lengths(2, 29, 207, 396, 1020, 1189, 2735, 4083, 4142, 6179, 14_050),
        _lengths(7, 16, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
        5.53,
    ),
    "mooncake-conversation": (
        _lengths(891, 894, 964, 2307, 6909, 15_367, 27_367, 39_551, 85_400, 121_301, 126_195),
        _lengths(1, 3, 24, 157, 350, 472, 597, 698, 1119, 2000, 2000),
        3.40,
    ),
}


def synthetic(name: str, count: int, seed: int) -> list[Request]:
    """Returns requests with the length statistics of a published trace, at Poisson times of its mean rate.

    Prompt and output are drawn independently; real ones are weakly correlated. Raises ConfigError.
    """
    if name not in SYNTHETIC:
        raise ConfigError(
            f"no trace is called {name!r} here; choose from {', '.join(SYNTHETIC)}, or give a file"
        )
    prompts, outputs, per_s = SYNTHETIC[name]
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    drawn = zip(times, prompts.draw(rng, count), outputs.draw(rng, count), strict=True)
    return [Request(at_s, prompt, output) for at_s, prompt, output in drawn]


def requests_of(trace: str, most: int) -> list[Request]:
    """Returns the first `most` of a file, or as many made like the trace of that name. Raises ConfigError."""
    return synthetic(trace, most, _SEED) if trace in SYNTHETIC else read_trace(Path(trace), most)
