# SPDX-License-Identifier: Apache-2.0
"""Selects NIC ports and their weights for a place in memory, from a topology that was read before.

Only the nearest ports are used, because adding farther ports makes a transfer slower. An operator may name others
(KVLINK_NICS). Where GPUs and NICs meet only at the CPU, as in a virtual machine that hides its switches, each GPU uses
its share of the ports by PCI order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlink.config.rdma_config import NicNames, parse_nics
from kvlink.errors import ConfigError
from kvlink.hardware.nics.candidates import (
    Candidate,
    best_gid,
    candidates,
    down,
    find_gpu,
    no_gpudirect,
    position,
    unable,
)
from kvlink.hardware.nics.values import MemoryPlace, NicChoice, NicSelection, RefusedNic, port_name
from kvlink.hardware.topology import Distance, Topology, normalize

# First guess of the share of the link's rate that a path achieves: peer-to-peer traffic through a CPU costs about half
# of it on many machines. It matters only if an operator mixes distances, and measured rates should replace it.
_RATE_SHARE = {Distance.PHB: 0.5, Distance.NODE: 0.5, Distance.SYS: 0.25, Distance.DIS: 0.25}
# A port slower than this share of the fastest port belongs to another network (management, storage). A transfer would
# wait for its part.
_SLOWEST_SHARE = 0.5
# Near host memory all networks of a host are alike: the storage ports of a DGX have 200 of 400 Gb/s, and the front end
# of an OCI host has 100 of 200.
_SLOWEST_SHARE_OF_HOST = 0.75
_MOST_PORTS = 32  # kMaxNics of csrc/transports/verbs/protocol.h: peers refuse a longer address


def choose(topology: Topology, place: MemoryPlace, spec: str = "") -> NicSelection:
    """Applies `spec` (the text of KVLINK_NICS), then refuses ports that are down, unreachable, far or slow.

    Raises ConfigError if the machine does not have the GPU, if `spec` names a port that is absent or down, or if `spec`
    excludes every port.
    """
    wish = wished(spec, place)
    usable, refused = _usable(topology, place, wish)
    if not wish.ports or wish.excludes:
        usable = _fast(_nearest(_one_a_wire(usable, refused), refused), place, refused)
        if place.gpu and not place.bounced:
            usable = _paired(topology, place, spec, usable, refused)
        usable = _at_most(usable, refused)
        warning = _warning(place, usable) if place.gpu and not place.bounced else ""
        return NicSelection(_weighted(usable), tuple(refused), warning)
    return NicSelection(_weighted(usable), tuple(refused))


def wished(spec: str, place: MemoryPlace) -> NicNames:
    """Returns the list of KVLINK_NICS that holds for a place. Raises ConfigError if `spec` is malformed."""
    lists = {normalize(gpu) if gpu else "": names for gpu, names in parse_nics(spec).items()}
    return lists.get(normalize(place.gpu) if place.gpu else "", lists.get("", NicNames()))


def _usable(
    topology: Topology, place: MemoryPlace, wish: NicNames
) -> tuple[list[Candidate], list[RefusedNic]]:
    wanted, refused = _apply(wish, candidates(topology, place))
    usable: list[Candidate] = []
    for candidate in wanted:
        refusal = unable(candidate) or (no_gpudirect(candidate) if place.gpu and not place.bounced else None)
        if refusal:
            refused.append(refusal)
        else:
            usable.append(candidate)
    return usable, refused


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


def _one_a_wire(usable: Sequence[Candidate], refused: list[RefusedNic]) -> list[Candidate]:
    best: dict[tuple[str, int], Candidate] = {}
    for candidate in sorted(usable, key=lambda candidate: candidate.wire_rank):
        best.setdefault(candidate.wire, candidate)
    for candidate in usable:
        one = best[candidate.wire]
        if one is not candidate:
            refused.append(candidate.refuse(f"shares its wire with {one.name}", _name_both(one, candidate)))
    return [candidate for candidate in usable if best[candidate.wire] is candidate]


def _at_most(usable: list[Candidate], refused: list[RefusedNic]) -> list[Candidate]:
    reason = f"is beyond the {_MOST_PORTS} ports that a worker may have"
    refused.extend(candidate.refuse(reason) for candidate in usable[_MOST_PORTS:])
    return usable[:_MOST_PORTS]


def _nearest(usable: Sequence[Candidate], refused: list[RefusedNic]) -> list[Candidate]:
    best = min(usable, key=lambda candidate: candidate.sort_key, default=None)
    if best is None:
        return []
    far = [candidate for candidate in usable if candidate.sort_key > best.sort_key]
    for candidate in far:
        reason = f"is {candidate.distance.name}, farther than {best.name} ({best.distance.name})"
        refused.append(candidate.refuse(reason, _name_both(best, candidate)))
    return [candidate for candidate in usable if candidate not in far]


def _fast(usable: Sequence[Candidate], place: MemoryPlace, refused: list[RefusedNic]) -> list[Candidate]:
    fastest = max(usable, key=lambda candidate: candidate.port.rate_gbps, default=None)
    if fastest is None:
        return []
    share = _SLOWEST_SHARE if place.gpu and not place.bounced else _SLOWEST_SHARE_OF_HOST
    least = fastest.port.rate_gbps * share
    slow = [candidate for candidate in usable if candidate.port.rate_gbps < least]
    for candidate in slow:
        rates = f"{candidate.port.rate_gbps:g} Gb/s where {fastest.name} has {fastest.port.rate_gbps:g}"
        refused.append(candidate.refuse(f"is slow: {rates}", _name_both(fastest, candidate)))
    return [candidate for candidate in usable if candidate not in slow]


def _paired(
    topology: Topology, place: MemoryPlace, spec: str, nearest: list[Candidate], refused: list[RefusedNic]
) -> list[Candidate]:
    """Returns this GPU's share of ports that several GPUs reach only through the CPU, alike, by PCI order."""
    if not nearest or nearest[0].distance < Distance.PHB:
        return nearest
    gpu = find_gpu(topology, place.gpu)
    alike = [other for other in topology.gpus if _reaches(topology, other.address, spec, nearest)]
    gpus = sorted((other.address for other in alike), key=position)
    ports = sorted(nearest, key=lambda candidate: candidate.position)
    index, num = gpus.index(gpu.address), len(gpus)
    first = index * len(ports) // num
    own = ports[first : max(first + 1, (index + 1) * len(ports) // num)]
    for other in nearest:
        if other not in own:
            reason = f"is paired with another of the {num} GPUs that reach it through the CPU"
            refused.append(other.refuse(reason, _name_both(own[0], other)))
    return [candidate for candidate in nearest if candidate in own]


def _reaches(topology: Topology, gpu: str, spec: str, ports: Sequence[Candidate]) -> bool:
    """Returns whether these ports are the nearest to another GPU, too."""
    place = MemoryPlace(gpu=gpu)
    wish = wished(spec, place)
    if wish.ports and not wish.excludes:
        return False
    nearest = _fast(_nearest(_one_a_wire(_usable(topology, place, wish)[0], []), []), place, [])
    return [each.name for each in nearest] == [each.name for each in ports]


def _warning(place: MemoryPlace, usable: Sequence[Candidate]) -> str:
    if not usable or usable[0].by_c2c or usable[0].distance < Distance.PHB:
        return ""
    return (
        f"{usable[0].name} is {usable[0].distance.name} from GPU {place.gpu}: bytes pass through the CPU, which costs "
        "about half of the rate on many machines. Compare `kvlink bench pull --path gpudirect,bounce`"
    )


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
        weight=min(known_gbps, default=1.0)
        * (1.0 if candidate.by_c2c else _RATE_SHARE.get(candidate.distance, 1.0)),
    )


def _available(found: Iterable[Candidate]) -> str:
    return "this machine has " + (", ".join(candidate.name for candidate in found) or "no RDMA device")
