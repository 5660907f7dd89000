# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of a very small model with a handoff, whose generation loop runs one round when a test says so.

Everything is transformers' own: manager, loop, scheduler, cache and model. Only the start of each round waits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

from kvlink import WorkerConfig
from kvlink.integrations.transformers import KVLinkHandoff

VOCABULARY = 64
MAX_NEW = 6
_SEED = 2031


_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}


def small_llama(dtype: Any = torch.float32, **changes: Any) -> Any:
    """Returns a model with seeded weights. Limits torch to one thread, which makes sums bit-equal."""
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    config = LlamaConfig(**{**_CONFIG, **changes})
    network: Any = LlamaForCausalLM(config).to(dtype)
    network.train(False)
    return network


def batching(model: Any, page_size: int = 4, num_blocks: int = 24, **options: Any) -> Any:
    """Returns a manager that generates greedily."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=MAX_NEW, eos_token_id=-1)
    config = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=num_blocks, max_batch_tokens=32, **options
    )
    return model.init_continuous_batching(greedy, config)


class ModelFailed(RuntimeError):
    """Stands for an error of CUDA or of an index in a forward pass."""


class Stepped:
    """A manager and its handoff. The generation thread is between two rounds whenever no method here runs."""

    def __init__(self, name: str, model: Any = None, **options: Any) -> None:
        self.manager = batching(small_llama() if model is None else model, **options)
        self._round, self._step = self.manager._generation_loop_body, self.manager._generation_step
        self.manager._generation_loop_body = self._wait_and_run
        self.manager._generation_step = self._step_or_raise
        self._may, self._did = threading.Semaphore(0), threading.Semaphore(0)
        self.fails_next = False
        self.in_forward: Callable[[], object] = lambda: None  # runs in each forward pass
        self.handoff = KVLinkHandoff(
            self.manager, name, config=WorkerConfig(timeout_s=60.0, lease_s=600.0, transports="shm")
        )
        self.outputs: list[Any] = []
        self.manager.start()

    def _wait_and_run(self, *args: Any, **options: Any) -> bool:
        self._may.acquire()
        goes_on = False
        try:
            goes_on = self._round(*args, **options)
        finally:
            self._goes_on = goes_on
            self._did.release()
        return goes_on

    def _step_or_raise(self) -> None:
        self.in_forward()
        if self.fails_next:
            self.fails_next = False
            raise ModelFailed("the forward pass failed")
        self._step()

    def step(self) -> None:
        """Runs one round. When it was the last, waits for the thread to end."""
        thread = self.manager._generation_thread
        if thread is None or not thread.is_alive():
            return
        self.manager._wake_up_loop.set()  # an idle round does not wait for work
        self._may.release()
        self._did.acquire()
        if not self._goes_on:
            thread.join()
        self.outputs += self._drained()

    def until(self, holds: Callable[[], object]) -> None:
        """Runs rounds until `holds`, or until the loop has ended."""
        while not holds() and self.manager.is_running():
            self.step()

    def during(self, call: Callable[[], object]) -> None:
        """Runs rounds while another thread makes a call that waits for the loop."""
        thread = threading.Thread(target=call)
        thread.start()
        while thread.is_alive():
            if self.manager.is_running():
                self.step()
            else:
                thread.join()

    def stop(self, **options: Any) -> None:
        """Stops the manager."""
        self.during(partial(self.manager.stop, **options))

    def close(self) -> None:
        """Closes the handoff, then stops the manager."""
        self.during(self.handoff.close)
        if self.manager.is_running():
            self.stop(hard_stop=True)

    def used(self) -> int:
        """Returns how many sectors somebody holds; blocks kept for their prefixes count as free."""
        cached = self.handoff._batching.cache
        cached.evict_cached_blocks()
        cached.pool.try_to_free_sectors()
        return int(cached.num_sectors - cached.pool.num_free_sectors)

    def _drained(self) -> list[Any]:
        queued = self.manager.output_router.output_queue
        return [queued.get_nowait() for _ in range(queued.qsize())]


@cache
def _reference() -> Any:
    manager = batching(small_llama(), num_blocks=64)
    manager.start()
    return manager


@cache
def expected(prompt: Sequence[int], num_new: int = MAX_NEW) -> list[int]:
    """Returns what transformers generates without kvlink."""
    manager = _reference()
    manager.add_request(list(prompt), max_new_tokens=num_new)
    return list(manager.get_result().generated_tokens)


@contextmanager
def reference() -> Iterator[None]:
    """Ends the thread of `expected` at the end.

    A manager that stops collects garbage. With torch loaded that takes long unless torch's objects are left out.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if _reference.cache_info().currsize:
            _reference().stop()
        _reference.cache_clear()
        expected.cache_clear()
        gc.unfreeze()
