# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler at both ends of a handoff in parts, without a model: `stepping.py MODEL SCENARIO`.

Runs in vLLM's environment. Steps are made here, one by one, so that what happens between two chunks is no accident. A
token's cache is a number that says which token it is, where, and in which layer. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.connector import KVLinkConnector
from kvlink.runtime.background import ControlThread

BLOCK_TOKENS, CHUNK_TOKENS, WINDOW, NUM_BLOCKS = 16, 64, 40, 64
PROMPT = [index * 7 % 500 for index in range(203)]  # in four chunks
HEADS, HEAD_SIZE = 4, 64


class Side:
    """One server, stepped by hand. `extra` is more for kv_connector_extra_config."""

    def __init__(
        self, model: str, coordinator: str, scenario: str, num_blocks: int = NUM_BLOCKS, **extra: Any
    ) -> None:
        config = config_of(model, coordinator, _lease_s(scenario), num_blocks, **extra)
        self.caches = caches_of(scenario == "windows", num_blocks)
        self.scheduler = Scheduler(
            config,
            self.caches,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        # The groups lie upon each other: a block belongs to one at a time.
        layers = [torch.zeros(num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE) for _ in range(2)]
        self.tensors = {
            name: layers[layer]
            for group in self.caches.kv_cache_groups
            for layer, name in enumerate(group.layer_names)
        }
        self.worker = KVLinkConnector(config, KVConnectorRole.WORKER, self.caches)
        self.worker.register_kv_caches(self.tensors)
        self.scheduler.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.answers: dict[str, Any] = {}
        self.turns: Counter[str] = Counter()
        """The results of pulls of earlier answers, as its worker counted them."""

    def add(self, name: str, params: dict[str, Any], tokens: list[int] = PROMPT, num_new: int = 1) -> Request:
        """Asks for some tokens."""
        sampling = SamplingParams(
            max_tokens=num_new, temperature=0, extra_args={"kv_transfer_params": params}
        )
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, tokens, sampling, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """As the engine makes it, with the worker's hooks in vLLM's order."""
        output = self.scheduler.schedule()
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            self._compute(name, range(request.num_computed_tokens - count, request.num_computed_tokens))
            computed = request.num_computed_tokens >= request.num_tokens
            sampled.append([sampled_after(request.all_token_ids)] if computed else [])
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        stats = self.worker.get_kv_connector_stats()
        self.turns.update(stats.data["turns"] if stats is not None else {})
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=set(),
            kv_connector_stats=stats,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reported,
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            self.answers.update(
                {one.request_id: one for one in outputs.outputs if one.finish_reason is not None}
            )

    def blocks(self, name: str) -> tuple[list[int], ...]:
        """By cache group."""
        return tuple(map(list, self.scheduler.kv_cache_manager.get_block_ids(name)))

    def right(
        self, blocks: tuple[list[int], ...], positions: range, tokens: Sequence[int] = PROMPT
    ) -> dict[str, int]:
        """By layer, how many of the tokens have blocks; raises when one of these is not what was computed."""
        counts = {}
        for group, ids in zip(self.caches.kv_cache_groups, blocks, strict=True):
            for layer, name in enumerate(group.layer_names):
                held = [at for at in positions if ids[at // BLOCK_TOKENS]]
                for at in held:
                    token = self.tensors[name][ids[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS]
                    assert bool((token == _value(tokens[at], at, name, layer)).all()), (name, at)
                counts[name] = len(held)
        return counts

    def heard(self) -> bool:
        """Whether the coordinator's answers to all that was announced are in. Decode may claim a part before."""
        outgoing = self.scheduler.connector._scheduling._outgoing
        return all(answer.done() for out in outgoing._requests.values() for answer in out.announced)

    def left(self) -> list[int]:
        """Blocks in use, and requests."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return [self.caches.num_blocks - 1 - free, len(self.scheduler.requests)]

    def _compute(self, name: str, positions: range) -> None:
        request, blocks = self.scheduler.requests[name], self.blocks(name)
        for group, ids in zip(self.caches.kv_cache_groups, blocks, strict=True):
            for layer, cache in enumerate(group.layer_names):
                for at in positions:
                    value = _value(request.all_token_ids[at], at, cache, layer)
                    self.tensors[cache][ids[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] = value


def sampled_after(tokens: Sequence[int]) -> int:
    """Returns the next token, which depends on all before."""
    return zlib.crc32(str(list(tokens)).encode()) % 500


def _lease_s(scenario: str) -> int:
    """Nobody comes for what is handed off after a preemption. Else no lease ends by itself while this runs."""
    return 2 if scenario == "preempted" else 600


def config_of(model: str, coordinator: str, lease_s: int, num_blocks: int = NUM_BLOCKS, **extra: Any) -> Any:
    transfer = {
        "kv_connector": "KVLinkConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "coordinator": coordinator,
            "streaming_from_tokens": 0,
            "transports": "loopback",
            "lease_s": lease_s,
            **extra,
        },
    }
    config = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=8,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks, BLOCK_TOKENS
    return config


def caches_of(windows: bool, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    shape = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full.0", "full.1"], FullAttentionSpec(**shape))]
    if windows:
        spec = SlidingWindowSpec(**shape, sliding_window=WINDOW)
        groups.append(KVCacheGroupSpec(["window.0", "window.1"], spec))
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK_TOKENS
    )


def _value(token: int, at: int, name: str, layer: int) -> float:
    return token * 1000 + at + 0.5 * layer + 0.25 * name.startswith("window")


def until(condition: Callable[[], bool], *sides: Side) -> None:
    """Steps the sides until it comes true. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        for side in sides:
            side.step()
        time.sleep(0.001)


def main(model: str, scenario: str) -> dict[str, Any]:
    parallel_state.get_tensor_model_parallel_rank = lambda: 0  # nothing of torch.distributed is started
    init_none_hash(sha256)
    coordinator = Coordinator()
    ControlThread.shared().run(coordinator.start())
    prefill, decode = (Side(model, coordinator.address, scenario) for _ in range(2))
    computes = prefill.add("p", {"do_remote_decode": True, "kvlink_stream": "s"})
    follows = decode.add("d", {"do_remote_prefill": True, "kvlink_stream": "s"})
    decode.step()
    assert follows.status is RequestStatus.WAITING
    prefill.step()
    prefill.step()
    until(lambda: follows.status is RequestStatus.WAITING_FOR_REMOTE_KVS, decode)
    blocks = decode.blocks("d")
    until(lambda: bool(decode.tensors["full.1"][blocks[0][3]].all()), decode)  # the first chunk's last block
    until(prefill.heard)
    if scenario == "preempted":
        prefill.scheduler.running.remove(computes)
        prefill.scheduler._preempt_request(computes, time.monotonic(), drop_stale_output=True)
    if scenario == "aborted":
        decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    until(lambda: "p" in prefill.answers, prefill, decode)
    until(lambda: not decode.scheduler.requests, prefill, decode)
    loaded = decode.right(blocks, range(len(PROMPT) - 1)) if scenario in ("full", "windows") else {}
    announced = prefill.answers["p"].kv_transfer_params.get("kvlink_announced")
    until(lambda: not prefill.scheduler.requests, prefill, decode)
    return {"announced": announced, "loaded": loaded, "left": [prefill.left(), decode.left()]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
