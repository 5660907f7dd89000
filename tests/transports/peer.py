# SPDX-License-Identifier: Apache-2.0
"""Real Workers that a test drives by name: in this process, or in one of their own, by lines of JSON.

A request is {"do": command, **arguments}; the answer {"ok": value} or {"error": [kind, message]}.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from typing import Any

import numpy as np
from transports.pools import PoolSpec, fill, fill_share, random_contents, rows

from kvlink import Pull, ReadyUnit, Ticket, Worker, WorkerConfig
from kvlink.control.rpc import server
from kvlink.errors import UnknownRequest

_agent_calls = 0


def count_agent_calls() -> None:
    """Has the calls counted that agents made from now on in this process answer."""
    add = server.GrpcServer.unary

    def unary(host: Any, method: Any, handle: Any) -> None:
        async def counted(request: Any) -> Any:
            global _agent_calls
            _agent_calls += 1
            return await handle(request)

        add(host, method, counted)

    server.GrpcServer.unary = unary  # type: ignore[method-assign]


class Commands:
    """One method a command."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._specs: dict[str, PoolSpec] = {}
        self._pulls: dict[str, Pull] = {}
        self._jobs: list[threading.Thread] = []
        self._generation = 0

    def open(self, name: str, pool: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        self._specs[name] = PoolSpec(**pool)
        worker = Worker(self._specs[name].make(), name, config=WorkerConfig.from_env(**config))
        self._workers[name] = worker
        return {"agent": worker.card.agent, "epoch": worker.card.epoch}

    def close(self, name: str) -> None:
        self._join()
        self._workers.pop(name).close()

    def close_all(self) -> None:
        self._join()
        while self._workers:
            self._workers.popitem()[1].close()

    def collect(self) -> None:
        gc.collect()

    def fill(self, name: str, seed: int) -> None:
        self._join()
        fill(self._workers[name].pool, seed)

    def fill_share(self, name: str, seed: int) -> None:
        fill_share(self._workers[name].pool, self._specs[name], seed)

    def offer(self, name: str, request_id: str, block_ids: list[int], options: dict[str, Any]) -> str:
        unit = ReadyUnit[options.pop("ready_unit", "BLOCKS")]
        return self._workers[name].offer(request_id, block_ids, ready_unit=unit, **options).to_text()

    def set_ready(self, name: str, request_id: str, ready: int) -> None:
        self._workers[name].set_ready(request_id, ready)

    def extend(self, name: str, request_id: str, ttl_s: float) -> None:
        self._workers[name].extend(request_id, ttl_s)

    def set_ttl(self, name: str, request_id: str, ttl_s: float) -> None:
        self._workers[name].offers.set_ttl(request_id, ttl_s)

    def abort(self, name: str, request_id: str) -> None:
        self._workers[name].abort(request_id)

    def events(self, name: str) -> list[list[str]]:
        return [[event.request_id, event.how.value] for event in self._workers[name].events()]

    def counts(self, name: str) -> dict[str, Any]:
        return self._workers[name].lease_counts()._asdict()

    def agent_calls(self) -> int:
        return _agent_calls

    def start_pull(self, name: str, ticket: str, into: list[int], timeout_s: float) -> None:
        self._pulls[name] = self._workers[name].pull(Ticket.from_text(ticket), into, timeout_s=timeout_s)

    def pulled_bytes(self, name: str) -> int:
        return self._pulls[name].stats.num_bytes

    def finish_pull(self, name: str) -> dict[str, Any]:
        pull = self._pulls.pop(name)
        pull.wait()
        (path,) = pull.explain()
        refused = {refusal.transport: refusal.reason for refusal in path.refused}
        return {
            "transport": path.transport,
            "refused": refused,
            "bytes": path.num_bytes,
            "bounces_at": path.bounces_at,
            "staged": path.staged,
            "predicted_us": [path.predicted_direct_us, path.predicted_staged_us],
        }

    def pull(self, name: str, ticket: str, into: list[int], timeout_s: float) -> dict[str, Any]:
        self.start_pull(name, ticket, into, timeout_s)
        return self.finish_pull(name)

    def differing(
        self, name: str, into: list[int], seed: int, blocks: list[int], owner: dict[str, Any] | None = None
    ) -> int:
        """Bytes in which blocks `into` differ from what a peer with `seed`, and this layout or the `owner`'s, has in
        `blocks`."""
        pool = self._workers[name].pool
        theirs = PoolSpec(**owner).layout() if owner else pool.layout
        contents = random_contents(theirs, seed)
        tokens = range(len(into) * pool.layout.block_tokens)
        heads = range(pool.layout.first_head, pool.layout.first_head + pool.layout.num_heads)
        count = 0
        for plane, other in zip(pool.layout.planes, theirs.planes, strict=True):
            here = pool.numpy(plane.region)[rows(pool.layout, plane, into, tokens, heads)]
            there = contents[other.region][rows(theirs, other, blocks, tokens, heads)]
            count += int((here != there).sum())
        return count

    def stream(
        self, name: str, request_id: str, blocks: list[int], seed: int, unit: str, most_ms: float
    ) -> None:
        """In the background, writes what `seed` means unit after unit and says so, with pauses in between."""
        worker = self._workers[name]
        layout = worker.pool.layout
        contents = random_contents(layout, seed)
        all_tokens = range(len(blocks) * layout.block_tokens)
        by_blocks = ReadyUnit[unit] is ReadyUnit.BLOCKS
        heads = range(layout.first_head, layout.first_head + layout.num_heads)
        pauses = random.Random(seed)

        def write(step: int) -> None:
            first = step * layout.block_tokens
            tokens = range(first, first + layout.block_tokens) if by_blocks else all_tokens
            for plane in layout.planes:
                if by_blocks or plane.layer == step:
                    where = rows(layout, plane, blocks, tokens, heads)
                    worker.pool.numpy(plane.region)[where] = contents[plane.region][where]

        def run() -> None:
            for step in range(len(blocks) if by_blocks else layout.num_layers):
                time.sleep(pauses.uniform(0, most_ms) / 1000)
                write(step)
                try:
                    worker.set_ready(request_id, step + 1)
                except UnknownRequest:
                    return  # the reader has all it wanted

        self._start(run)

    def churn(
        self, name: str, count: int, blocks_each: int, pace_us: float, expire: bool, seed: int
    ) -> list[list[Any]]:
        """Offers `count` requests, [generation, ticket] each, and ends them in the background, in any order.

        Every block of a request is full of its generation, and is overwritten with the next the moment the
        lease has ended: at a random time around `pace_us` after the one before.
        """
        self._join()
        worker = self._workers[name]
        words = worker.pool.numpy().view(np.uint64).reshape(worker.pool.layout.num_blocks, -1)
        worker.events()  # of the requests before
        pauses = random.Random(seed)
        places, tickets = {}, []
        for index in range(count):
            self._generation += 1
            first = index * blocks_each
            words[first : first + blocks_each] = self._generation
            ttl_s = (index + pauses.uniform(0, 2)) * pace_us / 1e6 if expire else 60.0
            request_id = str(self._generation)
            places[request_id] = slice(first, first + blocks_each)
            ticket = worker.offer(request_id, range(first, first + blocks_each), ttl_s=max(ttl_s, 0.001))
            tickets.append([self._generation, ticket.to_text()])

        def write_next(request_id: str) -> None:
            self._generation += 1
            words[places.pop(request_id)] = self._generation

        def abort_all() -> None:
            for request_id in pauses.sample(list(places), count):  # or a fast reader would always be ahead
                time.sleep(pauses.uniform(0, 2) * pace_us / 1e6)
                worker.abort(request_id)
                write_next(request_id)

        def await_all() -> None:
            while places:
                for event in worker.events():
                    write_next(event.request_id)

        self._start(await_all if expire else abort_all)
        return tickets

    def churn_soft(
        self, name: str, count: int, blocks_each: int, pace_us: float, seed: int
    ) -> list[list[Any]]:
        """Offers `count` requests softly, [generation, ticket] each, and overwrites them in the background.

        As `churn` does, but each request is revoked by one of its blocks, which is then the only one that is
        overwritten. Now and then an offer that pins blocks needs a slot: the oldest ends, and is revoked later.
        """
        self._join()
        worker = self._workers[name]
        words = worker.pool.numpy().view(np.uint64).reshape(worker.pool.layout.num_blocks, -1)
        worker.revoke(range(len(words)))
        self._generation = max(self._generation, 0xA5A5 << 40)  # far from the header of a response
        pauses = random.Random(seed)
        tickets = []
        for index in range(count):
            self._generation += 1
            blocks = range(index * blocks_each, (index + 1) * blocks_each)
            words[blocks.start : blocks.stop] = self._generation
            tickets.append([self._generation, worker.offer_soft(str(index), blocks).to_text()])

        def overwrite_all() -> None:
            for index in pauses.sample(range(count), count):
                time.sleep(pauses.uniform(0, 2) * pace_us / 1e6)
                if pauses.random() < 0.1:
                    worker.offer(f"pinned {index}", [0], ttl_s=0.001)
                block = index * blocks_each + pauses.randrange(blocks_each)
                worker.revoke([block])
                self._generation += 1
                words[block] = self._generation
            worker.events()

        self._start(overwrite_all)
        return tickets

    def _start(self, run: Any) -> None:
        self._jobs.append(threading.Thread(target=run))
        self._jobs[-1].start()

    def _join(self) -> None:
        while self._jobs:
            self._jobs.pop().join()


def main() -> None:
    count_agent_calls()
    commands = Commands()
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(commands, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), file=answers, flush=True)
    commands.close_all()


if __name__ == "__main__":
    main()
