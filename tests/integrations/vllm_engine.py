# SPDX-License-Identifier: Apache-2.0
"""Does what vLLM's engine does around the connector: blocks, states of requests, counted results.

An id that nobody waits for, or that is reported twice, ends vLLM's engine, and is an AssertionError here. Blocks that
are freed get other content in the next step, as if another request had them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from vllm_server import BLOCK_TOKENS, NUM_BLOCKS, Server

from kvlink.integrations.vllm.prefill.outgoing import Chunk
from kvlink.integrations.vllm.worker import Results

CHUNK_TOKENS = 6
GARBAGE = 255


class Status(Enum):
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    GONE = auto()
    """It has ended, and its blocks stay until it is reported."""


@dataclass(eq=False)
class Live:
    request: Any
    ask: bool
    """Whether it asks for one token, as prefill is asked, and ends then."""
    status: Status = Status.WAITING
    blocks: tuple[list[int], ...] = ()
    loads: bool = False
    """Whether it ended while it was loaded."""
    loaded: bool = False


def pattern(tokens: list[int], index: int) -> int:
    """The byte that all of block number `index` of a prompt consists of."""
    return (tokens[0] * 7 + index * 13) % GARBAGE


@dataclass
class Engine:
    """Steps a server. `late` is how many steps later the scheduler learns what the workers reported."""

    server: Server
    late: int = 0
    live: dict[str, Live] = field(default_factory=dict)
    answers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    guarded: Counter[str] = field(default_factory=Counter)
    """Exceptions that were kept inside a request, by what it was doing, as vLLM's statistics have them."""

    def __post_init__(self) -> None:
        self.free = list(range(1, NUM_BLOCKS))
        self._dirty: list[int] = []
        self._preempted: list[str] = []
        self._reported: deque[list[Results]] = deque()
        self._counts: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self._bad: set[str] = set()

    def add(self, request: Any, *, ask: bool = False) -> None:
        """A request arrives."""
        self.live[request.request_id] = Live(request, ask)
        self.server.scheduler.arrived(request)

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        live = self.live.get(request_id)
        if live is not None and live.status is not Status.GONE:
            self._end(live, complete=False)

    def preempt(self, request_id: str) -> None:
        """Its blocks go to others, and it is scheduled again."""
        live = self.live.get(request_id)
        if live is None or live.status is not Status.RUNNING:
            return
        self._free(live)
        live.status, live.request.num_computed_tokens = Status.WAITING, 0
        live.request.num_preemptions += 1
        self._preempted.append(request_id)

    def step(self) -> None:
        """Schedules, computes and handles results once."""
        scheduler, dirty = self.server.scheduler, [block for block in self._dirty if block in self.free]
        self._dirty = []
        self.server.pool.give_away(*dirty)
        for live in [one for one in self.live.values() if one.status is Status.WAITING]:
            self._schedule(live)
        chunks = {
            name: self._chunk(live) for name, live in self.live.items() if live.status is Status.RUNNING
        }
        preempted, self._preempted = self._preempted, []
        scheduler.scheduled(chunks, preempted)
        commands = scheduler.take_commands(idle=not chunks)
        for rank in self.server.ranks:
            rank.carry_out(commands)
        self._write(
            [block for block in dirty if block in self.free], GARBAGE
        )  # the others are written by requests
        for name, chunk in chunks.items():
            self._compute(self.live[name], chunk.num_tokens)
        for rank in self.server.ranks if commands.written else ():
            rank.computed(commands.written)
        scheduler.held(Counter(name for rank in self.server.ranks for name in rank.take_held()))
        self._reported.append([rank.results() for rank in self.server.ranks])
        for rank in self.server.ranks:
            self.guarded.update((rank.take_stats() or {}).get("guarded", {}))
        self.guarded.update(scheduler.guard.take_counts())
        while len(self._reported) > self.late:
            self._handle(self._reported.popleft())
        for name in chunks:
            live = self.live[name]
            if live.request.num_computed_tokens >= live.request.num_prompt_tokens:
                self._end(live, complete=True)

    def quiet(self) -> bool:
        """Whether nothing is left to do."""
        return not self.live and not self._reported

    def _schedule(self, live: Live) -> None:
        request = live.request
        count, in_background = self.server.scheduler.num_matched(request, 0)
        needed = -(-request.num_prompt_tokens // BLOCK_TOKENS)
        if count is None or needed * len(self.server.groups) > len(self.free):
            return
        assert 0 <= count <= request.num_prompt_tokens
        assert in_background is (count > 0)
        live.blocks = tuple([self.free.pop(0) for _ in range(needed)] for _ in self.server.groups)
        for blocks in live.blocks:
            self.server.pool.give_away(*blocks)
        live.loaded = False
        self.server.scheduler.allocated(request, live.blocks, count)
        live.status = Status.LOADING if count else Status.RUNNING

    def _chunk(self, live: Live) -> Chunk:
        left = live.request.num_prompt_tokens - live.request.num_computed_tokens
        return Chunk((), max(min(left, CHUNK_TOKENS), 1))

    def _compute(self, live: Live, num_tokens: int) -> None:
        request = live.request
        if not live.loaded:
            for blocks in live.blocks:
                for index, block in enumerate(blocks):
                    self._write([block], pattern(request.prompt_token_ids, index))
        request.num_computed_tokens = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)

    def _write(self, blocks: list[int], byte: int) -> None:
        for tensors in self.server.caches:
            for tensor in tensors.values():
                tensor[blocks] = byte

    def _handle(self, results: list[Results]) -> None:
        for result in results:
            assert result.failed <= result.received
            self._bad |= result.failed
        received = self._counted("received", [result.received for result in results])
        sent = self._counted("sent", [result.sent for result in results])
        failed = received & self._bad
        self._bad -= failed
        for name in failed:
            self.live[name].request.num_computed_tokens = 0
        self.server.scheduler.received(received, failed)
        self.server.scheduler.sent(sent)
        for name in received:
            self._received(self.live[name], well=name not in failed)
        for name in sent:
            live = self.live.pop(name)
            assert live.status is Status.GONE
            assert not live.loads
            self._free(live)

    def _received(self, live: Live, *, well: bool) -> None:
        name = live.request.request_id
        if live.status is Status.GONE:
            assert live.loads
            del self.live[name]
            self._free(live)
            return
        assert live.status is Status.LOADING
        if well:
            self.loaded.append(name)
            live.loaded, live.status = True, Status.RUNNING
            live.request.num_computed_tokens = live.request.num_prompt_tokens - 1
        else:
            self.failed.append(name)
            self._free(live)
            live.status = Status.WAITING

    def _counted(self, what: str, sets: list[set[str]]) -> set[str]:
        """A transfer is over once every rank has said so, as vLLM counts."""
        counts = self._counts[what]
        for one in sets:
            assert one <= self.live.keys(), f"{what} that nobody waits for: {one - self.live.keys()}"
            counts.update(one)
        assert all(count <= self.server.tp_size for count in counts.values())
        done = {name for name, count in counts.items() if count == self.server.tp_size}
        for name in done:
            del counts[name]
        return done

    def _end(self, live: Live, *, complete: bool) -> None:
        name = live.request.request_id
        live.loads = live.status is Status.LOADING
        if complete:
            for blocks in live.blocks:
                self.server.pool.cache(*blocks[: live.request.num_prompt_tokens // BLOCK_TOKENS])
        stays, answer = self.server.scheduler.finished(live.request, live.blocks or ([],), complete)
        assert not (stays and live.loads)
        self.answers[name] = answer
        live.status = Status.GONE
        if not stays and not live.loads:
            del self.live[name]
            self._free(live)

    def _free(self, live: Live) -> None:
        for blocks in live.blocks:
            self.free += blocks
            self._dirty += blocks
        live.blocks = ()
