# SPDX-License-Identifier: Apache-2.0
"""Defines the options of RDMA connections, and checks those that are more than a number or must fit each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_network

from kvlink.config.setting import setting
from kvlink.errors import ConfigError

_MOST_INDEX = 255  # a queue pair names its GID in 8 bits
_UNIT_S = 4.096e-6


@dataclass(frozen=True, slots=True)
class RdmaConfig:
    """The options of RDMA connections of one worker, a part of WorkerConfig."""

    rdma_connect: str = setting(
        "KVLINK_RDMA_CONNECT",
        "",
        "Sets how verbs connects: `direct` exchanges addresses over the control plane, and `cm` uses rdma_cm. An "
        "empty value uses `cm` for iWARP and `direct` for all other NICs.",
        "Set it to the same value at both ends.",
        choices=("", "direct", "cm"),
    )
    rdma_traffic_class: int = setting(
        "KVLINK_RDMA_TRAFFIC_CLASS",
        0,
        "Sets the traffic class of the packets that verbs sends. With RoCE v2 it is the traffic class byte of the IP "
        "header, which is DSCP times 4.",
        "Set it at both ends to the class that the switches protect by PFC or ECN.",
        least=0,
        most=255,
    )
    rdma_gid: str = setting(
        "KVLINK_RDMA_GID",
        "",
        "Selects the GID of each port that verbs uses: an index such as `3`, an address such as `10.1.0.7`, or a "
        "subnet such as `10.1.0.0/16`. An empty value uses the first IPv4 address, or the best GID without one.",
        "Set a subnet where an interface has several addresses, as with VLANs; it fits all ports of a fleet.",
    )
    rdma_pkey: str = setting(
        "KVLINK_RDMA_PKEY",
        "",
        "Sets the InfiniBand partition of the connections of verbs by its key, such as `0x8001`. An empty value uses "
        "the first key of the port.",
        "Set it where the subnet manager gives this traffic a partition of its own.",
    )
    rdma_service_level: int = setting(
        "KVLINK_RDMA_SERVICE_LEVEL",
        0,
        "Sets the service level of the packets that verbs sends, which InfiniBand maps to virtual lanes.",
        "Set it at both ends to the level that the subnet manager gives this traffic.",
        least=0,
        most=15,
    )
    rdma_timeout: int = setting(
        "KVLINK_RDMA_TIMEOUT",
        14,
        "Sets the exponent T of the time after which a NIC counts a packet as lost: 4.096 µs × 2^T, so 14 is 67 ms and "
        "17 is 537 ms.",
        "A lost packet costs this time. Raise it with KVLINK_RDMA_SILENCE_S to survive links that go down for seconds.",
        least=8,
        most=20,
    )
    rdma_retries: int = setting(
        "KVLINK_RDMA_RETRIES",
        6,
        "Sets how often a NIC resends a lost packet before it ends the connection.",
        "soft-RoCE resends for ever at 7.",
        least=1,
        most=7,
    )
    rdma_silence_s: float = setting(
        "KVLINK_RDMA_SILENCE_S",
        0.6,
        "Sets the seconds after which a reader gives up a NIC that does not answer. With more than 0.6, a port of this "
        "host that goes down does not end its connections at once either.",
        "It must be at least the time of all resends, 4.096 µs × 2^KVLINK_RDMA_TIMEOUT × (KVLINK_RDMA_RETRIES + 1). "
        "Pulls take that much longer to use another NIC or tcp.",
        unit="s",
        least=0.2,
        most=30,
    )
    rdma_qps: int = setting(
        "KVLINK_RDMA_QPS",
        4,
        "Sets the number of queue pairs that verbs opens for each pair of NIC ports.",
        "Raise it if blocks are small and the network is slow to answer. KVLINK_LANES overrides it.",
        least=1,
        most=16,
    )
    rdma_read_check: bool = setting(
        "KVLINK_RDMA_READ_CHECK",
        True,
        "Sets whether each NIC port reads some memory of a pool's GPU before verbs is offered. A port whose read fails "
        "or returns other bytes is left out.",
        "Set it to 0 only for NICs that cannot connect to themselves through one port; then test with "
        "`kvlink doctor --gpudirect`.",
    )

    def check_rdma(self) -> None:
        """Raises ConfigError for a malformed option, or for options that do not fit each other."""
        _check_gid(self.rdma_gid)
        parse_pkey(self.rdma_pkey)
        if self.rdma_connect == "cm" and (self.rdma_gid or self.rdma_pkey):
            raise ConfigError(
                "KVLINK_RDMA_CONNECT=cm chooses GID and partition by the IP address; unset KVLINK_RDMA_GID and "
                "KVLINK_RDMA_PKEY"
            )
        resends_s = _UNIT_S * 2**self.rdma_timeout * (self.rdma_retries + 1)
        if resends_s > self.rdma_silence_s:
            raise ConfigError(
                f"KVLINK_RDMA_SILENCE_S={self.rdma_silence_s:g} is less than the {resends_s:.2f} s for which a NIC "
                f"resends with KVLINK_RDMA_TIMEOUT={self.rdma_timeout} and KVLINK_RDMA_RETRIES={self.rdma_retries}; "
                "raise it, or lower one of the two"
            )


def parse_pkey(text: str) -> int:
    """Parses the text of KVLINK_RDMA_PKEY. An empty text is 0, the first key of a port. Raises ConfigError."""
    if not text:
        return 0
    value = int(text, 0) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[1-9]\d{0,4}", text) else 0
    if value > 0xFFFF or value & 0x7FFF == 0:
        raise ConfigError(f"KVLINK_RDMA_PKEY={text!r} is no key of a partition; write one such as 0x8001")
    return value


def _check_gid(text: str) -> None:
    if not text or (text.isascii() and text.isdigit() and int(text) <= _MOST_INDEX):
        return
    try:
        if text.isdigit() or "%" in text:
            raise ValueError(text)
        ip_network(text, strict=False)
        if "/" in text and not text.partition("/")[2].isdigit():  # a netmask, which is not understood below
            raise ValueError(text)
    except ValueError:
        raise ConfigError(
            f"KVLINK_RDMA_GID={text!r} chooses no GID; write an index up to {_MOST_INDEX}, an address or a subnet, as "
            "in 3, 10.1.0.7 or 10.1.0.0/16 (`kvlink topology` lists the GIDs)"
        ) from None


_PCI_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


class Way(Enum):
    """Ways from a NIC to GPU memory, best first: directly (DMA_BUF and PEERMEM) or through host memory (BOUNCE)."""

    DMA_BUF = "dma-buf"
    PEERMEM = "peermem"
    BOUNCE = "bounce"


def parse_ways(spec: str) -> tuple[Way, ...]:
    """Parses the text of KVLINK_GPUDIRECT. An empty text selects all ways. Raises ConfigError for an unknown way."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    try:
        return tuple(Way(name) for name in dict.fromkeys(names)) or tuple(Way)
    except ValueError:
        known = ", ".join(way.value for way in Way)
        raise ConfigError(f"KVLINK_GPUDIRECT={spec!r} must list some of {known}, best first") from None


