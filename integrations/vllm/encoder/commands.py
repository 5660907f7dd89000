# SPDX-License-Identifier: Apache-2.0
"""Defines what the scheduler's side tells the workers of a step, and how the workers carry it out."""

from __future__ import annotations

import logging
from array import array
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...request_guard import RequestGuard
from .cache import Entry
from .memory import EncoderMemory, MemoryShape

if TYPE_CHECKING:
    import torch

    Tensors = MutableMapping[str, torch.Tensor]
    """vLLM's own cache of encoder outputs, by identifier."""

_log = logging.getLogger("vllm.kvlink")


@dataclass(frozen=True, slots=True)
class Copy:
    """An item to copy between the pool and vLLM's own cache."""

    identifier: str
    blocks: array[int]
    shape: tuple[int, int]
    dtype: str

    @classmethod
    def of(cls, entry: Entry) -> Copy:
        """Returns the copy of an entry of the cache."""
        item = entry.item
        return cls(item.identifier, entry.blocks, (item.rows, item.width), item.format.dtype)


@dataclass(slots=True)
class EncoderStep:
    """The copies of one step. `path` and `shape` say where the workers find the pool."""

    number: int
    path: str
    shape: MemoryShape
    loads: list[Copy] = field(default_factory=list)
    saves: dict[str, Copy] = field(default_factory=dict)


class EncoderCopies:
    """Carries out the steps of one rank. Rank 0 saves for all, because all have the same outputs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._guard = RequestGuard(_log)
        self._memory: EncoderMemory | None = None
        self.is_outdated = False
        """Whether the weights are others than at the start. Then it saves nothing, as offers name the model before."""

    def load(self, step: EncoderStep, cache: Tensors, device: torch.device | str) -> None:
        """Loads the items of the step that vLLM's cache lacks. The copies have ended on return.

        An exception ends the step, which the model cannot compute without them.
        """
        import torch

        for copy in step.loads:
            if copy.identifier in cache:
                continue
            dtype = getattr(torch, copy.dtype)
            rows, width = copy.shape
            content = self._mapped(step).read(copy.blocks, rows * width * dtype.itemsize)
            cache[copy.identifier] = torch.from_numpy(content).view(dtype).reshape(rows, width).to(device)

    def save_all(self, step: EncoderStep, cache: Tensors) -> None:
        """Saves the items of the step that vLLM's cache has from earlier steps."""
        for identifier in step.saves:
            if identifier in cache:
                self.save(step, cache, identifier)

    def save(self, step: EncoderStep, cache: Tensors, identifier: str) -> None:
        """Saves an item if the step asks for it. One of another shape or dtype is not saved, and not offered."""
        copy = step.saves.get(identifier)
        if copy is not None and not self._rank and not self.is_outdated:
            with self._guard.around("save", identifier):  # without its stamp it is not offered
                self._save(step, copy, cache[identifier])

    def _save(self, step: EncoderStep, copy: Copy, tensor: torch.Tensor) -> None:
        import torch

        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (copy.shape, copy.dtype):
            _log.warning(
                "encoder output not offered item=%s: it has shape %s and dtype %s, and not %s and %s",
                copy.identifier,
                *found,
                copy.shape,
                copy.dtype,
            )
            return
        content = tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
        self._mapped(step).write(copy.blocks, content, step.number)

    def finish(self, step: EncoderStep) -> None:
        """Tells the scheduler that this rank's copies of the step have ended. Raises ConfigError on another host."""
        self._mapped(step).changes[self._rank] = self.is_outdated
        self._mapped(step).steps[self._rank] = step.number

    def _mapped(self, step: EncoderStep) -> EncoderMemory:
        if self._memory is None:
            self._memory = EncoderMemory.open(step.path, step.shape)
        return self._memory
