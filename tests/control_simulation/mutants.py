# SPDX-License-Identifier: Apache-2.0
"""Plants a fault into the control plane, one at a time, and says which seed of the simulation finds it and how soon.

Prints the table of docs/design/simulation.md. No file is changed: modules of the product are patched at their import.

    PYTHONPATH=tests python -m control_simulation.mutants [--seeds 100] [part of a name ...]
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_NAMES = re.compile(r" *Session\([^)]*\)|#\d+| \((runs|dead|stopped)\)")
_STORE, _CONTROL = "kvlink.coordinator.store", "kvlink.control"


class Mutant(NamedTuple):
    """One change of a module. `name` says to which invariant of the page it belongs."""

    name: str
    what: str
    module: str
    old: str
    new: str


MUTANTS: tuple[Mutant, ...] = (
    # The twelve that were planted from outside.
    Mutant(
        "1 c1",
        "tickets are released by whoever names them",
        f"{_STORE}.pending_offers",
        " or claim.reader not in given.served or claim.claim_id not in given.claim_ids",
        "",
    ),
    Mutant(
        "2 c2",
        "offers are sent again with their whole time",
        f"{_CONTROL}.session",
        "offer._replace(ttl_s=due - at)",
        "offer",
    ),
    Mutant(
        "1 c3",
        "a claim does not compare the tickets' revisions",
        f"{_STORE}.etcd.claims",
        "for each in serving.tickets\n            ),\n        ]",
        "for each in ()\n            ),\n        ]",
    ),
    Mutant(
        "8 c4",
        "a second process gets the same epoch",
        f"{_STORE}.members",
        "max(last.epoch + 1, card.epoch)",
        "last.epoch",
    ),
    Mutant(
        "7 c5",
        "a worker leaves a silent coordinator without avoiding it",
        f"{_CONTROL}.session",
        "        stream.avoid_server()\n",
        "",
    ),
    Mutant(
        "6 c6",
        "a dead worker is excused again and again",
        f"{_STORE}.members",
        " or worker_id in self._excused:",
        ":",
    ),
    Mutant(
        "4 c7",
        "settle orders are not pushed to their owner",
        "kvlink.coordinator.coordinator",
        "        await send(Push(PushKind.SETTLE, order.slot, order.settle_nonce))",
        "        pass",
    ),
    Mutant(
        "9 c8",
        "prefixes of dead workers are not dropped",
        "kvlink.coordinator.prefix_service",
        "                    if change.what is Joined.DOWN:",
        "                    if False:",
    ),
    Mutant(
        "1 c9",
        "a claim that is sent again gets nothing",
        f"{_STORE}.pending_offers",
        "return ended.tickets if claim.claim_id and claim.claim_id in ended.claim_ids else None",
        "return None",
    ),
    Mutant(
        "5 c11",
        "an agent that refuses counts as alive",
        "kvlink.coordinator.incumbents",
        "            why = str(error)",
        '            why = ""',
    ),
    Mutant(
        "3 c12",
        "refused offers are not sent again",
        f"{_CONTROL}.session",
        "            await self._retry_refused_offers(refused)\n",
        "",
    ),
    Mutant(
        "2 c13",
        "an expired ticket is not marked",
        f"{_STORE}.etcd.mirror",
        "            ticket.expired = True\n",
        "",
    ),
    Mutant(
        "1 c14",
        "one rank of several suffices",
        f"{_STORE}.pending_offers",
        "request is not None and len(request.ranks) == request.num_ranks:",
        "request is not None and request.ranks:",
    ),
    Mutant(
        "12 c15",
        "a claim record is never due",
        f"{_STORE}.etcd.mirror",
        "            self.due.set((name, RECORD), now + request.claimed.ttl_s + LONGEST_WRITE_S)\n",
        "",
    ),
    # Faults that the simulation found when it learned these calls.
    Mutant(
        "2",
        "an offer that has waited is sent with its whole time",
        f"{_CONTROL}.session",
        "min(offer.ttl_s, ends - now())",
        "offer.ttl_s",
    ),
    Mutant(
        "1",
        "a claim that is withdrawn while its record is written keeps the ticket",
        f"{_STORE}.etcd.claims",
        "            await asyncio.wait([writing])",
        "            pass",
    ),
    # Those that the simulation was made for at first.
    Mutant(
        "6",
        "a store that was wiped or restored is not listed again",
        f"{_STORE}.etcd.sync",
        "        etcd.history.on_break = self._start_over\n",
        "",
    ),
    Mutant(
        "12",
        "a coordinator that cannot write its pulse does not compact",
        f"{_STORE}.etcd.sync",
        "        except StoreFull:\n            reply = await",
        "        except ZeroDivisionError:\n            reply = await",
    ),
    Mutant(
        "12",
        "a coordinator in memory keeps claimed tickets after they expire",
        f"{_STORE}.pending_offers",
        "            self._remember_no_more(request_id)\n        for request_id, rank in self._tickets.due",
        "            pass\n        for request_id, rank in self._tickets.due",
    ),
    Mutant(
        "5",
        "a second process gets a worker's id without a check of the first",
        "kvlink.coordinator.incumbents",
        "        if incumbent is None or",
        "        if True or incumbent is None or",
    ),
    Mutant(
        "11",
        "a coordinator without its store keeps claims and watches",
        f"{_STORE}.etcd",
        "        if self._etcd.health.expire():\n            self._refuse_waiting()\n",
        "        self._etcd.health.expire()\n",
    ),
    Mutant(
        "7",
        "a worker leaves a silent coordinator after 4/3 of a lease",
        f"{_CONTROL}.beats",
        "PATIENCE = 2 / 3",
        "PATIENCE = 4 / 3",
    ),
    # One or more of each invariant that had none.
    Mutant(
        "1",
        "the reader of a claim that is sent again is not compared",
        f"{_STORE}.etcd.requests",
        "bool(claim.claim_id) and (claim.reader, claim.claim_id) in known.readers",
        "True",
    ),
    Mutant(
        "1",
        "the first of two readers ends the request",
        f"{_STORE}.pending_offers",
        "if num_readers <= len(request.served) >= request.num_seats:",
        "if True:",
    ),
    Mutant(
        "1",
        "withdrawn claims keep their tickets",
        "kvlink.coordinator.handoff_service",
        "                self._store.release(claim)",
        "                pass",
    ),
    Mutant(
        "4",
        "a worker that joins again loses the orders that wait",
        f"{_STORE}.etcd.settle_orders",
        "            feed.add(key, order)\n        return feed",
        "            pass\n        return feed",
    ),
    Mutant(
        "4",
        "orders that other coordinators wrote are not forwarded",
        f"{_STORE}.etcd",
        '        for_each("etcd watch", lambda order: self._settle_orders.forward(*order), news.orders)\n',
        "",
    ),
    Mutant(
        "5",
        "who has the agent's address of another worker is not asked about",
        "kvlink.coordinator.incumbents",
        "        answer_s = _OWN_ANSWER_S if is_same else self._answer_s\n",
        "        answer_s = _OWN_ANSWER_S if is_same else self._answer_s\n"
        "        if is_same:\n"
        '            return "same"\n',
    ),
    Mutant(
        "6",
        "lost leases are not told to watchers",
        f"{_STORE}.memory",
        '        for_each("store timer", self._forget_lost, changes)\n        self._publish(changes)',
        '        for_each("store timer", self._forget_lost, changes)',
    ),
    Mutant(
        "7",
        "one lost renewal loses the worker",
        f"{_STORE}.etcd.membership",
        "_RENEWAL_PAUSES_S = (0.05, 0.2, 0.0)",
        "_RENEWAL_PAUSES_S = (0.0,)",
    ),
    Mutant(
        "9",
        "a directory that was lost is not filled again",
        f"{_CONTROL}.prefix_publisher",
        "            self._publish_again(changes)\n",
        "",
    ),
    Mutant(
        "9",
        "withdrawn prefixes stay",
        "kvlink.coordinator.prefix_directory",
        "            if copy is not None and copy.is_of({worker_id}):\n                self._drop(copy)",
        "            pass",
    ),
    Mutant(
        "10",
        "any worker may end another's membership",
        f"{_STORE}.members",
        "        if not is_caller(self._cards[worker_id].incarnation):",
        "        if False:",
    ),
    Mutant(
        "10",
        "any worker may act for another on etcd",
        f"{_STORE}.etcd.membership",
        "    if not is_caller(member.card.incarnation):",
        "    if False:",
    ),
    Mutant(
        "12",
        "a refused call keeps its message",
        f"{_CONTROL}.rpc.server",
        "        forget_frames(error)\n",
        "        _KEPT.append(error)\n",
    ),
    Mutant(
        "12",
        "a call polls for its write",
        f"{_STORE}.etcd.sync",
        "        await asyncio.wait([done], timeout=_STALE_S)\n",
        "        while not done.done():\n            await asyncio.sleep(1e-4)\n",
    ),
    Mutant(
        "12",
        "calls that run on a channel that was renewed are cut",
        f"{_CONTROL}.security.reloading_channel",
        "if self._retired and not self._running and",
        "if self._retired and",
    ),
    Mutant(
        "6",
        "a draining worker does not show it after a rejoin",
        f"{_STORE}.etcd.membership",
        "if lease and seen.card == blob and",
        "if lease and",
    ),
)


def patched(mutant: Mutant, source: str) -> str:
    """Raises ValueError if the place is not there once."""
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.module} has the place of {mutant.what!r} {source.count(mutant.old)} times")
    source = source.replace(mutant.old, mutant.new)
    return source + "\n_KEPT: list[object] = []\n" if "_KEPT" in mutant.new else source


def source_of(module: str) -> Path:
    """Returns the file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class _Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from its changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = source_of(mutant.module)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.ModuleSpec(
            name, self, origin=str(self._path), is_package=self._path.name == "__init__.py"
        )
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(self._path.parent))
        return spec

    def exec_module(self, module: ModuleType) -> None:
        source = patched(self._mutant, self._path.read_text())
        exec(compile(source, str(self._path), "exec"), module.__dict__)


