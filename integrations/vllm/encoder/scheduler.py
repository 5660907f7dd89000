# SPDX-License-Identifier: Apache-2.0
"""Implements the scheduler's side: which items a step saves and loads, and which requests wait for one.

An exception that left one of these methods would end the engine, so each is kept inside its request. That one is
encoded here, it fails if it came without what the encoder needs, or its answer carries no ticket. `allocated` alone may
raise, because a step that has promised an item to the model cannot go on without it.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvlink import Worker, WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.ticket import Ticket

from ...request_guard import RequestGuard
from ...request_names import printable
from .cache import EncoderCache, Entry
from .commands import Copy, EncoderStep
from .items import KEY, Item, ItemFormat
from .memory import EncoderMemory, MemoryShape
from .pulls import Arrival, EncoderPulls


class OffersSoftly(Protocol):
    """The part of a Worker that offers need."""

    def offer_soft(self, request_id: str, block_ids: array[int], /) -> Ticket:
        """Offers blocks without pinning them."""
        ...


class EncoderOffers:
    """Decides what the next step saves, and creates tickets. Not thread-safe."""

    def __init__(self, cache: EncoderCache, worker: OffersSoftly, counts: Counter[str]) -> None:
        self._cache = cache
        self._worker = worker
        self._counts = counts
        self._saves: dict[str, Entry] = {}

    def save(self, item: Item) -> None:
        """Lets the step that is being scheduled save an item that it encodes, or has in vLLM's own cache."""
        if not item.rows:
            return
        entry = self._cache.get(item.identifier)
        if entry is not None and (entry.ready or entry.pull is not None or entry.item != item):
            return
        if entry is None:
            entry = self._cache.add(item) if self._cache.fits(item) else None
        if entry is None:
            self._counts["no_room"] += 1
            return
        self._cache.writes(entry)
        self._saves[item.identifier] = entry

    def take_saves(self) -> list[Copy]:
        """Returns what the step that is sent now saves."""
        saves = [Copy.of(entry) for entry in self._saves.values()]
        self._saves.clear()
        return saves

    def collect(self) -> None:
        """Drops items that their step has not written: it did not compute them, or not in the expected shape."""
        for entry in self._cache.take_unwritten():
            self._counts["unsaved"] += 1
            _log.debug("encoder output not saved item=%s", entry.item.identifier)

    def ticket(self, item: Item) -> Ticket | None:
        """Returns a ticket of an item that is saved, and None for another."""
        entry = self._cache.get(item.identifier)
        if entry is None or not entry.ready or entry.item != item:
            return None
        if entry.ticket is None:
            try:
                entry.ticket = self._worker.offer_soft(item.ticket_name, entry.blocks)
            except KVLinkError as error:
                _log.warning("encoder output not offered item=%s error=%s", item.identifier, error)
                return None
            self._counts["offered"] += 1
        return entry.ticket


_log = logging.getLogger("vllm.kvlink")

OFFER = "kvlink_offer"
"""A key of `ec_transfer_params`, which asks a server for tickets. One that only encodes always answers with them."""


