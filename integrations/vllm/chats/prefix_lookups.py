# SPDX-License-Identifier: Apache-2.0
"""Finds a peer that has a prompt's prefix, and decides whether to pull it or to compute it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from kvlink.control.values import FoundPrefix
from kvlink.errors import ConfigError
from kvlink.worker.prefix_choice import FailedSources, PrefillMeter, pull_or_compute

from ...request_names import printable
from ..model.prompt_inputs import features_of, has_embeddings
from ..wire.handoff import Handoff, RankInfo
from ..wire.stream_timing import LoadCost
from .peer_prefixes import PeerPrefixes

_log = logging.getLogger("vllm.kvlink")

_LEAST_TOKENS = 64
"""A step that computes fewer tokens says little about the time of a prefill."""
_MARGIN = 1.5


class PrefixLookups:
    """The lookups of requests that are not scheduled yet. Used on the scheduler's thread. `counts` counts by result.

    `cost` returns the predicted cost of loads from a worker's server, None before the first.
    """

    def __init__(
        self, peers: PeerPrefixes, counts: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers = peers
        self._counts = counts
        self._clock = clock
        self._new: set[str] = set()
        self._asked: dict[str, Future[list[FoundPrefix]]] = {}
        self._taken: dict[str, tuple[str, ...]] = {}
        """Maps requests whose prefix is pulled to the workers that published it."""
        self._sources = FailedSources(clock)
        self._step: tuple[float, int] | None = None
        self.meter = PrefillMeter()
        self.cost: Callable[[str], LoadCost | None] = lambda worker_id: None

    def arrived(self, request: Any) -> None:
        """Registers a request that has no ticket of its own."""
        if not has_embeddings(request):
            self._new.add(request.request_id)

    def ask(self, request: Any, num_computed: int, ranks: tuple[RankInfo, ...]) -> None:
        """Asks once for each request, when it is known how much the own cache has."""
        request_id = request.request_id
        if request_id not in self._new or not ranks:
            return
        self._new.discard(request_id)
        own = ranks[0]
        span = shared_span(own.block_tokens[0] * own.kernel_blocks[0])
        most = min(int(request.num_prompt_tokens) - 1, MOST_DIGESTS * span) // span * span
        if most > num_computed:
            digests = prefix_digests(request, most, span)
            last = self._sources.last()
            self._asked[request_id] = self._peers.find(digests, span, num_computed, own, last)

    def is_asking(self, request_id: str) -> bool:
        """Returns whether the answer is not there yet."""
        asked = self._asked.get(request_id)
        return asked is not None and not asked.done()

    def take(self, request: Any, common: Callable[[Any, Handoff], int], num_computed: int) -> Handoff | None:
        """Returns what to pull, or None if the prompt is to be computed. `common` compares prompt and handoff."""
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return None
        error = CancelledError() if asked.cancelled() else asked.exception()
        if error is not None:
            self._counts["directory_failed"] += 1
            name = printable(request.request_id)
            _log.info("request %s: the directory of prefixes does not answer: %s", name, error)
            return None
        if not (found := asked.result()):
            return None
        owners = found[0].worker_ids
        try:
            handoff = Handoff.from_params(json.loads(found[0].tickets[0]))
            if owners and owners[0] != handoff.owners[0].worker_id:
                raise ConfigError("another worker has published the handoff than the one that owns it")
        except (ConfigError, ValueError, LookupError, RecursionError):
            self._counts["malformed"] += 1
            self._sources.blame(owners)
            return None
        num_tokens = common(request, handoff) - num_computed
        if num_tokens <= 0:
            self._counts["nothing_in_common"] += 1
            self._sources.blame(owners)
            return None
        if not self._pays(request, handoff, num_tokens):
            return None
        self._taken[request.request_id] = owners
        return handoff

    def loaded(self, request_id: str, *, well: bool) -> None:
        """Notes how a load of a request ended. A server that did not give what it published is asked last for a while.

        Does nothing for a load of something else.
        """
        owners = self._taken.pop(request_id, ())
        (self._sources.forgive if well else self._sources.blame)(owners)

    def ended(self, request_id: str) -> None:
        """Forgets a request in any state."""
        self._new.discard(request_id)
        self._taken.pop(request_id, None)
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.cancel()

    def step_began(self, num_tokens: int) -> None:
        """Notes that a step computes so many tokens. Another one has ended."""
        self.step_ended()
        if num_tokens >= _LEAST_TOKENS:
            self._step = self._clock(), num_tokens

    def step_ended(self) -> None:
        """Notes how long the last step took."""
        if self._step is not None:
            began, num_tokens = self._step
            self._step = None
            self.meter.note(num_tokens, self._clock() - began)

    def _pays(self, request: Any, handoff: Handoff, num_tokens: int) -> bool:
        cost, rate = self.cost(handoff.owners[0].worker_id), self.meter.rate()
        if cost is None:  # the first pull from a server finds its cost out
            reason, pays = "pulls: the cost of a pull from there is not known yet", rate is not None
        else:
            choice = pull_or_compute(num_tokens, cost.predict_s(num_tokens), rate, margin=_MARGIN)
            reason, pays = choice.reason, choice.pull
        _log.debug("request %s %s", printable(request.request_id), reason)
        self._counts["found" if pays else "computed_is_faster"] += 1
        return pays


_DIGEST_BYTES = 16
_SHARED_TOKENS = 256
MOST_DIGESTS = 1024


def spans_of(num_blocks: int) -> tuple[int, int]:
    """Returns the number of digests for so many blocks, and the blocks from one to the next. Some may be left over."""
    blocks = -(-num_blocks // MOST_DIGESTS)
    return (num_blocks // blocks, blocks) if num_blocks else (0, 0)


def shared_span(block_tokens: int) -> int:
    """Returns the tokens from one digest to the next of prefixes that servers find by a directory.

    It is the same for servers whose blocks have different sizes, if these divide it.
    """
    return _SHARED_TOKENS if _SHARED_TOKENS % block_tokens == 0 else block_tokens


def prefix_digests(request: Any, num_tokens: int, span: int) -> list[bytes]:
    """Returns the digests of the first `span` tokens, of twice as many, and so on up to `num_tokens`.

    They depend on images, other media and the adapter as well, as far as these precede the end, and on the cache salt.
    """
    tokens = memoryview(array("q", request.all_token_ids[:num_tokens]))
    chain = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if salt := getattr(request, "cache_salt", None):
        chain.update(b"salt\0" + str(salt).encode("utf-8", "surrogatepass") + b"\0")
    others = bool(request.mm_features or request.lora_request)
    digests = []
    for end in range(span, num_tokens + 1, span):
        chain.update(tokens[end - span : end])
        for feature in features_of(request, end) if others else ():
            chain.update(b"\0" + feature.encode())
        digests.append(chain.copy().digest())
    return digests
