# SPDX-License-Identifier: Apache-2.0
"""Computes max–min fair rates of flows, each from one port to another. Pure: no clock.

Rates are max–min fair, and transfers not sequential, because a NIC serves its queue pairs in turn and congestion
control balances the flows that meet at a port: of two reads from one port neither waits for the other's end.

Every port has a level, which is the rate of a flow that nothing else limits. The levels that fill each port exactly (or
are infinite where its flows want less) are the max–min ones, and there is one set of them. A change recomputes only
levels that depend on it, from port to port until nothing moves. In a fleet that is a handful.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Any

_CLOSE = 1e-10  # relative to a level; smaller moves are rounding


class Port:
    """One direction of the rails of one worker.

    `capacity` and `level` are in bytes/s. After a change of the capacity, call `share`.
    """

    __slots__ = ("capacity", "flows", "level", "pending")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.level = inf
        self.flows: dict[Flow, Port] = {}  # with the port at the other end, in order of arrival
        self.pending = False


class Flow:
    """A transfer in progress, on behalf of `of`. `share` sets its `rate` in bytes/s, which is at most `ceiling`."""

    __slots__ = ("ceiling", "of", "rate", "receiver", "sender")

    def __init__(self, sender: Port, receiver: Port, ceiling: float = inf, of: Any = None) -> None:
        self.sender, self.receiver, self.ceiling, self.of = sender, receiver, ceiling, of
        self.rate = 0.0
        sender.flows[self] = receiver
        receiver.flows[self] = sender

    def end(self) -> tuple[Port, Port]:
        """Leaves both ports, and returns them for `share`."""
        del self.sender.flows[self], self.receiver.flows[self]
        self.rate = 0.0
        return self.sender, self.receiver


def level_of(capacity: float, wants: Iterable[float]) -> float:
    """Returns the level with sum(min(level, want)) == capacity, or infinity if all wants fit."""
    ranked = sorted(wants)
    count = len(ranked)
    for want in ranked:
        if want * count >= capacity:
            return capacity / count
        capacity -= want
        count -= 1
    return inf


def share(changed: Iterable[Port]) -> list[Flow]:
    """Makes rates max–min fair again after ports gained or lost flows or capacity. Returns the flows with new rates."""
    queue = deque(dict.fromkeys(changed))
    for port in queue:
        port.pending = True
    touched: dict[Flow, None] = {}
    while queue:
        port = queue.popleft()
        port.pending = False
        before = port.level
        after = level_of(port.capacity, [min(flow.ceiling, end.level) for flow, end in port.flows.items()])
        if after != before and (after == inf or before == inf or abs(after - before) > _CLOSE * before):
            port.level = after
            queue.extend(_reached(port, min(before, after)))
        touched.update(dict.fromkeys(port.flows))
    return [flow for flow in touched if _moved(flow)]


def _reached(port: Port, lower: float) -> list[Port]:
    """Returns the other ends that a change of `port`'s level affects: those above the lower of old and new level."""
    found = [end for end in port.flows.values() if lower < end.level and not end.pending]
    for end in found:
        end.pending = True
    return found


def _moved(flow: Flow) -> bool:
    rate = min(flow.ceiling, flow.sender.level, flow.receiver.level)
    if rate == flow.rate:
        return False
    flow.rate = rate
    return True
