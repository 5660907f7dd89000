# SPDX-License-Identifier: Apache-2.0
"""Defines every option of kvlink with its meaning, unit, default and environment variable.

Arguments override the environment, and the environment overrides the default. `kvlink config` prints the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar, cast

from kvlink import env_names
from kvlink.addresses import can_be_dialled, plain_host, split_address
from kvlink.errors import ConfigError
from kvlink.ticket import MAX_SLOTS

LOG_LEVELS = ("debug", "info", "warning", "error")

_T = TypeVar("_T", str, int, float, bool)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


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
class Setting:
    """One row of the catalogue. `least` and `most` bound numbers, and `choices` lists the allowed strings."""

    name: str
    env: str
    meaning: str
    default: str | int | float | bool
    unit: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def parse(self, text: str) -> str | int | float | bool:
        """Parses the text of the environment variable. Raises ConfigError if it has the wrong type."""
        text = text.strip()
        try:
            if isinstance(self.default, bool):
                return _parse_bool(text)
            return type(self.default)(text)
        except ValueError:
            kind = _KINDS[type(self.default)]
            raise ConfigError(f"{self.env}={text!r} is not {kind} ({self.meaning})") from None

    def check(self, value: str | int | float | bool) -> None:
        """Raises ConfigError if `value` is out of bounds or not one of the choices."""
        if isinstance(value, (int, float)) and not self._within(value):
            bounds = f"at least {self.least:g}"
            if self.most is not None:
                bounds = f"between {self.least:g} and {self.most:g}"
            unit = f" {self.unit}" if self.unit else ""
            raise ConfigError(f"{self.env}={value} must be {bounds}{unit} ({self.meaning})")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.env}={value!r} must be one of {', '.join(filter(None, self.choices))}")

    def _within(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "one of " + ", ".join(_TRUE + _FALSE)}


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _setting(env: str, default: _T, meaning: str, **rest: Any) -> _T:
    return field(default=default, metadata={"env": env, "meaning": meaning, **rest})


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The options of one worker. Construction raises ConfigError for a value out of bounds."""

    transports: str = _setting(
        "KVLINK_TRANSPORTS",
        "",
        "transports to use: shm,tcp allows these in this order, ^cma allows all others; empty or all: all",
    )
    nics: str = _setting(
        "KVLINK_NICS",
        "",
        "NIC ports to use: mlx5_0:1,mlx5_1 uses these, ^mlx5_2 uses all others; empty: the nearest",
    )
    rdma_connect: str = _setting(
        "KVLINK_RDMA_CONNECT",
        "",
        "how verbs connects: direct, or cm for rdma_cm (set it at both ends); empty: as the NIC needs",
        choices=("", "direct", "cm"),
    )
    rdma_traffic_class: int = _setting(
        "KVLINK_RDMA_TRAFFIC_CLASS",
        0,
        "traffic class of verbs packets, the byte DSCP x 4 of the IP header with RoCE v2 (set it at both ends)",
        least=0,
        most=255,
    )
    gpudirect: str = _setting(
        "KVLINK_GPUDIRECT",
        "",
        "ways to GPU memory out of dma-buf,peermem,bounce, best first; without bounce no memory is staged; empty: all",
    )
    bounce_bytes: int = _setting(
        "KVLINK_BOUNCE_BYTES",
        64 << 20,
        "host memory pinned for GPU memory that a transport cannot reach, half of it for each direction",
        unit="bytes",
        least=4 << 20,
        most=16 << 30,
    )
    staging: str = _setting(
        "KVLINK_STAGING",
        "auto",
        "when reads that arrive in many small pieces go through a staging buffer on the GPU: auto (when NICs read and "
        "it should be faster), always, never",
        choices=("auto", "always", "never"),
    )
    staging_bytes: int = _setting(
        "KVLINK_STAGING_BYTES",
        16 << 20,
        "size of the staging buffer in GPU memory",
        unit="bytes",
        least=1 << 20,
        most=1 << 30,
    )
    coordinator: str = _setting(
        "KVLINK_COORDINATOR", "", "host:port of the coordinator, or of its replicas with commas; empty: none"
    )
    host: str = _setting("KVLINK_HOST", "127.0.0.1", "address that the agent and tcp listen on")
    advertise: str = _setting(
        "KVLINK_ADVERTISE",
        "",
        "host that peers connect to if it differs (NAT); empty: the value of KVLINK_HOST",
    )
    port: int = _setting("KVLINK_PORT", 0, "tcp port for data; 0: any free one", least=0, most=65535)
    agent_port: int = _setting(
        "KVLINK_AGENT_PORT", 0, "port of the agent; 0: any free one", least=0, most=65535
    )
    progress_threads: int = _setting(
        "KVLINK_PROGRESS_THREADS", 1, "threads that move the bytes of pulls", least=1, most=64
    )
    inline_bytes: int = _setting(
        "KVLINK_INLINE_BYTES",
        128 << 10,
        "pulls up to this size run on the caller's thread",
        unit="bytes",
        least=0,
    )
    lanes: int = _setting(
        "KVLINK_LANES", 0, "parallel connections to a peer; 0: the transport decides", least=0, most=64
    )
    lease_slots: int = _setting(
        "KVLINK_LEASE_SLOTS", 4096, "readers that can hold offers at the same time", least=1, most=MAX_SLOTS
    )
    lease_s: float = _setting(
        "KVLINK_LEASE_S", 30.0, "time after which an unsettled offer ends", unit="s", least=0.001, most=86400
    )
    timeout_s: float = _setting(
        "KVLINK_TIMEOUT_S", 30.0, "deadline of a pull", unit="s", least=0.001, most=86400
    )
    tls_ca: str = _setting("KVLINK_TLS_CA", "", "PEM file of the CAs that sign the certificates of peers")
    tls_cert: str = _setting("KVLINK_TLS_CERT", "", "PEM file of this process's certificate and its chain")
    tls_key: str = _setting("KVLINK_TLS_KEY", "", "PEM file of the private key of that certificate")
    tls_hosts: bool = _setting(
        "KVLINK_TLS_HOSTS", True, "certificates must name the host of the address, not only role and tenant"
    )
    token_file: str = _setting(
        "KVLINK_TOKEN_FILE",
        "",
        "file with the token that identifies this process to the coordinator; without TLS, the token that processes on "
        "loopback show each other (empty: a file of this user)",
    )
    ticket_keys: str = _setting(
        "KVLINK_TICKET_KEYS",
        "",
        "file of secrets with which the tenant's workers sign tickets, newest first; required under TLS, or none",
    )
    insecure: bool = _setting("KVLINK_INSECURE", False, "allow plaintext connections to other hosts")
    fault: str = _setting("KVLINK_FAULT", "", "plan of the fault transport, for names such as fault+shm")
    metrics_port: int = _setting(
        "KVLINK_METRICS_PORT",
        0,
        "port of this worker's /metrics for Prometheus; 0: none",
        least=0,
        most=65535,
    )
    metrics_host: str = _setting(
        "KVLINK_METRICS_HOST", "", "address that /metrics listens on; empty: the value of KVLINK_HOST"
    )
    log: str = _setting(
        "KVLINK_LOG", "warning", "lowest level of messages that is logged", choices=LOG_LEVELS
    )
    log_json: bool = _setting("KVLINK_LOG_JSON", False, "log one JSON object per line")

    def __post_init__(self) -> None:
        for setting in CATALOGUE:
            setting.check(getattr(self, setting.name))
        for name in ("host", "advertise", "metrics_host"):
            object.__setattr__(self, name, plain_host(getattr(self, name)))
        if self.advertise and not can_be_dialled(self.advertise):
            raise ConfigError(
                f"KVLINK_ADVERTISE={self.advertise!r} is no host that peers can connect to; set a name or an address, "
                "without a port"
            )
        parse_nics(self.nics)
        parse_ways(self.gpudirect)
        for address in self.coordinator.split(",") if self.coordinator else ():
            split_address(address.strip())

    def of_worker(self, number: int) -> WorkerConfig:
        """Returns the options of worker `number` of a host, added to all configured ports. Raises ConfigError."""
        ports = {name: getattr(self, name) for name in ("port", "agent_port", "metrics_port")}
        return replace(self, **{name: port + number for name, port in ports.items() if port})

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None, **arguments: Any
    ) -> WorkerConfig:
        """Reads `os.environ`, or `env` if given. Arguments that are not None override it, and `defaults` apply last.

        Warns once of variables in `os.environ` that look like options but are not. Raises ConfigError.
        """
        if env is None:
            env = os.environ
            env_names.warn_once(env, _NAMES)
        from_env = {s.name: s.parse(text) for s, text in _given(env)}
        passed = {name: value for name, value in arguments.items() if value is not None}
        return cls(**{**(defaults or {}), **from_env, **passed})


