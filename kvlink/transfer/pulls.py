# SPDX-License-Identifier: Apache-2.0
"""Does on the control thread what running pulls ask for: it connects to their owners, and settles through agents.

csrc/engine/pull.h has the states of a pull and decides what is asked.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlink import _core
from kvlink.errors import (
    Cancelled,
    KVLinkError,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    UnknownRequest,
)
from kvlink.runtime.background import ControlThread
from kvlink.runtime.supervised import guarded, start_job
from kvlink.ticket import Ticket
from kvlink.transfer.completion import QueueReader
from kvlink.transfer.device_work import DeviceWork, until_ended
from kvlink.transfer.engine import Engine
from kvlink.transfer.group_ids import copied
from kvlink.transfer.owners import connect_all, connect_one
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import SETTLED, Observer, Pull
from kvlink.transfer.pull_request import (
    STREAM_UNITS,
    PullSpec,
    batch_units,
    check_relay,
    part_of,
    settle_args,
    tokens_per_unit,
)

_log = logging.getLogger("kvlink.worker")
_CONNECT, _SETTLE, _GIVE_UP, _UNUSED = range(4)  # PullAction::Kind of csrc/engine/pull.h
_LEAST_LIVE = 64
_ELSEWHERE = (TransferError, TransportUnavailable, UnknownRequest)
"""The errors of a source after which a relay may read from another one."""

Claim = Callable[[float], Awaitable[Sequence[Ticket]]]
"""Claims the tickets of a request until a deadline by `time.monotonic()`. Raises KVLinkError."""


@dataclass(slots=True, eq=False)
class _Run:
    """Holds what the control thread needs for one pull that has not ended."""

    pull: Pull
    want: PullSpec
    tickets: Sequence[Ticket] | Claim = ()
    complete: bool = True
    """Whether the tickets must be those of all owners that this rank reads from."""
    after: DeviceWork | None = None
    connecting: asyncio.Task[None] | None = None

    async def connect(self, peers: Peers, attempt: int, until: float) -> Callable[[], bool]:
        """Connects to the owners of an attempt, and returns the call that starts reading. Raises KVLinkError."""
        core, known = self.pull._core, self.pull._owners
        wanted = core.wanted()
        if attempt == 0:
            tickets, complete = self.tickets, self.complete
            if callable(tickets):
                tickets, complete = await tickets(until), True
                self.pull._claims = False
            owners = await connect_all(peers, tickets, until, complete=complete)
        else:
            self.pull._note_cuts(wanted)
            owners = await connect_all(peers, [known[part][0] for part in wanted], until)
        if self.after is not None and not await until_ended(self.after, until):
            raise TransferTimeout("the work on the device that the pull comes after has not ended in time")
        parts = [part_of(peer, ticket, self.want) for ticket, peer in owners]
        if attempt == 0:
            known[:] = owners
        for part, owner in zip(wanted, owners, strict=False):
            known[part] = owner
        return lambda: core.connected(attempt, parts)

    def turns_from(self, error: KVLinkError) -> bool:
        """Returns whether another attempt may succeed after an owner could not be connected."""
        return False

    def unused(self, first: int) -> Sequence[Ticket]:
        """Returns the sources from number `first` on."""
        return ()


@dataclass(slots=True, eq=False)
class RelayRun(_Run):
    """The run of a relay: each attempt reads from the next one of its `sources`."""

    engine: Engine = field(kw_only=True)
    sources: Sequence[Ticket] = field(kw_only=True)
    lease: int = field(kw_only=True)
    batch_bytes: int | None = field(kw_only=True)
    failed: list[KVLinkError] = field(default_factory=list)
    """The errors of the sources that were given up for another one."""
    reads: bool = False

    async def connect(self, peers: Peers, attempt: int, until: float) -> Callable[[], bool]:
        """See _Run."""
        if self.reads:
            self.reads = False
            self._give_up(self.pull._why_cut(0))
        ticket, core = self.sources[attempt], self.pull._core
        peer = check_relay(await connect_one(peers, ticket, until), ticket)
        scale = tokens_per_unit(peer, ticket)
        batch = batch_units(self.engine.pool.layout, scale, ticket.num_tokens, self.batch_bytes)
        rest = (min(core.proven_tokens, ticket.num_tokens), ticket.num_tokens)
        part = part_of(peer, ticket, self.want._replace(tokens=rest))
        part = part._replace(stream=STREAM_UNITS[ticket.ready_unit])
        self.pull._owners[:] = [(ticket, peer)]
        self.reads = True
        return lambda: core.connected_relay(attempt, part, batch, scale, self.engine.core, self.lease)

    def turns_from(self, error: KVLinkError) -> bool:
        """See _Run."""
        if not isinstance(error, _ELSEWHERE) or isinstance(error, Cancelled):
            return False
        if len(self.failed) + 1 < len(self.sources):
            self._give_up(error)
        return True

    def unused(self, first: int) -> Sequence[Ticket]:
        """See _Run."""
        return self.sources[first:]

    def _give_up(self, error: KVLinkError) -> None:
        self.failed.append(error.with_traceback(None))  # its frames would keep this object and its worker
        _log.warning(
            "a source of a broadcast failed, reading from another one from_token=%d error=%s",
            self.pull._core.proven_tokens,
            error,
        )


class Pulls:
    """The pulls of one worker. Any thread starts pulls, and the control loop does the rest."""

    def __init__(
        self,
        control: ControlThread,
        engine: Engine,
        peers: Peers,
        settle_by_agent: Callable[..., object],
        release: Callable[[Sequence[Ticket]], object],
        observer: Callable[[bool], Observer] | None,
    ) -> None:
        """Opens the queue of the core's requests. To be called on the control loop, before the first connection."""
        self.failed: Counter[str] = Counter()
        """Attempts to start a pull that failed, by the name of the exception."""
        self.num_restarts = 0
        self._control, self._engine, self._peers = control, engine, peers
        self._settle_by_agent, self._release, self._observer = settle_by_agent, release, observer
        self._plain = engine.flush_gpu_writes is None and observer is None
        """Whether nothing is left to do for a pull that has ended and settled."""
        self._live: dict[int, _Run] = {}
        self._most_live = _LEAST_LIVE
        self._closed = False
        self._act = guarded("pull action", lambda run, action: self._do(run, *action))
        self._settle = guarded("lost settles", lambda token: self._settle_lost(*peers.with_connection(token)))
        self._reader = QueueReader(self._answer)
        engine.core.set_control(self._reader.queue)
        peers.on_lost = self._settle_lost

    def started(
        self, core: _core.Pull, ticket: Ticket, peer: Peer, into: Any, tokens: Any, layers: Any, settle: bool
    ) -> Pull:
        """Returns the handle of a pull that reads from one owner, or has ended already."""
        pull = Pull(core, ticket.request_id, [(ticket, peer)])
        if self._plain and core.state == SETTLED:
            pull._landed = True
            return pull
        self._equip(pull, settle)
        if core.is_open:
            kept = core.kept_blocks()
            self._add(
                _Run(pull, PullSpec(array("I", kept) if kept else copied(into), tokens, layers, settle))
            )
        return pull

    def begin(
        self,
        request_id: str,
        tickets: Sequence[Ticket] | Claim,
        want: PullSpec,
        timeout_s: float,
        *,
        complete: bool,
        after: DeviceWork | None = None,
    ) -> Pull:
        """Claims the tickets if they are not given, connects to their owners, waits for `after`, then reads."""
        pull = self._equip(
            Pull(_core.waiting_pull(self._engine.core, timeout_s), request_id, []), want.settle
        )
        pull._claims = callable(tickets)
        self._add(_Run(pull, want._replace(into=copied(want.into)), tickets, complete, after))
        return pull

    def _equip(self, pull: Pull, settles: bool) -> Pull:
        pull._flush = self._engine.flush_gpu_writes
        if self._observer is not None:
            pull._observer = self._observer(settles)
        return pull

    def begin_relay(
        self, sources: Sequence[Ticket], into: Any, lease: int, batch_bytes: int | None, timeout_s: float
    ) -> RelayRun:
        """Starts a pull from the first of the sources that works, whose blocks are offered on under a lease."""
        core = _core.waiting_pull(self._engine.core, timeout_s, len(sources), lease)
        pull = self._equip(Pull(core, sources[0].request_id, []), True)
        run = RelayRun(
            pull,
            PullSpec(into, None, None, True),
            engine=self._engine,
            sources=sources,
            lease=lease,
            batch_bytes=batch_bytes,
        )
        self._add(run)
        return run

    def close(self) -> None:
        """Ends the pulls that wait for their owners. Those that read end with their connections."""
        self._closed = True
        for run in list(self._live.values()):
            run.pull._core.close()

    def close_queue(self) -> None:
        """Ends what runs on the control loop, which calls this after `close`. Idempotent."""
        self._reader.close()
        for run in list(self._live.values()):
            if run.connecting is not None:
                run.connecting.cancel()

    def _add(self, run: _Run) -> None:
        if len(self._live) >= self._most_live:
            for token, each in list(self._live.items()):
                if not each.pull._core.is_open:
                    self._live.pop(token, None)
            self._most_live = max(_LEAST_LIVE, 2 * len(self._live))
        core = run.pull._core
        self._live[core.token] = run
        core.begin()
        if self._closed:
            core.close()

    def _answer(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            run = self._live.get(token)
            if run is None:
                self._settle(token)
                continue
            for action in run.pull._core.take_actions():
                self._act(run, action)
            if not run.pull._core.is_open:
                self._live.pop(token, None)

    def _do(self, run: _Run, kind: int, number: int, until: float) -> None:
        if kind == _CONNECT:
            self.num_restarts += number > 0 and not isinstance(run, RelayRun)
            run.connecting = start_job("pull start", self._connect(run, number, until))
        elif kind == _SETTLE:
            ticket, peer = run.pull._owners[number]
            self._settle_by_agent(peer.card, *settle_args(ticket, peer.assignment), ticket)
        elif kind == _UNUSED:
            self._release(run.unused(number))
        elif kind == _GIVE_UP and run.connecting is not None:
            self.failed["Cancelled"] += 1
            run.connecting.cancel()

    async def _connect(self, run: _Run, attempt: int, until: float) -> None:
        core = run.pull._core
        try:
            start = await run.connect(self._peers, attempt, until)
            start()
        except Exception as error:
            failed = error if isinstance(error, KVLinkError) else KVLinkError(repr(error))
            self.failed[type(failed).__name__] += 1
            run.pull._error = failed
            core.refused(attempt, str(failed), run.turns_from(failed))
        finally:
            core.refused(attempt, "the attempt was given up", False)  # unless it was answered

    def _settle_lost(self, *peers: Peer) -> None:
        """Settles through its agent what was queued on a connection that broke."""
        for peer in peers:
            for slot, value in peer.connection.take_lost():
                self._settle_by_agent(peer.card, slot, value)