@dataclass(frozen=True, slots=True)
class NicNames:
    """One list of KVLINK_NICS. `excludes` says whether `ports` are excluded; no ports mean no restriction."""

    excludes: bool = False
    ports: tuple[tuple[str, int | None], ...] = ()
    """Device and port number. None stands for every port of the device."""


def parse_nics(spec: str) -> dict[str, NicNames]:
    """Parses lists such as "mlx5_0:1,mlx5_1" or "^mlx5_2", separated by ";", each for one GPU if ADDRESS= precedes it.

    Returns the lists by the PCI address of the GPU, with "" for all others, without a check that the ports exist.
    Raises ConfigError.
    """
    found: dict[str, NicNames] = {}
    for entry in spec.split(";") if ";" in spec or "=" in spec else [spec]:
        gpu, equals, listed = entry.rpartition("=")
        gpu = gpu.strip()
        if gpu in found or bool(equals) != bool(re.fullmatch(_PCI_ADDRESS, gpu)):
            raise ConfigError(
                f"KVLINK_NICS={spec!r} must have one list for each GPU, as in 0000:1b:00.0=mlx5_0;0000:43:00.0=mlx5_1 "
                "(`kvlink topology` shows the addresses)"
            )
        found[gpu] = _parse_names(listed, spec)
    return found


def _parse_names(listed: str, spec: str) -> NicNames:
    excludes = listed.strip().startswith("^")
    names = listed.strip().removeprefix("^")
    parts = [part.strip() for part in names.split(",")] if names or excludes or spec != listed else []
    matches = [re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,2}))?", part, re.ASCII) for part in parts]
    if not all(matches):
        raise ConfigError(
            f"KVLINK_NICS={spec!r} is no list of NICs; write device or device:port separated by commas, as in "
            "mlx5_0:1,mlx5_1, or ^ before the first to use all others (`kvlink topology` lists them)"
        )
    ports = [(match[1], int(match[2]) if match[2] else None) for match in matches if match]
    return NicNames(excludes, tuple(dict.fromkeys(ports)))
