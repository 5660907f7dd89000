# SPDX-License-Identifier: Apache-2.0
"""Which ports of two workers carry lanes to each other. Both ends compute it and get the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvlink.nics.values import NicOffer, Rail
from kvlink.topology import LinkLayer


def pair(local: Sequence[NicOffer], remote: Sequence[NicOffer]) -> tuple[Rail, ...]:
    """Joins the i-th with the i-th of the same link layer; the shorter side's ports serve several in turn.

    Every port whose layer the other side has is in some rail. A port's weight is divided among its rails, and
    a rail has the lesser of its two parts, so no port is given more than its weight. Swapping the arguments
    swaps `local` and `remote` and changes nothing else. Empty: no port of one side can reach the other.
    """
    joined = [ends for layer in LinkLayer for ends in _join(_of(local, layer), _of(remote, layer))]
    num_local = Counter(here for here, _ in joined)
    num_remote = Counter(there for _, there in joined)
    return tuple(
        Rail(here, there, min(local[here].weight / num_local[here], remote[there].weight / num_remote[there]))
        for here, there in joined
    )


def _of(offers: Sequence[NicOffer], layer: LinkLayer) -> list[int]:
    return [index for index, offer in enumerate(offers) if offer.link_layer is layer and offer.weight > 0]


def _join(local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int]]:
    if not local or not remote:
        return []
    return [(local[i % len(local)], remote[i % len(remote)]) for i in range(max(len(local), len(remote)))]