CATALOGUE = tuple(
    Setting(name=f.name, default=cast(Any, f.default), **f.metadata) for f in fields(WorkerConfig)
)
"""Every setting, in the order in which `kvlink config` shows them."""
_NAMES = frozenset(setting.env for setting in CATALOGUE)


def _given(env: Mapping[str, str]) -> list[tuple[Setting, str]]:
    return [(setting, env[setting.env]) for setting in CATALOGUE if env.get(setting.env, "").strip()]


def sources(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the source of each setting's value: the name of its environment variable, or "default"."""
    given = {setting.name for setting, _ in _given(env)}
    return {setting.name: setting.env if setting.name in given else "default" for setting in CATALOGUE}


def unknown(env: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that look like options of kvlink but are not, each with the nearest option's name or ""."""
    return env_names.unknown(env, _NAMES)


@dataclass(frozen=True, slots=True)
class NicNames:
    """The parsed form of KVLINK_NICS. `excludes` says whether `ports` are excluded; no ports mean no restriction."""

    excludes: bool
    ports: tuple[tuple[str, int | None], ...]
    """Device and port number. None stands for every port of the device."""


def parse_nics(spec: str) -> NicNames:
    """Parses "mlx5_0:1,mlx5_1" or "^mlx5_2" without a check that the ports exist. Raises ConfigError."""
    excludes = spec.strip().startswith("^")
    listed = spec.strip().removeprefix("^")
    parts = [part.strip() for part in listed.split(",")] if listed or excludes else []
    matches = [re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,2}))?", part, re.ASCII) for part in parts]
    if not all(matches):
        raise ConfigError(
            f"KVLINK_NICS={spec!r} is no list of NICs; write device or device:port separated by commas, as in "
            "mlx5_0:1,mlx5_1, or ^ before the first to use all others (`kvlink topology` lists them)"
        )
    ports = [(match[1], int(match[2]) if match[2] else None) for match in matches if match]
    return NicNames(excludes, tuple(dict.fromkeys(ports)))
