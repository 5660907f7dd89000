# SPDX-License-Identifier: Apache-2.0
"""Decides which decode ranks' wants a prefill rank accepts, and when: it holds no socket and never waits.

A want may come before prefill's request, since the router sends both at the same time, and may be about another attempt
at its room than the one that runs here. So it is admitted, held for a bounded time, or refused with the reason.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .messages import Want, problem_of_room

Address = tuple[str, int]

RETRY_S = 5.0
"""How long a want waits for another attempt at a room whose attempt here has failed."""
_MAX_HELD = 8192
_MAX_ENDED = 4096


class Refusal(NamedTuple):
    """A want that is refused, and why."""

    want: Want
    reason: str


@dataclass(slots=True)
class _Room:
    """A room with a request here. `wants` is the very mapping that SGLang's common classes read."""

    wants: dict[Address, Want]
    is_complete: bool = False
    given_up_at: float | None = None
    """When to end a request that decode gave up before it began here, unless decode asks again by then."""


@dataclass(slots=True)
class _Held:
    deadline: float
    wants: dict[Address, Want] = field(default_factory=dict)


class Wants:
    """The wants of one prefill rank. The caller serializes the calls.

    misfit: returns why a want can never be served by this rank, or "".
    patience_s: how long a want waits for a request of its room.
    """

    def __init__(
        self, misfit: Callable[[Want], str], patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._misfit, self._patience_s, self._clock = misfit, patience_s, clock
        self._rooms: dict[int, _Room] = {}
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._num_held = 0
        self._failed: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """Rooms whose last attempt has failed lately: until when that is remembered, and why it failed."""
        self._given_up: OrderedDict[int, float] = OrderedDict()
        """Rooms without a request that a decode rank gave up lately, with the end of that."""
        self._spent: OrderedDict[int, str] = OrderedDict()
        """Generations of attempts that have ended, with their reasons."""

    def open(self, room: int, wants: dict[Address, Want]) -> list[Want]:
        """Begins an attempt, and forgets that an earlier one failed. Returns the wants held for it, to be admitted."""
        self._rooms[room] = _Room(wants)
        self._failed.pop(room, None)
        held, given_up_until = self._take(room), self._given_up.pop(room, 0.0)
        if not held and self._clock() < given_up_until:
            self._rooms[room].given_up_at = self._clock() + RETRY_S
        return held

    def is_given_up(self, room: int) -> bool:
        """Returns whether decode gave up a request before it began here, and did not ask again."""
        state = self._rooms.get(room)
        if state is None or state.given_up_at is None or state.wants:
            return False
        return self._clock() >= state.given_up_at

    def end(self, room: int, reason: str, failed: bool) -> None:
        """Ends an attempt, of which later messages are refused for this reason. Idempotent."""
        ended = self._rooms.pop(room, None)
        if ended is None:
            return
        for want in ended.wants.values():
            self._spend(want, reason)
        if failed:
            self._failed[room] = (self._clock() + RETRY_S, reason)
            self._failed.move_to_end(room)
            _shrink(self._failed)

    def arrived(self, want: Want) -> str:
        """Admits or holds a want. Returns why it is refused, or ""."""
        if reason := self._misfit(want) or self._spent.get(want.generation, ""):
            return reason
        room = self._rooms.get(want.room)
        return self._hold(want) if room is None else _admit(room, want)

    def is_complete(self, room: int) -> bool:
        """Returns whether all decode ranks have asked for a room with a request."""
        return room in self._rooms and self._rooms[room].is_complete

    def aborted(self, room: int, generation: int | None, address: Address | None) -> bool:
        """Notes that a decode rank has given up an attempt. Returns whether that is the one that runs here.

        generation: that of its want, None if it gave up before it sent one.
        """
        running = self._rooms.get(room)
        if running is not None and generation is None:
            return True
        wants = running.wants if running is not None else self._wants_held(room)
        if running is None and problem_of_room(room) == "":
            self._given_up[room] = self._clock() + self._patience_s
            _shrink(self._given_up)
        for want in list(wants.values()):
            if want.generation == generation or (generation is None and want.address == address):
                if running is None:
                    self._drop_held(want)
                self._spend(want, "decode aborted the request")
                return running is not None
        return False

    def overdue(self) -> Iterator[Refusal]:
        """Yields and forgets the wants that nothing came for in time."""
        now = self._clock()
        for room in [room for room, held in self._held.items() if held.deadline <= now]:
            _, reason = self._failed.get(room, (0.0, ""))
            why = (
                f"bootstrap_room {room} has failed on prefill ({reason}), and no other attempt followed"
                if reason
                else f"no request with bootstrap_room {room} came to this prefill server within {self._patience_s:g} s"
            )
            for want in self._take(room):
                self._spend(want, why)
                yield Refusal(want, why)
        while self._failed and next(iter(self._failed.values()))[0] <= now - self._patience_s:
            self._failed.popitem(last=False)

    def sizes(self) -> tuple[int, int]:
        """Returns how many rooms have a request, and how many wants are held for others."""
        return len(self._rooms), self._num_held

    def _hold(self, want: Want) -> str:
        if self._num_held >= _MAX_HELD:
            return f"this prefill server holds {_MAX_HELD} asks for rooms without a request; ask again later"
        _, reason = self._failed.get(want.room, (0.0, ""))
        patience_s = RETRY_S if reason else self._patience_s
        held = self._held.setdefault(want.room, _Held(self._clock() + patience_s))
        if reason_against := _clash(held.wants, want):
            return reason_against
        if want.address not in held.wants:
            self._num_held += 1
        held.wants[want.address] = want
        return ""

    def _take(self, room: int) -> list[Want]:
        held = self._held.pop(room, None)
        if held is None:
            return []
        self._num_held -= len(held.wants)
        return list(held.wants.values())

    def _wants_held(self, room: int) -> dict[Address, Want]:
        held = self._held.get(room)
        return {} if held is None else held.wants

    def _drop_held(self, want: Want) -> None:
        wants = self._held[want.room].wants
        if wants.pop(want.address, None) is not None:
            self._num_held -= 1
        if not wants:
            del self._held[want.room]

    def _spend(self, want: Want, reason: str) -> None:
        self._spent[want.generation] = reason or "this attempt has ended"
        _shrink(self._spent)


def _admit(room: _Room, want: Want) -> str:
    """Adds a want to a room with a request. Returns why that is impossible, or "". Idempotent."""
    earlier = room.wants.get(want.address)
    if earlier == want:
        return ""
    if reason := _clash(room.wants, want):
        return reason
    if room.is_complete:
        return (
            f"bootstrap_room {want.room} is being handed off to "
            + ("an earlier attempt of this decode server" if earlier else "other decode ranks")
            + "; let the router choose another room for each request, and for each attempt at one"
        )
    room.wants[want.address] = want
    room.is_complete = len(room.wants) >= want.required_dst_info_num
    return ""


def _clash(wants: dict[Address, Want], want: Want) -> str:
    """Returns why a want cannot join those of its room, or ""."""
    for other in wants.values():
        if other.address == want.address:
            continue
        if other.tp_rank == want.tp_rank:
            return (
                f"bootstrap_room {want.room} is already handed off to the decode server at {other.endpoint}:"
                f"{other.dst_port} ; let the router choose another room for each request"
            )
        ours, theirs = _of_server(other), _of_server(want)
        if ours != theirs:
            return (
                f"the decode ranks of bootstrap_room {want.room} disagree: tp_size, total_heads, ranks, cached tokens "
                f"{ours} and {theirs}"
            )
    return ""


def _of_server(want: Want) -> tuple[int, int, int, int]:
    return want.tp_size, want.total_heads, want.required_dst_info_num, want.prefix_tokens


def _shrink(table: OrderedDict[int, Any]) -> None:
    while len(table) > _MAX_ENDED:
        table.popitem(last=False)
