# SPDX-License-Identifier: Apache-2.0
"""Selects NIC ports and their weights for a place in memory, from a topology that was read before.

Only the nearest ports are used. Adding farther ports makes a transfer slower, so a worse path is used only if an
operator names its NIC (KVLINK_NICS) or if host memory has no better one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlink.errors import ConfigError
from kvlink.hardware.nics.candidates import Candidate, best_gid, candidates, down, no_gpudirect, unable
from kvlink.hardware.nics.values import MemoryPlace, NicChoice, NicSelection, RefusedNic, port_name
from kvlink.hardware.topology import Distance, Topology
from kvlink.nic_options import NicNames, parse_nics

# First guess of the share of the link's rate that a path achieves: peer-to-peer traffic through a CPU costs about half
# of it on many machines. It matters only if an operator mixes distances, and measured rates should replace it.
_RATE_SHARE = {Distance.PHB: 0.5, Distance.SYS: 0.25, Distance.DIS: 0.25}
# A port slower than this share of the fastest port belongs to another network (management, storage). A transfer would
# wait for its part.
_SLOWEST_SHARE = 0.5


def choose(topology: Topology, place: MemoryPlace, spec: str = "") -> NicSelection:
    """Applies `spec` (the text of KVLINK_NICS), then refuses ports that are down, unreachable, far or slow.

    Raises ConfigError if the machine does not have the GPU, if `spec` names a port that is absent or down, or if `spec`
    excludes every port.
    """
    wish = parse_nics(spec)
    named = bool(wish.ports) and not wish.excludes
    wanted, refused = _apply(wish, candidates(topology, place))
    usable: list[Candidate] = []
    for candidate in wanted:
        refusal = unable(candidate) or (no_gpudirect(candidate, named) if place.gpu else None)
        if refusal:
            refused.append(refusal)
        else:
            usable.append(candidate)
    if not named:
        usable = _fast(_nearest(usable, refused), refused)
    return NicSelection(_weighted(usable), tuple(refused))


def weigh(topology: Topology, place: MemoryPlace, ports: Sequence[str]) -> tuple[NicChoice, ...]:
    """Returns the ports with these names, usable or not, without those that do not exist.

    Raises ConfigError if the machine does not have the GPU of `place`.
    """
    found = {candidate.name: candidate for candidate in candidates(topology, place)}
    return _weighted([found[name] for name in ports if name in found])


def _apply(wish: NicNames, found: Sequence[Candidate]) -> tuple[list[Candidate], list[RefusedNic]]:
    """Returns the ports that KVLINK_NICS allows, in its order, and the refusals of the others."""
    if not wish.ports:
        return list(found), []
    listed: list[Candidate] = []
    for device, port in wish.ports:
        matching = [c for c in found if c.device.name == device and port in (None, c.port.number)]
        _require(device, port, matching, found, up=not wish.excludes)
        listed += [candidate for candidate in matching if candidate not in listed]
    wanted = [c for c in found if c not in listed] if wish.excludes else listed
    if not wanted:
        raise ConfigError(f"KVLINK_NICS excludes every NIC: {_available(found)}; leave one of them")
    return wanted, [c.refuse("is excluded by KVLINK_NICS") for c in found if c not in wanted]


def _require(
    device: str, port: int | None, matching: Sequence[Candidate], found: Sequence[Candidate], *, up: bool
) -> None:
    """Raises ConfigError if a name matches no port or, with `up`, if every matching port is down."""
    name = port_name(device, port)
    if not matching:
        raise ConfigError(f"KVLINK_NICS names {name}, which does not exist: {_available(found)}")
    refusals = [refusal for candidate in matching if (refusal := down(candidate))]
    if up and len(refusals) == len(matching):
        raise ConfigError(f"KVLINK_NICS names {name}, but {'; '.join(map(str, refusals))}")


def _nearest(usable: Sequence[Candidate], refused: list[RefusedNic]) -> list[Candidate]:
    best = min(usable, key=lambda candidate: candidate.sort_key, default=None)
    if best is None:
        return []
    far = [candidate for candidate in usable if candidate.sort_key > best.sort_key]
    for candidate in far:
        reason = f"is {candidate.distance.name}, farther than {best.name} ({best.distance.name})"
        refused.append(candidate.refuse(reason, _name_both(best, candidate)))
    return [candidate for candidate in usable if candidate not in far]


def _fast(usable: Sequence[Candidate], refused: list[RefusedNic]) -> list[Candidate]:
    fastest = max(usable, key=lambda candidate: candidate.port.rate_gbps, default=None)
    if fastest is None:
        return []
    least = fastest.port.rate_gbps * _SLOWEST_SHARE
    slow = [candidate for candidate in usable if candidate.port.rate_gbps < least]
    for candidate in slow:
        rates = f"{candidate.port.rate_gbps:g} Gb/s where {fastest.name} has {fastest.port.rate_gbps:g}"
        refused.append(candidate.refuse(f"is slow: {rates}", _name_both(fastest, candidate)))
    return [candidate for candidate in usable if candidate not in slow]


def _name_both(better: Candidate, worse: Candidate) -> str:
    return f"to use both set KVLINK_NICS={better.name},{worse.name}"


def _weighted(usable: Sequence[Candidate]) -> tuple[NicChoice, ...]:
    """Returns the choices with weights that account for ports of the same card sharing one slot."""
    sharers = Counter(_card(candidate) for candidate in usable)
    return tuple(_choice(candidate, sharers[_card(candidate)]) for candidate in usable)


def _card(candidate: Candidate) -> str:
    return candidate.device.pci.card if candidate.device.pci else candidate.name


def _choice(candidate: Candidate, num_sharers: int) -> NicChoice:
    device, port = candidate.device, candidate.port
    gid = best_gid(device, port)
    slot_gbps = device.pci.link_gbps / num_sharers if device.pci else 0.0
    known_gbps = [rate for rate in (port.rate_gbps, slot_gbps) if rate]
    return NicChoice(
        device=device.name,
        port=port.number,
        gid_index=gid.index if gid else 0,
        gid=gid.value if gid else "",
        link_layer=port.link_layer,
        rate_gbps=port.rate_gbps,
        distance=candidate.distance,
        weight=min(known_gbps, default=1.0) * _RATE_SHARE.get(candidate.distance, 1.0),
    )


def _available(found: Iterable[Candidate]) -> str:
    return "this machine has " + (", ".join(candidate.name for candidate in found) or "no RDMA device")
