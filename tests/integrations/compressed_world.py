# SPDX-License-Identifier: Apache-2.0
"""Draws two servers with compressed caches and one request, and says byte by byte what decode may have after its load.

The reference addresses rows by indexing tensors, and shares no code with kvlink: no planner, no units, no windows.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from vllm_server import request
from waiting import eventually

from kvlink import WorkerConfig
from kvlink.integrations.request_guard import RequestGuard
from kvlink.integrations.vllm.model.caches import LayerGroup, Rank, caches_of
from kvlink.integrations.vllm.model.windows import Window, loadable, needed_from
from kvlink.integrations.vllm.prefill.lease_slots import SharedSeats, SlotGroups
from kvlink.integrations.vllm.prefill.outgoing import Chunk, Outgoing
from kvlink.integrations.vllm.stream_decisions import StreamDecisions
from kvlink.integrations.vllm.wire.handoff import Handoff, Owner, prompt_digest
from kvlink.integrations.vllm.wire.handoff_parts import STREAM, Part
from kvlink.integrations.vllm.wire.step_commands import HandedOff, Load, SoftLease, StepCommands
from kvlink.integrations.vllm.worker import WorkerSide

CONFIG = WorkerConfig(transports="loopback", lease_slots=16, timeout_s=20.0)
HEADS = 4
"""The heads of the model. Compressed caches and those with scales have one, which every rank has."""
UNWRITTEN, BEFORE = 0xEE, 0xBB
"""The bytes that other requests left at prefill, and at decode."""

Rows = dict[tuple[str, int, int], list[int]]


@dataclass(frozen=True)
class Layer:
    """`row_tokens` above 1 is a compressed cache. `width`: bytes of a row, of which `scales` are behind all others."""

    row_tokens: int
    width: int
    scales: int = 0

    @property
    def is_shared(self) -> bool:
        return self.row_tokens > 1 or self.scales > 0

    def heads(self, tp: int) -> int:
        return 1 if self.is_shared else HEADS // tp


@dataclass(frozen=True)
class Group:
    """A cache group: its layers, and the blocks of both ends in tokens. window: 0 for layers that read all."""

    layers: tuple[Layer, ...]
    theirs: int
    ours: int
    window: int = 0


@dataclass(frozen=True)
class Case:
    groups: tuple[Group, ...]
    prompt: int
    cached: int
    """Tokens that decode has."""
    tps: tuple[int, int]
    packed: tuple[bool, bool]
    """Whether a block has the pages of all layers, at either end."""
    seed: int
    chunks: tuple[int, ...] = ()
    """Where prefill's chunks end before the prompt does. With some, decode follows it, if its groups allow that."""
    offer: str = "hard"
    """"soft" hands full blocks off that stay in prefill's cache, and "evicted" gives one of them new content first."""


