# SPDX-License-Identifier: Apache-2.0
"""The connector's two halves without vLLM around them: steps as its engine makes them, over real kvlink workers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from waiting import eventually

from kvlink import WorkerConfig
from kvlink.integrations.vllm.chats.peer_prefixes import PeerPrefixes
from kvlink.integrations.vllm.chats.turns import Turns
from kvlink.integrations.vllm.model.caches import LayerGroup, Rank, caches_of
from kvlink.integrations.vllm.model.windows import Window
from kvlink.integrations.vllm.prefill.announcements import Announcements
from kvlink.integrations.vllm.prefill.lease_slots import SharedSeats, SlotGroups
from kvlink.integrations.vllm.prefill.outgoing import Chunk
from kvlink.integrations.vllm.scheduler import SchedulerSide
from kvlink.integrations.vllm.worker import WorkerSide

NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_BYTES = 16, 4, 4, 8
NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}


class Pool:
    """Stands in for vLLM's BlockPool."""

    def __init__(self) -> None:
        self.blocks = [
            SimpleNamespace(block_id=index, block_hash=None, is_null=index == 0)
            for index in range(NUM_BLOCKS)
        ]
        self.free: list[int] = []
        """Those that `get_new_blocks` gives away next."""

    def cache(self, *block_ids: int) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = b"cached"

    def get_new_blocks(self, num_blocks: int) -> list[SimpleNamespace]:
        given = [self.blocks[self.free.pop(0)] for _ in range(num_blocks)]
        for block in given:
            block.block_hash = None
        return given

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def reset_prefix_cache(self) -> bool:
        for block in self.blocks:
            block.block_hash = None
        return True

    def give_away(self, *block_ids: int) -> None:
        """Gives these blocks to a request, as vLLM does when one needs blocks."""
        self.free += block_ids
        self.get_new_blocks(len(block_ids))


