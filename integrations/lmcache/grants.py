# SPDX-License-Identifier: Apache-2.0
"""Implements the owner's side: it leases the objects that a reader asks for, and ends the lease when one is freed.

A lease is of an object, not of a place: LMCache must still hold the object under the key that the ask names, at this
place, under a read lock. From before that is looked up until the lease ends, `Places` keeps the pages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from kvlink import LeaseEnd, Worker
from kvlink.errors import ConfigError, KVLinkError, LayoutMismatch, UnknownRequest
from kvlink.ticket import MAX_BLOCKS, Ticket

from ..models import named_model
from ..request_guard import RequestGuard
from ..request_names import name_of
from .messages import Answer, Ask, refusal
from .pages import PageIds, Pages, Wanted
from .places import Hold, Places

_log = logging.getLogger("kvlink.lmcache")


class Objects(Protocol):
    """The objects that LMCache holds in this memory."""

    def lookup(self) -> Callable[[Wanted], str]:
        """Returns a function for one ask, which returns why a reader may not read an object now, or ""."""


class Grants:
    """Answers the readers of one server. Only one thread uses it.

    objects: without it, all of the memory may be read and nothing in it is ever freed, as in LMCache's benchmark.
    """

    def __init__(self, worker: Worker, pages: Pages, places: Places, objects: Objects | None = None) -> None:
        self._worker = worker
        self._pages = pages
        self._places = places
        self._objects = objects
        self._numbers = itertools.count(1)
        self._held: dict[str, Hold] = {}
        self.guard = RequestGuard(_log)
        """Counts refused asks and unexpected exceptions."""

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a reader's message, which may be malformed. Raises nothing."""
        try:
            self.collect()
            return self._answer(Ask.from_bytes(message))
        except KVLinkError as error:
            return self.refuse(error)
        except Exception as error:
            self.guard.caught("answer to a reader", "", error)
            return refusal(KVLinkError("the owner failed; its log says why"))

    def refuse(self, error: KVLinkError) -> bytes:
        """Counts and logs a refused ask, and returns the answer."""
        self._note(f"refused {type(error).__name__}", f"refused a reader: {error}")
        return refusal(error)

    def _note(self, kind: str, text: str) -> None:
        """Counts what a reader caused. Only the first of each kind is a warning, as readers may cause any number."""
        self.guard.counts[kind] += 1
        level = logging.WARNING if self.guard.counts[kind] == 1 else logging.DEBUG
        _log.log(level, "%s (number %d of its kind)", text, self.guard.counts[kind])

    def collect(self) -> None:
        """Forgets leases that have ended. To be called now and then."""
        for event in self._worker.events():
            if (hold := self._held.pop(event.request_id, None)) is not None:
                self._places.release(hold)
            if event.how is not LeaseEnd.SETTLED:
                how = event.how.value
                self._note(
                    f"lease {how}", f"read {event.request_id}: the lease {how} after {event.held_s:.1f} s"
                )

    def _answer(self, ask: Ask) -> bytes:
        if ask.page_bytes != self._pages.page_bytes:
            raise LayoutMismatch(
                f"pages have {ask.page_bytes} bytes at {ask.reader!a:.200} and {self._pages.page_bytes} here; start "
                "LMCache's servers with the same --l1-align-bytes"
            )
        if not ask.objects:
            return b""
        within = {
            index: wanted
            for index, wanted in enumerate(ask.objects)
            if not self._pages.problem(wanted.offset, wanted.size)
        }
        if sum(self._pages.count(wanted.size) for wanted in within.values()) > MAX_BLOCKS:
            raise ConfigError(f"one ask has more than {MAX_BLOCKS} pages")
        pinned = self._places.hold(self._ids(within.values()))
        try:
            find = self._objects.lookup() if self._objects is not None else lambda _: ""
            granted = {
                index: wanted for index, wanted in within.items() if not self._problem(wanted, find, ask)
            }
            ticket = self._ticket(ask.reader, self._ids(granted.values()), pinned) if granted else None
        finally:
            self._places.release(pinned)
        return Answer(frozenset(range(len(ask.objects))) - granted.keys(), ticket).to_bytes()

    def _ids(self, objects: Iterable[Wanted]) -> PageIds:
        return self._pages.ids(wanted[:2] for wanted in objects)

    def _problem(self, wanted: Wanted, find: Callable[[Wanted], str], ask: Ask) -> str:
        """Returns why an object is not leased. An exception concerns this object alone."""
        if wanted.name is None and self._places.was_freed(self._ids([wanted])):
            return "the place has held several objects, and the ask names none"
        try:
            return find(wanted) or self._another_model(wanted, ask)
        except Exception as error:
            self.guard.caught("lookup of an object", "", error)
            return "the lookup failed"

    def _another_model(self, wanted: Wanted, ask: Ask) -> str:
        """Returns why an object that is held here is one of another model than the reader's, or ""."""
        if wanted.name is None:
            return ""
        name = wanted.name[1]
        ours, theirs = named_model(name), ask.models.get(name, "absent")
        if ours == theirs:
            return ""
        why = f"{ask.reader!a:.200} has another model {name!a:.200}: model-id is {ours} here, and {theirs!a:.20} there"
        self._note("another model", f"refused objects: {why}")
        return why

    def _ticket(self, reader: str, ids: PageIds, pinned: Hold) -> Ticket:
        """Raises Cancelled if a page was freed while the objects were looked up."""
        name = name_of(f"{reader}/{next(self._numbers)}")
        hold = self._places.hold(ids)
        try:
            pinned.begin(lambda: None, lambda _: None)  # from here on, `hold` is told of what is freed
            ticket = hold.begin(lambda: self._worker.offer(name, ids), lambda _: self._end(name))
        except BaseException:
            self._places.release(hold)
            raise
        self._held[name] = hold
        return ticket

    def _end(self, name: str) -> None:
        with suppress(UnknownRequest):  # it has ended
            self._worker.abort(name)
