# SPDX-License-Identifier: Apache-2.0
"""The encoder connector's two halves without vLLM around them: steps as its engine makes them, over a real worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from waiting import eventually

from kvlink import WorkerConfig
from kvlink.integrations.vllm.encoder.commands import EncoderCopies, EncoderStep
from kvlink.integrations.vllm.encoder.items import KEY, ItemFormat
from kvlink.integrations.vllm.encoder.memory import MemoryShape
from kvlink.integrations.vllm.encoder.scheduler import EncoderScheduler

WIDTH, ROWS, BLOCK_BYTES = 8, 3, 64
FORMAT = ItemFormat("digest", "float32", 4, WIDTH)
BLOCKS_OF_ONE = -(-ROWS * WIDTH * 4 // BLOCK_BYTES)


def image(name: str, offset: int = 0, rows: int = ROWS, data: object = "pixels") -> Any:
    """One image of a prompt, as vLLM's MultiModalFeatureSpec."""
    place = SimpleNamespace(offset=offset, length=rows, get_num_embeds=lambda: rows)
    return SimpleNamespace(identifier=name, modality="image", mm_position=place, data=data)


def request(name: str, images: Iterable[Any], params: object = None) -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(images), ec_transfer_params=params)


def encoded(name: str, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    """Returns the output for an image, the same for the same name."""
    seed = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(rows, width, generator=seed)


@dataclass
class EncoderServer:
    """A server that keeps `num_images` images of the usual size. `stalled` ranks carry out no steps."""

    name: str
    produces: bool = False
    consumes: bool = False
    num_images: int = 2
    ranks: int = 1
    format: ItemFormat = FORMAT
    width: int = WIDTH
    timeout_s: float = 60.0
    ticket_keys: str = ""

    def __post_init__(self) -> None:
        config = WorkerConfig(
            transports="loopback", lease_slots=64, timeout_s=self.timeout_s, ticket_keys=self.ticket_keys
        )
        self.scheduler = EncoderScheduler(
            self.name,
            MemoryShape(self.num_images * BLOCKS_OF_ONE, BLOCK_BYTES, self.ranks),
            self.format,
            config,
            produces=self.produces,
            consumes=self.consumes,
            width_of=lambda _: self.width,
            has_input=lambda feature: feature.data is not None,
        )
        self.copies = [EncoderCopies(rank) for rank in range(self.ranks)]
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in range(self.ranks)]
        self.stalled: list[tuple[int, EncoderStep]] = []
        self.stalls: set[int] = set()
        self.encoded: list[str] = []
        self.counts: dict[str, int] = {}
        self.pulls = 0
        self.worker = self.scheduler._worker
        self._pull = self.worker.pull
        self.worker.pull = self._count_pull  # type: ignore[method-assign]

    def _count_pull(self, *args: Any, **kwargs: Any) -> Any:
        self.pulls += 1
        return self._pull(*args, **kwargs)

    def __enter__(self) -> EncoderServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.scheduler.close()

    def schedule(self, asked: Any) -> list[str] | None:
        """One call of vLLM's scheduler for one request: the images that it computes, or None if it has to wait."""
        if not self.scheduler.available(asked, 0):
            return None
        missing = [
            index for index, each in enumerate(asked.mm_features) if each.identifier not in self.caches[0]
        ]
        names = {index: asked.mm_features[index].identifier for index in missing}
        external = [index for index in missing if self.scheduler.has(names[index])]
        computed = [index for index in missing if index not in external]
        for index in (*computed, *external):  # vLLM's order
            self.scheduler.allocated(asked, index)
        return [names[index] for index in computed]

    def step(self, asked: Any = None) -> bool:
        """One step of the engine. Returns whether it computed the request, if there is one."""
        computed = self.schedule(asked) if asked is not None else None
        tokens = {asked.request_id: 1 << 20} if computed is not None else {}
        step = self.scheduler.take_step(tokens)
        for rank in range(self.ranks):
            if rank in self.stalls:
                self.stalled.append((rank, step))
            else:
                self.carry_out(rank, step, computed or [])
        self.count()
        return computed is not None

    def count(self) -> None:
        for name, count in self.scheduler.take_counts().items():
            self.counts[name] = self.counts.get(name, 0) + count

    def carry_out(self, rank: int, step: EncoderStep, computed: Iterable[str] = ()) -> None:
        copies, cache = self.copies[rank], self.caches[rank]
        copies.save_all(step, cache)
        copies.load(step, cache, "cpu")
        for name in computed:
            self.encoded.append(name)
            cache[name] = self.encode(name)
            copies.save(step, cache, name)
        copies.finish(step)

    def encode(self, name: str) -> torch.Tensor:
        return encoded(name, width=self.width)

    def answer(self, asked: Any) -> dict[str, Any]:
        """Serves a request to its end. Returns what the answer carries, as JSON would."""
        assert eventually(lambda: self.step(asked))
        return self.end(asked)

    def end(self, asked: Any) -> dict[str, Any]:
        offered = self.scheduler.ended(asked)
        self.count()
        return {name: {KEY: params} for name, params in offered.items()}

    def forget(self) -> None:
        """Empties vLLM's own cache."""
        for cache in self.caches:
            cache.clear()