class EncoderScheduler:
    """One server's pool of encoder outputs, with its kvlink worker. Not thread-safe.

    width_of: returns the width of the outputs of a modality, for servers that encode.
    has_input: returns whether a feature of a request has what the encoder needs.
    """

    def __init__(
        self,
        worker_id: str,
        shape: MemoryShape,
        ours: ItemFormat,
        config: WorkerConfig,
        *,
        produces: bool,
        consumes: bool,
        width_of: Callable[[str], int],
        has_input: Callable[[Any], bool],
    ) -> None:
        self._ours, self._produces, self._consumes = ours, produces, consumes
        self._width_of, self._has_input = width_of, has_input
        memory, self._fd = EncoderMemory.create(shape)
        self._memory, self._is_outdated = memory, False
        self._path, self._shape = f"/proc/{os.getpid()}/fd/{self._fd}", shape
        try:
            self._worker = Worker(
                memory.pool(ours.model or f"encoder outputs {ours.name}"), worker_id, config=config
            )
        except BaseException:
            os.close(self._fd)
            raise
        self._counts: Counter[str] = Counter()
        self.guard = RequestGuard(_log)
        self._cache = EncoderCache(memory, self._worker)
        self._offers = EncoderOffers(self._cache, self._worker, self._counts)
        self._pulls = EncoderPulls(
            self._cache, self._worker, ours, config.timeout_s, self._counts, self.guard
        )
        self._loads: dict[str, Copy] = {}
        self._rows: dict[str, int] = {}  # of the request that is being scheduled
        self._asked: dict[str, tuple[Sequence[Any], int]] = {}  # features and computed tokens, by request
        self._unavailable: set[str] = set()
        _log.info("kvlink worker %s at %s holds encoder outputs", worker_id, self._worker.card.agent)

    def available(self, request: Any, num_computed: int) -> bool:
        """Returns whether the request can be scheduled. If not, an item is on its way, or the request is to fail."""
        try:
            return self._available(request, num_computed)
        except Exception as error:
            self.guard.caught("pull", request.request_id, error)
        with self.guard.around("pull", request.request_id):
            if all(
                self._has_input(feature) for feature in request.mm_features if _end(feature) > num_computed
            ):
                return True  # they are encoded here
        self._unavailable.add(request.request_id)
        return False

    def _available(self, request: Any, num_computed: int) -> bool:
        self._follow_weights()
        self._rows = {each.identifier: rows_of(each) for each in request.mm_features}
        self._asked[request.request_id] = request.mm_features, num_computed
        if not self._consumes:
            return True
        waiting = False
        for feature in request.mm_features:
            described = _described(request, feature)
            if KEY not in described or _end(feature) <= num_computed:
                continue
            arrival = Arrival.FAILED
            if not self._is_outdated:
                arrival = self._pulls.ask(
                    request.request_id, feature.identifier, rows_of(feature), described[KEY]
                )
            if arrival is Arrival.FAILED and not self._has_input(feature):
                self._unavailable.add(request.request_id)
                _log.error(
                    "request %s fails: its item %s cannot be pulled, and it came without what the encoder needs; send "
                    "it again through the encoder server, or with the image",
                    printable(request.request_id),
                    feature.identifier,
                )
                return False
            waiting |= arrival is Arrival.WAITING
        return not waiting

    def has(self, identifier: str) -> bool:
        """Returns whether the step can load an item, for the request that `available` was last called with."""
        with self.guard.around("lookup"):
            entry = self._cache.get(identifier) if self._consumes and not self._is_outdated else None
            return entry is not None and entry.ready and entry.item.rows == self._rows.get(identifier)
        return False

    def allocated(self, request: Any, index: int) -> None:
        """Lets the step load an item that the pool has. vLLM runs the encoder for others. May raise."""
        feature = request.mm_features[index]
        entry = None if self._is_outdated else self._cache.get(feature.identifier)
        if self._consumes and entry is not None and entry.ready and entry.item.rows == rows_of(feature):
            self._pulls.loads(request.request_id, entry)
            self._loads[feature.identifier] = Copy.of(entry)
        elif self._consumes and KEY in _described(request, feature):
            self._counts["encoded_here"] += 1

    def take_step(self, num_scheduled: Mapping[str, int]) -> EncoderStep:
        """Returns what the workers do in the step, which computes `num_scheduled` tokens of each request."""
        with self.guard.around("save"):
            self._offers.collect()
        self._pulls.collect()
        asked, self._asked = self._asked, {}
        produces = self._produces and not self._is_outdated
        for request_id, num_tokens in num_scheduled.items() if produces else ():
            with self.guard.around("save", request_id):
                for feature in _within(*asked.get(request_id, ((), 0)), num_tokens):
                    self._offers.save(self._item(feature))
        loads, self._loads = list(self._loads.values()), {}
        saves = {copy.identifier: copy for copy in self._offers.take_saves()}
        return EncoderStep(self._cache.sent(), self._path, self._shape, loads, saves)

    def _follow_weights(self) -> None:
        """Stops sharing if a rank has other weights. Not between `has` and `allocated` of an item."""
        if not self._is_outdated and self._memory.changes.any():
            self._is_outdated = True
            _log.warning(
                "the weights were changed: no encoder outputs are shared until this server is restarted"
            )

    def ended(self, request: Any) -> dict[str, dict[str, Any]]:
        """Forgets a request, and returns what its answer carries, by identifier."""
        with self.guard.around("end", request.request_id):
            self._pulls.forget(request.request_id)
        self._unavailable.discard(request.request_id)
        with self.guard.around("offer", request.request_id):
            return self._offered(request)
        return {}

    def _offered(self, request: Any) -> dict[str, dict[str, Any]]:
        params = request.ec_transfer_params
        asks = isinstance(params, dict) and params.get(OFFER)
        if self._is_outdated or not self._produces or (self._consumes and not asks):
            return {}
        offered: dict[str, dict[str, Any]] = {}
        for feature in request.mm_features:
            item = self._item(feature)
            if (ticket := self._offers.ticket(item)) is not None:
                offered[feature.identifier] = item.to_params(ticket)
        return offered

    def take_unavailable(self) -> set[str]:
        """Returns requests that must fail, each once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def take_counts(self) -> dict[str, int]:
        """Returns and resets the counts, by result."""
        self._counts["unexpected"] += sum(self.guard.take_counts().values())
        counts = {result: count for result, count in self._counts.items() if count}
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Ends pulls and offers. On return nothing accesses the pool. Idempotent."""
        self._worker.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _item(self, feature: Any) -> Item:
        return Item(feature.identifier, rows_of(feature), self._width_of(feature.modality), self._ours)


def rows_of(feature: Any) -> int:
    """Returns the number of embeddings of a feature."""
    return int(feature.mm_position.get_num_embeds())


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _within(features: Sequence[Any], num_computed: int, num_tokens: int) -> list[Any]:
    """Returns the features of which the step computes some of the placeholders."""
    end = num_computed + num_tokens
    return [each for each in features if each.mm_position.offset < end and _end(each) > num_computed]


def _described(request: Any, feature: Any) -> Mapping[str, Any]:
    """Returns what the request's untrusted `ec_transfer_params` say of a feature."""
    params = request.ec_transfer_params
    described = params.get(feature.identifier) if isinstance(params, dict) else None
    return described if isinstance(described, dict) else {}
