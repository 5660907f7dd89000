# SPDX-License-Identifier: Apache-2.0
"""Keeps what decode knows of transfers from each prefill server, and counts and explains when pulls began."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from ..request_names import printable
from .wire.handoff_parts import Part
from .wire.stream_timing import LoadCost, Start, start

_log = logging.getLogger("vllm.kvlink")

_MAX_SERVERS = 1024
_BEGINS = {
    Start.WAIT: "waits for the next chunk, because all of it comes in time then",
    Start.PAYS: "is pulled from now on, because the transfer is not over in time otherwise",
    Start.UNKNOWN: "is pulled from now on, because the times are not known yet",
    Start.LAST_CHUNK: "is pulled from now on, while its last chunk is computed",
    Start.ALWAYS: "is pulled from now on, because streaming is set to always",
}


class StreamDecisions:
    """Decides for each request of decode when its pull begins. `always` begins with the first chunk."""

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._costs: dict[str, LoadCost] = {}
        self._counts: Counter[str] = Counter()

    def learn(self, costs: Mapping[str, LoadCost]) -> None:
        """Takes the costs that the ranks report, by the worker of the prefill server's first rank."""
        for worker_id, cost in costs.items():
            self._costs.pop(worker_id, None)
            self._costs[worker_id] = cost
        while len(self._costs) > _MAX_SERVERS:
            del self._costs[next(iter(self._costs))]

    def cost_of(self, worker_id: str) -> LoadCost | None:
        """Returns the cost of loads from this worker's server, if it is known."""
        return self._costs.get(worker_id)

    def begins(self, request_id: str, part: Part) -> bool:
        """Returns whether the pull begins now that this part was announced."""
        cost = self._costs.get(part.handoff.owners[0].worker_id)
        why = start(part.num_tokens, part.remaining, cost, last=part.last)
        if self._always and not part.last:
            why = Start.ALWAYS
        _log.debug("request %s %s (%s)", printable(request_id), _BEGINS[why], _times(part, cost))
        if why is Start.WAIT:
            return False
        self.count(why.value)
        return True

    def count(self, decision: str) -> None:
        """Counts one request."""
        self._counts[decision] += 1

    def take(self) -> dict[str, int]:
        """Returns the counts of requests that could stream since the last call, by what was decided."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts


def _times(part: Part, cost: LoadCost | None) -> str:
    transfer = f"{cost.predict_s(part.num_tokens):.3f} s" if cost else "an unknown time"
    prefill = f"{part.remaining.prompt_s:.3f} s" if part.remaining else "an unknown time"
    return (
        f"its {part.num_tokens} tokens are predicted to take {transfer} of transfer and {prefill} more of prefill, "
        f"and {part.handoff.num_tokens} tokens have blocks"
    )