@st.composite
def groups(draw: st.DrawFn) -> Group:
    layers = draw(
        st.lists(
            st.builds(
                Layer,
                st.sampled_from([1, 1, 2, 4, 8, 128]),
                st.sampled_from([1, 3, 4, 12]),
                st.sampled_from([0, 0, 1]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    most = max(layer.row_tokens for layer in layers)
    sizes = [draw(st.sampled_from([1, 2, 3])) * most for _ in range(2)]
    if any(layer.scales for layer in layers):  # whole pages are moved
        sizes[1] = sizes[0]
    return Group(tuple(layers), sizes[0], sizes[1], draw(st.sampled_from([0, 0, 1, 5, 8, 128])))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drawn = tuple(draw(st.lists(groups(), min_size=1, max_size=3)))
    prompt = draw(st.integers(1, 300))
    own = [group.ours for group in drawn]
    cached = draw(st.integers(0, prompt // max(own))) * max(own)
    cached = cached if all(cached % size == 0 for size in own) and cached < prompt else 0
    tps = draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])))
    packed = draw(st.tuples(st.booleans(), st.booleans()))
    ends = draw(st.sets(st.integers(1, max(prompt - 1, 1)), max_size=4)) - {prompt}
    return Case(drawn, prompt, cached, tps, packed, draw(st.integers(0, 2**32)), tuple(sorted(ends)))


@dataclass
class End:
    """A server: for each rank its memory and the views of its layers, and the request's blocks by group."""

    memory: list[torch.Tensor]
    layers: list[dict[str, torch.Tensor]]
    blocks: list[array[int]]
    workers: list[WorkerSide] = field(default_factory=list)
    places: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """As `layers`, but with the place of each byte in its rank's memory."""

    def row(self, case: Case, theirs: bool, name: str, rank: int, token: int) -> torch.Tensor | None:
        """The places of a token's row, of all heads of a rank: [heads, width]. None where the request has no block."""
        group, layer = _place(name)
        size = case.groups[group].theirs if theirs else case.groups[group].ours
        block = self.blocks[group][token // size]
        if not block:
            return None
        described = case.groups[group].layers[layer]
        row, page = token % size // described.row_tokens, self.places[rank][name][block]
        if not described.scales:
            return page[:, row]
        values, scales = described.width - described.scales, described.scales
        before = page.shape[1] * values
        return torch.cat(
            (
                page.reshape(1, -1)[:, row * values : (row + 1) * values],
                page.reshape(1, -1)[:, before + row * scales : before + (row + 1) * scales],
            ),
            dim=1,
        )


def _place(name: str) -> tuple[int, int]:
    group, layer = name.split(".")
    return int(group), int(layer)


def names(case: Case) -> Iterator[tuple[str, Group, Layer]]:
    for index, group in enumerate(case.groups):
        for number, layer in enumerate(group.layers):
            yield f"{index}.{number}", group, layer


def _views(
    case: Case, theirs: bool, tp: int, num_blocks: int, fill: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One rank's memory, its layers, and the places of their bytes. Groups lie upon each other, as vLLM has them."""
    pages: list[list[int]] = []
    for group in case.groups:
        size = group.theirs if theirs else group.ours
        pages.append([layer.heads(tp) * (size // layer.row_tokens) * layer.width for layer in group.layers])
    most, packed = max(map(sum, pages)) + 5, case.packed[0 if theirs else 1]
    largest = max(map(max, pages))
    depth = max(map(len, pages))
    memory = torch.full((num_blocks * (most if packed else largest * depth),), fill, dtype=torch.uint8)
    numbers = torch.arange(len(memory))
    views, places = {}, {}
    for index, group in enumerate(case.groups):
        size, offset = (group.theirs if theirs else group.ours), 0
        for number, layer in enumerate(group.layers):
            rows = size // layer.row_tokens
            shape = (num_blocks, layer.heads(tp), rows, layer.width)
            stride = most if packed else largest
            start = offset if packed else number * largest * num_blocks
            strides = (stride, rows * layer.width, layer.width, 1)
            views[f"{index}.{number}"] = memory.as_strided(shape, strides, start)
            places[f"{index}.{number}"] = numbers.as_strided(shape, strides, start)
            offset += pages[index][number]
    return memory, views, places


def _end(case: Case, theirs: bool, computed: int, num_tokens: int, rng: random.Random, fill: int) -> End:
    """Blocks in any order; a window has none wholly before the first token that is read next."""
    tp = case.tps[0 if theirs else 1]
    sizes = [group.theirs if theirs else group.ours for group in case.groups]
    counts = [-(-num_tokens // size) for size in sizes]
    ids = list(range(1, sum(counts) + 3))
    rng.shuffle(ids)
    blocks = []
    for group, size, count in zip(case.groups, sizes, counts, strict=True):
        gaps = min(max(computed - group.window + 1, 0) // size, count) if group.window else 0
        blocks.append(array("I", [0] * gaps + [ids.pop() for _ in range(count - gaps)]))
    made = [_views(case, theirs, tp, sum(counts) + 3, fill) for _ in range(tp)]
    memory, layers, places = (list(each) for each in zip(*made, strict=True))
    return End(memory, layers, blocks, places=places)


def _value(rng: random.Random, width: int) -> list[int]:
    return [rng.randrange(0xBB) for _ in range(width)]


def _rows(case: Case, rng: random.Random) -> Rows:
    """The rows of the request by layer, head of the model and first token."""
    return {
        (name, head, token): _value(rng, layer.width)
        for name, _, layer in names(case)
        for token in range(0, case.prompt // layer.row_tokens * layer.row_tokens, layer.row_tokens)
        for head in range(1 if layer.is_shared else HEADS)
    }


def _compute(case: Case, prefill: End, rows: Rows, first: int, end: int) -> None:
    """Writes what vLLM writes for these tokens: a row with the last of its tokens."""
    for name, _, layer in names(case):
        begin = first // layer.row_tokens * layer.row_tokens
        for token in range(begin, end - layer.row_tokens + 1, layer.row_tokens):
            for rank in range(case.tps[0]):
                places = prefill.row(case, True, name, rank, token)
                if places is None:
                    continue
                held = layer.heads(case.tps[0])
                for head in range(held):
                    value = rows[name, (0 if layer.is_shared else rank * held) + head, token]
                    prefill.memory[rank][places[head]] = torch.tensor(value, dtype=torch.uint8)


def _start(case: Case, end: End, theirs: bool, name: str) -> None:
    tp = case.tps[0 if theirs else 1]
    layer_groups = [
        LayerGroup(
            tuple(f"{index}.{number}" for number in range(len(group.layers))),
            row_tokens={f"{index}.{n}": layer.row_tokens for n, layer in enumerate(group.layers)},
            replicated=frozenset(f"{index}.{n}" for n, one in enumerate(group.layers) if one.is_shared),
            paged=frozenset(f"{index}.{n}" for n, one in enumerate(group.layers) if one.scales),
        )
        for index, group in enumerate(case.groups)
    ]
    for rank in range(tp):
        views = end.layers[rank]
        blocks = next(iter(views.values())).shape[0]
        caches = caches_of(views, layer_groups, blocks, Rank(rank, tp, HEADS), "m")
        end.workers.append(WorkerSide(f"{name}{rank}", caches, CONFIG))


@dataclass
class Result:
    loaded: bool
    end: int
    """Tokens that decode goes on with."""
    in_parts: bool
    wrong: list[str]


def moved(case: Case) -> Result:
    """Hands the request off, and compares all of decode's memory."""
    rng = random.Random(case.seed)
    windows = [Window(group.window, group.ours) if group.window else None for group in case.groups]
    end = loadable(windows, case.prompt, case.prompt)
    if case.offer != "hard":
        end -= end % case.groups[0].theirs
    prefill = _end(case, True, case.prompt, case.prompt, rng, UNWRITTEN)
    decode = _end(case, False, end, case.prompt, rng, BEFORE)
    rows = _rows(case, rng)
    before = [memory.clone() for memory in decode.memory]
    try:
        _start(case, prefill, True, "p")
        _start(case, decode, False, "d")
        pair = Pair(case, prefill, decode, rows, end, needed_from(windows, case.prompt, end))
        if case.offer != "hard":
            loaded = pair.take_cached(evicted=case.offer == "evicted")
        else:
            loaded = pair.follow() if case.chunks and pair.announces else pair.load()
    finally:
        for worker in (*decode.workers, *prefill.workers):
            worker.close()
    wrong = _differences(case, prefill, decode, before, rows, end, loaded=loaded)
    if loaded != (_can_load(case, prefill, end) and case.offer != "evicted"):
        wrong.append(f"the load {'succeeded without a block at prefill' if loaded else 'failed'}")
    return Result(loaded, end, bool(pair.parts), wrong)


class Pair:
    """One request at both ends. It is `Announcements` of its prefill too, as far as Outgoing calls them."""

    def __init__(
        self, case: Case, prefill: End, decode: End, rows: Rows, end: int, needed: Sequence[int]
    ) -> None:
        self.case, self.prefill, self.decode, self.rows, self.end = case, prefill, decode, rows, end
        seats = SlotGroups(16, 8).take()
        assert seats is not None
        self.seats, self.needed = seats, tuple(needed)
        self.ranks = [worker.rank_info for worker in prefill.workers]
        self.parts: list[Part] = []
        self.ended: list[set[str]] = [set() for _ in decode.workers]
        """By rank of decode, the loads that have ended. A worker reports each once, perhaps before the last chunk."""
        self.failed = False
        decisions, guard = StreamDecisions(), RequestGuard(logging.getLogger())
        grows = [not group.window for group in case.groups]
        self.outgoing = Outgoing(self, 0, grows, 30.0, decisions, guard)  # type: ignore[arg-type]
        self.request = request("r", list(range(case.prompt)), {STREAM: "s"})
        self.outgoing.begin(
            self.request, self.seats, tuple([] for _ in grows), self.ranks[0], lambda: prompt_digest([1])
        )
        self.announces = "r" in self.outgoing

    def announce(self, name: str, number: int, owner: Owner, ttl_s: float, blob: bytes, trace: object) -> Any:
        self.parts.append(Part.from_bytes(blob))
        return SimpleNamespace(done=lambda: True, cancelled=lambda: False, exception=lambda: None)

    def _handoff(self, blocks: tuple[array[int], ...], num_tokens: int) -> Handoff:
        owners = tuple(rank.owner for rank in self.ranks)
        sizes = self.ranks[0].block_tokens
        return Handoff("r", owners, self.seats, blocks, sizes, num_tokens, prompt_digest([1]), 30.0)

    def _step(self, side: End, **commands: Any) -> None:
        for worker in side.workers:
            worker.carry_out(StepCommands(**commands))

    def load(self) -> bool:
        """Decode loads what prefill has computed."""
        _compute(self.case, self.prefill, self.rows, 0, self.case.prompt)
        self._step(self.prefill, granted={"r": self.seats}, handed_off={"r": HandedOff(1, 3600.0)})
        handoff = self._handoff(tuple(self.prefill.blocks), self.case.prompt)
        self._step(self.decode, loads=[self._load(handoff, in_parts=False)])
        return self._ends(settles=True)

    def take_cached(self, *, evicted: bool) -> bool:
        """Decode loads the full blocks of a prompt that prefill keeps in its cache. Its model has one group."""
        _compute(self.case, self.prefill, self.rows, 0, self.case.prompt)
        seat, size = SharedSeats(16, 1).take(), self.case.groups[0].theirs
        blocks = self.prefill.blocks[0][: self.end // size]
        self._step(self.prefill, offered=[SoftLease(seat, blocks, 3600.0)])
        if evicted:
            self._step(self.prefill, given_away=blocks[-1:])
        owners, sizes = tuple(rank.owner for rank in self.ranks), self.ranks[0].block_tokens
        handoff = Handoff("r", owners, (seat,), (blocks,), sizes, self.end, prompt_digest([1]), 3600.0)
        self._step(self.decode, loads=[self._load(handoff, in_parts=False, settles=False)])
        return self._ends(settles=False)

    def _load(self, handoff: Handoff, *, in_parts: bool, settles: bool = True) -> Load:
        into, first = tuple(self.decode.blocks), self.case.cached
        more: dict[str, Any] = {"in_parts": in_parts, "settles": settles, "needed_from": self.needed}
        return Load("x", handoff, into, first, self.end, **more)

    def follow(self) -> bool:
        """Decode loads each chunk as soon as prefill says that it is written."""
        self._step(self.prefill, granted={"r": self.seats}, written={"r": 0})
        self.outgoing.held({"r": len(self.ranks)}, self.ranks, lambda *given: self._handoff(*given[2:4]))
        first = self._handoff(tuple(array("I") for _ in self.case.groups), self.case.prompt)
        self._step(self.decode, loads=[self._load(first, in_parts=True)])
        passed, had = 0, [0] * len(self.case.groups)
        for end in (*self.case.chunks, self.case.prompt):
            counts = [-(-end // group.theirs) for group in self.case.groups]
            more = tuple(
                list(blocks[before:count])
                for blocks, before, count in zip(self.prefill.blocks, had, counts, strict=True)
            )
            begun = self.request.num_computed_tokens
            chunk = {"r": Chunk(more, end - begun)}
            written = self.outgoing.advance(chunk, self.ranks, lambda *given: self._handoff(*given[2:4]))
            self._step(self.decode, parts={"x": self.parts[passed:]})
            self._all_ended()
            _compute(self.case, self.prefill, self.rows, begun, end)
            for worker in self.prefill.workers:
                worker.computed(written)
            passed, had, self.request.num_computed_tokens = len(self.parts), counts, end
        self.outgoing.finish("r", self.ranks[0], self._handoff(tuple(self.prefill.blocks), self.case.prompt))
        self._step(self.prefill, handed_off={"r": HandedOff(1, 3600.0)})
        self._step(self.decode, parts={"x": self.parts[passed:]})
        return self._ends(settles=self.parts[-1].sure)

    def _ends(self, *, settles: bool) -> bool:
        """Waits for the end of the load, and for that of the lease if the load settles it."""
        eventually(self._all_ended)
        if (
            settles and not self.failed and self.case.tps == (1, 1)
        ):  # else there may be ranks that none reads from
            eventually(lambda: "r" in self.prefill.workers[0].results().sent)
        return not self.failed

    def _all_ended(self) -> bool:
        for worker, ended in zip(self.decode.workers, self.ended, strict=True):
            results = worker.results()
            ended.update(results.received)
            self.failed |= bool(results.failed)
        return all("x" in ended for ended in self.ended)


def _differences(
    case: Case, prefill: End, decode: End, before: list[torch.Tensor], rows: Rows, end: int, *, loaded: bool
) -> list[str]:
    """Compares each rank's memory with what it was, plus the rows that came."""
    wrong = []
    for rank in range(case.tps[1]):
        memory = decode.memory[rank]
        left = memory.clone()  # from here on without the rows that may have come
        for name, group, layer in names(case):
            first = 0 if layer.is_shared else rank * layer.heads(case.tps[1])
            # Of a page that is moved as a whole, the rows behind the last token may be anything.
            moved_to = -(-end // group.ours) * group.ours if layer.scales else end
            for token in range(0, moved_to, layer.row_tokens):
                here = decode.row(case, False, name, rank, token)
                must = loaded and _is_read(case, group, layer, token, end)
                if here is None:
                    wrong += [f"rank {rank}, {name}: no block for token {token}, which is read"] * must
                    continue
                is_whole = token + layer.row_tokens <= end
                has_come = is_whole and prefill.blocks[_place(name)[0]][token // group.theirs]
                for head in range(layer.heads(case.tps[1])):
                    at = here[head]
                    new = rows[name, first + head, token] if has_come else None
                    changed = not torch.equal(memory[at], before[rank][at]) and (is_whole or not layer.scales)
                    if memory[at].tolist() != new and (must or changed):
                        wrong.append(
                            f"rank {rank}, {name}: head {head} of {token} is {memory[at]}, not {new}"
                        )
                    left[at] = before[rank][at]
        if not torch.equal(left, before[rank]):
            wrong.append(f"rank {rank}: bytes of others were written")
    return wrong


def _can_load(case: Case, prefill: End, end: int) -> bool:
    """Returns whether prefill still has a block for each token that decode needs."""
    return all(
        blocks[token // group.theirs]
        for group, blocks in zip(case.groups, prefill.blocks, strict=True)
        for token in range(max(_first_read(case, group, end), case.cached), end)
    )


def _first_read(case: Case, group: Group, end: int) -> int:
    return max(min(end, case.prompt - 1) - group.window + 1, 0) if group.window else 0


def _is_read(case: Case, group: Group, layer: Layer, token: int, end: int) -> bool:
    """Returns whether decode reads the row that begins with a token, and had it not cached."""
    return token >= _first_read(case, group, end) and case.cached < token + layer.row_tokens <= end
