# SPDX-License-Identifier: Apache-2.0
"""Lets all contenders move blocks of one shape on one path in turns, in a new random order in each round.

The blocks of every transfer are fresh and random, at both ends, from a memory larger than the caches. A turn poisons
the destination, moves one block to warm up, then several transfers that are timed, then compares every byte. Peers are
stopped while it is not their turn, because an idle NIXL agent keeps a core busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvlink.errors import KVLinkError
from kvlink.transfer.engine import host_transports

from ..harness.machine import OtherLoad
from ..harness.processes import BenchError
from ..harness.results import verified
from ..harness.statistics import quantiles_us
from .contender import KVLINK, Contender, ContenderInfo, Draw, Shape, limit_of
from .here import Kvlink
from .modes import HOST, MODES, REPEAT, TCP
from .pair import Pair
from .setup import python_of

TRANSPORTS = {HOST: ("shm", "cma"), TCP: ("tcp",), REPEAT: ("shm", "cma")}

QUANTILES = (0, 1, *range(5, 100, 5), 99, 99.9, 100)
"""The quantiles of the times in a row, enough to draw their distribution."""

_SEED = 20_251_121
_LEAST_TURNS = 3


@dataclass(slots=True)
class Score:
    """The transfers of one contender so far. `why_not` is the error that ended it."""

    us: list[float] = field(default_factory=list)
    cpu_ns: int = 0
    wrong: int = 0
    turns: int = 0
    seconds: float = 0.0
    why_not: str = ""

    def add(self, more: Score) -> None:
        """Adds the transfers of another contest of the same contender."""
        self.us += more.us
        self.cpu_ns += more.cpu_ns
        self.wrong += more.wrong
        self.turns += more.turns
        self.why_not = self.why_not or more.why_not


def rows(
    path: str, shape: Shape, seconds: float, environments: Path, log: IO[str]
) -> Iterator[dict[str, Any]]:
    """Yields one row per contender, from `seconds` of turns each, also for those that cannot run. Logs to `log`."""
    others = OtherLoad()
    with ExitStack() as stack:
        there, absent = _gather(path, shape, environments, log, stack)

        def left(score: Score) -> int:
            return shape.transfers if score.turns < _LEAST_TURNS or score.seconds < seconds else 0

        scores = held(there, shape, np.random.default_rng(_SEED), left)
        measured = [_row(c.info, shape, score) for c, score in zip(there, scores, strict=True)]
    busy = others.share()  # all child processes have ended
    ours = {row["mode"]: row["p50_us"] for row in measured if row["peer"] == KVLINK and "p50_us" in row}
    for row in measured:
        times = {f"times_{mode}": row["p50_us"] / us for mode, us in ours.items() if "p50_us" in row}
        limit = limit_of(row, measured) if row["peer"] == KVLINK and "p50_us" in row else None
        share = {"limit": limit["mode"], "of_limit": limit["p50_us"] / row["p50_us"]} if limit else {}
        yield row | times | share | {"other_load": busy}
    yield from (_row(info, shape, Score(why_not=why_not)) for info, why_not in absent)


def _gather(
    path: str, shape: Shape, environments: Path, log: IO[str], stack: ExitStack
) -> tuple[list[Contender], list[tuple[ContenderInfo, str]]]:
    there: list[Contender] = []
    absent: list[tuple[ContenderInfo, str]] = []
    for info, make in _candidates(path, shape, environments, log):
        if isinstance(make, str):
            absent.append((info, make))
            continue
        try:
            contender = make()
        except (KVLinkError, OSError) as error:
            absent.append((info, str(error)))
            continue
        stack.callback(contender.close)
        there.append(contender)
        for bare in contender.bare() if isinstance(contender, Kvlink) else ():
            stack.callback(bare.close)
            there.append(bare)
    return there, absent


def _candidates(
    path: str, shape: Shape, environments: Path, log: IO[str]
) -> Iterator[tuple[ContenderInfo, Callable[[], Contender] | str]]:
    """Yields the contenders, with a function that starts each, or why it cannot run."""
    refused = host_transports()
    for transport in TRANSPORTS[path]:
        info = ContenderInfo(KVLINK, transport, path, "", "its defaults")
        yield info, refused.get(transport, "not built") or partial(Kvlink, transport, path, shape, _SEED)
    for mode in (mode for mode in MODES if mode.path == path):
        info = ContenderInfo(mode.peer, mode.name, path, "", mode.settings)
        python = python_of(mode.peer, environments)
        if python.exists():
            yield info, partial(Pair, mode, python, shape, _SEED, log)
        else:
            yield info, f"not installed: {python} is missing"


def _guarded(step: Callable[..., None], contender: Contender, score: Score, *more: Any) -> None:
    """Runs a step. A contender that fails is removed, and its processes end."""
    start = time.monotonic()
    try:
        step(contender, score, *more)
    except (KVLinkError, OSError) as error:
        score.why_not = str(error)
        contender.close()
    score.seconds += time.monotonic() - start


def held(
    contenders: Sequence[Contender], shape: Shape, rng: np.random.Generator, left: Callable[[Score], int]
) -> list[Score]:
    """Runs rounds until no contender has transfers left. The first time each touches all of its memory, untimed."""
    scores = [Score() for _ in contenders]
    for contender, score in zip(contenders, scores, strict=True):
        _guarded(_tour, contender, score, shape)
        score.us, score.cpu_ns, score.turns, score.seconds = [], 0, 0, 0.0
    while active := [i for i, score in enumerate(scores) if not score.why_not and left(score) > 0]:
        for number in rng.permutation(active):
            contender, score = contenders[number], scores[number]
            draws = _draws(contender, rng, shape, min(left(score), shape.transfers))
            _guarded(_turn, contender, score, draws)
    return scores


def check(ways: Sequence[Contender], scores: Sequence[Score]) -> None:
    """Raises BenchError if a way ended with an error, or if a bare one moved wrong bytes."""
    for way, score in zip(ways, scores, strict=True):
        if score.why_not:
            raise BenchError(score.why_not)
        if score.wrong and way.info.peer != KVLINK:
            raise BenchError(f"{way.info.mode} copied wrong bytes, so the limit is invalid; report this")


def _tour(contender: Contender, score: Score, shape: Shape) -> None:
    """Connects, and touches every page of both memories by the path that is measured."""
    for draws in shape.tour():
        _turn(contender, score, draws)


def _turn(contender: Contender, score: Score, draws: Sequence[Draw]) -> None:
    contender.prepare(draws)
    moved = contender.move()
    score.wrong += contender.wrong()
    score.us += moved.us
    score.cpu_ns += moved.cpu_ns
    score.turns += 1


def _draws(contender: Contender, rng: np.random.Generator, shape: Shape, transfers: int) -> list[Draw]:
    first, *others = shape.draws(contender.order, rng, transfers)
    return [first, *(others[:1] * len(others) if contender.info.path == REPEAT else others)]


def _row(info: ContenderInfo, shape: Shape, score: Score) -> dict[str, Any]:
    row = {**info._asdict(), **shape.name}
    if score.why_not or not score.us:
        return row | {"why_not": score.why_not or "no transfer was timed"}
    gib = shape.num_bytes / 2**30
    p50 = float(np.median(score.us))
    return row | {
        **quantiles_us(score.us),
        "p50_us": p50,
        "quantiles_us": np.percentile(score.us, QUANTILES).tolist(),
        "gib_per_s": gib / (p50 / 1e6),
        "gb_per_s": shape.num_bytes / 1e3 / p50,
        "cpu_s_per_gib": score.cpu_ns / 1e9 / (gib * len(score.us)),
        "turns": score.turns,
        **verified(score.wrong, len(score.us), len(score.us)),
    }