@dataclass
class Server:
    """A server of `tp_size` ranks with one cache of each layer; `groups` are layers that share a block table.

    window: of the groups whose names start with it; 0: the connector is not told.
    """

    name: str
    tp_size: int = 1
    groups: tuple[tuple[str, ...], ...] = (("layer.0", "layer.1"),)
    transports: str = "loopback"
    lease_s: float = 30.0
    model: str = "tiny"
    heads: int = HEADS
    coordinator: str = ""
    streaming_from: int = 0
    window: int = 0
    answer_s: float = 0.0
    """Above 0 the server is bidirectional, with the block pool `pool`."""
    shares: bool = False
    """Whether it shares prefixes, besides or without `answer_s`."""
    back_off: int = 0
    launched: Any = None
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.config = WorkerConfig(
            transports=self.transports,
            lease_slots=64,
            lease_s=self.lease_s,
            timeout_s=5.0,
            coordinator=self.coordinator,
            ticket_keys=os.environ.get("KVLINK_TICKET_KEYS", ""),
        )
        self.caches = [self._rank_caches() for _ in range(self.tp_size)]
        announced = Announcements.of(self.config)
        self.scheduler = SchedulerSide(
            self.name,
            SlotGroups(48 if self.answer_s or self.shares else 64, 4),
            lambda blocks: tuple(blocks),
            self.lease_s,
            Rank(0, self.tp_size, self.heads),
            announcements=announced,
            streaming_from=self.streaming_from,
            grows=[not group[0].startswith("window") for group in self.groups],
            windows=[
                Window(self.window, BLOCK_TOKENS) if group[0].startswith("window") else None
                for group in self.groups
            ]
            if self.window
            else [],
            turns=self._turns(announced),
            back_off=self.back_off,
        )
        self.pool = Pool()
        if self.scheduler.turns.answers is not None:
            self.scheduler.turns.answers.watch(self.pool)
        self.start()

    def _turns(self, announced: Announcements | None) -> Turns | None:
        if not self.answer_s and not self.shares:
            return None
        peers = PeerPrefixes(self.coordinator, 3) if self.shares else None
        ttl_s, both = self.answer_s or 600, self.answer_s > 0
        return Turns(SharedSeats(49, 16), ttl_s, announced, bidirectional=both, peers=peers)

    def start(self) -> None:
        self.ranks = [
            WorkerSide(
                f"{self.name}-{rank}",
                caches_of(
                    tensors,
                    [LayerGroup(tuple(names)) for names in self.groups],
                    NUM_BLOCKS,
                    Rank(rank, self.tp_size, self.heads),
                    self.model,
                ),
                self.config,
            )
            for rank, tensors in enumerate(self.caches)
        ]
        self.scheduler.set_ranks(rank.rank_info for rank in self.ranks)

    def close(self) -> None:
        self.scheduler.close()
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rank_caches(self) -> dict[str, torch.Tensor]:
        """The groups lie upon each other, as vLLM has them: a block belongs to one group at a time."""
        shape = (NUM_BLOCKS, max(1, self.heads // self.tp_size), BLOCK_TOKENS, HEAD_BYTES)
        layers = [torch.randint(0, 255, shape, dtype=torch.uint8) for _ in max(self.groups, key=len)]
        return {name: layers[index] for group in self.groups for index, name in enumerate(group)}

    def block(self, layer: str, block: int) -> torch.Tensor:
        """All heads of one block: [heads, tokens, bytes]."""
        return torch.cat([tensors[layer][block] for tensors in self.caches])

    def step(
        self,
        chunks: Mapping[str, Chunk] | None = None,
        preempted: Iterable[str] = (),
        compute: Callable[[], None] = lambda: None,
    ) -> None:
        """One step of the engine. `compute`: what the model does in it."""
        self.scheduler.scheduled(chunks or {}, preempted)
        commands = self.scheduler.take_commands(idle=not chunks)
        for rank in self.ranks:
            rank.carry_out(commands, lambda: self.launched)
        compute()
        for rank in self.ranks if commands.written else ():
            rank.computed(commands.written)
        self.scheduler.held(Counter(name for rank in self.ranks for name in rank.take_held()))
        results = [rank.results() for rank in self.ranks]
        self.failed.update(*(result.failed for result in results))
        self._count("sent", [result.sent for result in results])
        self._count("received", [result.received for result in results])

    def _count(self, name: str, sets: list[set[str]]) -> None:
        """A transfer is over once every rank has said so, as vLLM counts."""
        counts: Counter[str] = self.__dict__.setdefault(f"_{name}", Counter())
        for one in sets:
            counts.update(one)
        done = {request_id for request_id, count in counts.items() if count == self.tp_size}
        for request_id in done:
            del counts[request_id]
        getattr(self, name).update(done)
        if done and name == "sent":
            self.scheduler.sent(done)
        if done and name == "received":
            self.scheduler.received(done, self.failed)

    def step_until(self, done: Callable[[], object]) -> None:
        """Steps, some milliseconds apart as an idle engine's are."""

        def is_done_or_steps() -> bool:
            if done():
                return True
            self.step()
            return False

        eventually(is_done_or_steps)

    # What requests go through.

    def prefill(
        self, request: Any, *groups: list[int], complete: bool = True
    ) -> tuple[bool, dict[str, Any] | None]:
        """Arrives, is scheduled and computed, and ends after its first token."""
        self.begin(request, *groups)
        self.step()
        request.num_computed_tokens = request.num_prompt_tokens
        ended = self.scheduler.finished(request, groups, complete)
        self.step()
        return ended

    def hands_off(self, request: Any, *groups: list[int]) -> dict[str, Any]:
        """As `prefill`. Returns what decode is given."""
        _, params = self.prefill(request, *groups)
        assert params
        return params

    def begin(self, request: Any, *groups: list[int]) -> None:
        """Arrives and is scheduled; its first blocks exist."""
        self.scheduler.arrived(request)
        assert eventually(lambda: self._matched(request)) == (0, False)
        self.scheduler.allocated(request, groups, 0)

    def _matched(self, request: Any) -> tuple[int, bool] | None:
        """How much there is to load, None until that is known."""
        count, in_background = self.scheduler.num_matched(request, 0)
        return None if count is None else (count, in_background)

    def compute(
        self, request: Any, num_tokens: int, *new_blocks: list[int], writes: Iterable[int] = ()
    ) -> None:
        """One chunk, with blocks beyond those it had; `writes`: blocks that get other contents."""

        def write() -> None:
            for tensors in self.caches:
                for block in writes:
                    for tensor in tensors.values():
                        tensor[block] = torch.randint_like(tensor[block], 255)

        self.step({request.request_id: Chunk(new_blocks, num_tokens)}, compute=write)
        request.num_computed_tokens += num_tokens

    def end(self, request: Any, *groups: list[int], complete: bool = True) -> dict[str, Any] | None:
        """Has its first token, or is aborted."""
        _, params = self.scheduler.finished(request, groups, complete)
        self.step()
        return params

    def awaits(self, request: Any) -> bool:
        """Whether it is not known yet how much there is to load."""
        return self.scheduler.incoming.num_matched(request, 0) == (None, False)

    def load_when_announced(self, request: Any, *groups: list[int]) -> int:
        """Is asked about until its prefill has begun, and is given blocks."""
        self.step_until(lambda: not self.awaits(request))
        count, _ = self.scheduler.incoming.num_matched(request, 0)
        assert count is not None
        self.scheduler.allocated(request, groups, count)
        return count

    def answer(self, request: Any, answer: list[int], *groups: list[int]) -> dict[str, Any] | None:
        """Computes a prompt and its answer here, and ends. All but the last token have been computed."""
        request.all_token_ids = request.prompt_token_ids + answer
        request.num_computed_tokens = len(request.all_token_ids) - 1
        return self.end(request, *groups)

    def load(self, request: Any, *groups: list[int], computed: int = 0) -> tuple[int, bool]:
        """Arrives and is given blocks; `step_until` waits for what was asked for."""
        self.scheduler.arrived(request)
        count, in_background = self.scheduler.num_matched(request, computed)
        assert count is not None
        self.scheduler.allocated(request, groups, count)
        return count, in_background

    def loads(self, request: Any, *groups: list[int], computed: int = 0) -> bool:
        """Loads a request to its end. Returns whether that went well."""
        self.load(request, *groups, computed=computed)
        self.step_until(lambda: request.request_id in self.received)
        return request.request_id not in self.failed


def same(
    one: Server,
    other: Server,
    pairs: Iterable[tuple[int, int]],
    layers: Iterable[str] = ("layer.0", "layer.1"),
) -> bool:
    """Whether blocks of two servers hold the same bytes."""
    names = tuple(layers)
    return all(one.block(name, a).equal(other.block(name, b)) for a, b in pairs for name in names)


def gone(server: Server) -> bool:
    """No lease is left, and every slot is free again."""
    return len(server.scheduler._slots) == 15 and not server.scheduler._seats


def request(request_id: str, tokens: list[int], params: dict[str, Any] | None, max_tokens: int = 1) -> Any:
    all_tokens = list(tokens)
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        all_token_ids=all_tokens,
        _all_token_ids=all_tokens,
        max_tokens=max_tokens,
        get_skip_reading_prefix_cache=lambda: False,
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_preemptions=0,
        kv_transfer_params=dict(params) if params is not None else None,
        prompt_embeds=None,
        mm_features=None,
        lora_request=None,
        trace_headers=None,
    )
