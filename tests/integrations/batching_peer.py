# SPDX-License-Identifier: Apache-2.0
"""A process with continuous batching, driven by lines of JSON: `python batching_peer.py OPTIONS`.

A request is {"do": command, **arguments}; the answer {"ok": value} or {"error": [kind, message]}. OPTIONS is a JSON
object: worker_id (none: a plain process without kvlink), page_size, num_blocks, config of the worker, window (a model
of window_models.py with its sliding window, instead of the tiny Llama).
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

NUM_NEW = 16
_WAIT_S = 60.0


class BatchingProcess:
    """The test's end of one such process."""

    def __init__(self, worker_id: str | None = None, **options: Any) -> None:
        command = [sys.executable, str(Path(__file__)), json.dumps({"worker_id": worker_id, **options})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, do: str, **arguments: Any) -> Any:
        """Raises RuntimeError with the kind and message of what the command raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(": ".join(answer["error"]))
        return answer["ok"]

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> None:
        """Asks it to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Waits until it has ended. Raises AssertionError when it did not end well."""
        try:
            assert self._process.wait(timeout=60) == 0
        finally:
            self.kill()


def end_all(*processes: BatchingProcess) -> None:
    """Ends the processes at the same time, and waits for each."""
    with ExitStack() as each:
        for process in processes:
            each.callback(process.close)
            process.end()


class Commands:
    """One method a command."""

    def __init__(
        self,
        worker_id: str | None,
        page_size: int = 16,
        num_blocks: int = 64,
        config: dict[str, Any] | None = None,
        window: tuple[str, int] | None = None,
    ) -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig
        from window_models import make

        from kvlink import WorkerConfig
        from kvlink.integrations.transformers import KVLinkHandoff
        from kvlink.integrations.transformers.demo import tiny_llama

        self.network = make(*window) if window else tiny_llama()
        self.manager = self.network.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=-1),
            ContinuousBatchingConfig(page_size=page_size, num_blocks=num_blocks, max_batch_tokens=64),
        )
        self.make_handoff = lambda: KVLinkHandoff(
            self.manager, worker_id, config=WorkerConfig(**config or {})
        )
        self.handoff = self.make_handoff() if worker_id else None
        self.prefills: list[Any] = []
        self.finished: dict[str, Any] = {}
        self.manager.start()

    def close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()
        self.manager.stop()

    def generate(self, prompt: list[int], request_id: str, **options: Any) -> list[int]:
        """Without a handoff."""
        self.manager.add_request(prompt, request_id, **options)
        return self.tokens(request_id)

    def begin(self, prompts: list[list[int]]) -> None:
        """Starts prefills."""
        self.prefills = [self.handoff.prefill(prompt) for prompt in prompts]

    def ready(self) -> list[str]:
        """Handoffs of the prefills that have ended by now."""
        return [future.result().to_json() for future in self.prefills if future.done()]

    def prefill(self, prompt: list[int]) -> str:
        return self.handoff.prefill(prompt).result(_WAIT_S).to_json()

    def submit(self, handoff: str, **options: Any) -> str:
        from kvlink.integrations.transformers import Handoff

        return self.handoff.submit(Handoff.from_json(handoff), **options)

    def generate_on(self, prompt: list[int], request_id: str, max_new_tokens: int) -> None:
        """Starts a request, without a handoff, and notes when it gets its tokens."""
        self.manager.add_request(prompt, request_id, max_new_tokens=max_new_tokens, record_timestamps=True)

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        """Returns when a running request has generated so many tokens."""
        deadline = time.monotonic() + _WAIT_S
        active = self.manager.batch_processor.scheduler.active_requests
        while (state := active.get(request_id)) is None or len(state.generated_tokens) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request_id} does not generate")
            time.sleep(0.001)

    def share(self, source: str | list[int]) -> str:
        return self.handoff.share(source).result(_WAIT_S).to_json()

    def fetch(self, prefix: str) -> int:
        from kvlink.integrations.transformers import Prefix

        return self.handoff.fetch(Prefix.from_json(prefix)).result(_WAIT_S)

    def move(self, request_id: str) -> str:
        return self.handoff.move(request_id).result(_WAIT_S).to_json()

    def error(self, request_id: str) -> str:
        """Waits for a request to fail and returns why."""
        try:
            return f"no error, and {len(self.tokens(request_id))} tokens"
        except AssertionError as failed:
            return str(failed)

    def tokens(self, request_id: str) -> list[int]:
        """Waits for a request to finish and returns its tokens."""
        output = self._output(request_id)
        assert output.error is None, output.error
        return output.generated_tokens

    def times(self, request_id: str) -> list[float]:
        """Waits for a request to end, with or without an error, and returns when it got its tokens, in seconds."""
        return self._output(request_id).timestamps

    def pull_s(self) -> float:
        """Returns the seconds that the newest pull took."""
        return self.handoff.newest().pull.stats.total_us / 1e6

    def _output(self, request_id: str) -> Any:
        deadline = time.monotonic() + _WAIT_S
        while request_id not in self.finished:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request_id} did not finish")
            # Asked for one request it puts others' results back at once: a loop that keeps the GIL from generation.
            output = self.manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self.finished[output.request_id] = output
        return self.finished.pop(request_id)

    def cancel(self, request_id: str) -> None:
        self.manager.cancel_request(request_id)

    def abort(self, handoff: str) -> None:
        """Also takes a prefix."""
        from kvlink.integrations.transformers import Handoff, Prefix

        kind = Prefix if "tokens" in json.loads(handoff) else Handoff
        self.handoff.abort(kind.from_json(handoff))

    def spoil(self, handoff: str, attention: str | None = None) -> None:
        """Negates what the ticket's blocks hold."""
        import torch

        from kvlink import Ticket

        groups = Ticket.from_text(json.loads(handoff)["ticket"]).groups()
        allocators = self.manager.batch_processor.cache.cache_allocators.values()
        with self.manager.pause():
            for allocator, blocks in zip(allocators, groups, strict=True):
                if attention in (None, allocator.layer_type):
                    allocator._copy_view.view(torch.float32)[list(blocks)] *= -1

    def stats(self) -> dict[str, int]:
        from dataclasses import asdict

        return asdict(self.handoff.stats())

    def newest(self) -> dict[str, Any]:
        """How the newest handoff came in."""
        landed = self.handoff.newest()
        paths = landed.pull.explain() if landed.pull else []
        return {
            "request_id": landed.request_id,
            "transports": [path.transport for path in paths],
            "error": type(landed.error).__name__,
        }

    def resident_bytes(self) -> int:
        """Returns this process's memory, without what it shares."""
        gc.collect()
        pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
        return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")

    def used(self) -> int:
        """Sectors that somebody holds; blocks kept for their prefixes count as free."""
        cache = self.manager.batch_processor.cache
        with self.manager.pause():
            cache.evict_cached_blocks()
            cache.pool.try_to_free_sectors()
            return cache.num_sectors - cache.pool.num_free_sectors

    def reopen(self) -> None:
        """Another handoff for the same manager, which generates all the while."""
        self.handoff.close()
        self.handoff = self.make_handoff()

    def restart(self) -> None:
        self.manager.stop(keep_for_next_session=True)
        self.manager.start()


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    commands = Commands(**json.loads(sys.argv[1]))
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": getattr(commands, request.pop("do"))(**request)}
            except Exception as error:
                answer = {"error": [type(error).__name__, str(error)]}
            print(json.dumps(answer), file=out, flush=True)
    finally:
        commands.close()


if __name__ == "__main__":
    main()