def _hunt(number: int, seeds: Sequence[int]) -> None:
    """Prints which seed finds a mutant, by what, and after how many seconds of CPU, in a process of its own."""
    sys.meta_path.insert(0, _Planter(MUTANTS[number]))
    from control_simulation.running import simulate  # after the patch

    began = time.process_time()
    tried = 0
    for seed in seeds:
        tried += 1
        try:
            violations = simulate(seed).violations
        except Exception as error:
            violations = [f"at the end: {error!r}"]
        if violations:
            break
    spent_s = time.process_time() - began
    print(json.dumps([seed if violations else None, tried, spent_s, violations[:1]]))


def main(arguments: Sequence[str]) -> int:
    """Returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if given.one is not None:
        _hunt(given.one, range(given.seeds))
        return 0
    missed = 0
    print("| invariant | change | seed | seeds until then | CPU, s | found by |\n|---|---|---|---|---|---|")
    for number, mutant in enumerate(MUTANTS):
        if given.names and not any(part in f"{mutant.name} {mutant.what}" for part in given.names):
            continue
        command = [sys.executable, "-m", __spec__.name, "--one", str(number), "--seeds", str(given.seeds)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        seed, tried, spent_s, why = json.loads(done.stdout)
        missed += seed is None
        found = "not found" if seed is None else str(seed)
        why_text = _NAMES.sub("", why[0].partition(": ")[2])[:90] if why else "-"
        print(
            f"| {mutant.name} | {mutant.what} | {found} | {tried} | {spent_s:.1f} | {why_text} |", flush=True
        )
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
