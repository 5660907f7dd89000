# SPDX-License-Identifier: Apache-2.0
"""Defines every option of kvlink with its meaning, unit, default and environment variable.

Arguments override the environment, and the environment overrides the default. `kvlink config` prints the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from kvlink.config import env_names
from kvlink.config.addresses import can_be_dialled, plain_host, split_address
from kvlink.config.rdma_config import RdmaConfig, parse_nics, parse_ways
from kvlink.config.setting import Setting, setting
from kvlink.errors import ConfigError
from kvlink.ticket import MAX_SLOTS

_PORT: dict[str, Any] = {"least": 0, "most": 65535}
_OPEN_PORT = _PORT | {"advice": "Set it where a firewall admits known ports only. Rank n of a server adds n."}
_DURATION: dict[str, Any] = {"unit": "s", "least": 0.001, "most": 86400}


@dataclass(frozen=True, slots=True)
class WorkerConfig(RdmaConfig):
    """The options of one worker. Construction raises ConfigError for a value out of bounds."""

    transports: str = setting(
        "KVLINK_TRANSPORTS",
        "",
        "Selects the transports that this worker may use. `shm,tcp` allows only these, in this order; `^cma` allows "
        "all others; `all`, or an empty value, allows all except fabric, which has to be named.",
        "By default each pair of workers uses the best transport that works at both ends. Set it to compare two.",
    )
    nics: str = setting(
        "KVLINK_NICS",
        "",
        "Selects the NIC ports that verbs uses. `mlx5_0:1,mlx5_1` uses these; `^mlx5_2` excludes one; an empty value "
        "uses those nearest to the pool. `0000:1b:00.0=mlx5_0;0000:43:00.0=mlx5_1` sets a list for each GPU.",
        "Set it where some NICs carry other traffic. `kvlink topology` lists the ports and their distances.",
    )
    fabric_provider: str = setting(
        "KVLINK_FABRIC_PROVIDER",
        "",
        "Selects the provider of libfabric that the transport fabric uses, such as `efa`, `cxi` or `tcp`. An empty "
        "value uses libfabric's first that kvlink may use.",
        "Set it to the same at both ends. fabric is used only where KVLINK_TRANSPORTS names it.",
    )
    gpudirect: str = setting(
        "KVLINK_GPUDIRECT",
        "",
        "Lists the ways to GPU memory that are allowed, best first: some of `dma-buf`, `peermem` and `bounce`. An "
        "empty value allows all three in this order.",
        "Leave `bounce` out to get an error instead of copies through host memory.",
    )
    bounce_bytes: int = setting(
        "KVLINK_BOUNCE_BYTES",
        64 << 20,
        "Sets the bytes of the bounce buffer: pinned host memory through which the bytes of GPU memory pass where a "
        "transport cannot reach it. Half of it serves each direction.",
        "It is allocated only where it is needed, and all connections share it.",
        unit="bytes",
        least=4 << 20,
        most=16 << 30,
    )
    staging: str = setting(
        "KVLINK_STAGING",
        "auto",
        "Sets when reads that arrive in many small pieces pass through a staging buffer in GPU memory. `auto` does so "
        "where NICs read and it is predicted to be faster.",
        "Set `always` or `never` to compare; `pull.explain()` shows both predictions.",
        choices=("auto", "always", "never"),
    )
    staging_bytes: int = setting(
        "KVLINK_STAGING_BYTES",
        16 << 20,
        "Sets the bytes of the staging buffer, which is allocated on the pool's GPU.",
        "`KVLINK_STAGING=never` allocates none.",
        unit="bytes",
        least=1 << 20,
        most=1 << 30,
    )
    gpu_blocks: int = setting(
        "KVLINK_GPU_BLOCKS",
        0,
        "Sets the most thread blocks that one copy by kvlink's kernel may take of a GPU. 0 takes what the link needs: "
        "8 for host memory, 128 for another GPU, and two for each multiprocessor within one GPU; more for pieces "
        "below 4 KiB.",
        "Lower it if decoding slows down while blocks are pulled; `kvlink bench gpu` shows both.",
        least=0,
        most=4096,
    )
    coordinator: str = setting(
        "KVLINK_COORDINATOR",
        "",
        "Names the coordinator as host:port, or its replicas separated by commas. An empty value uses none.",
        "Tickets that travel on the router's message need no coordinator.",
    )
    host: str = setting(
        "KVLINK_HOST",
        "127.0.0.1",
        "Sets the address on which the agent and tcp listen. Peers connect to it unless KVLINK_ADVERTISE is set.",
        "The default is reachable on this host only. Set an address that peers reach; 0.0.0.0 is refused.",
    )
    advertise: str = setting(
        "KVLINK_ADVERTISE",
        "",
        "Sets the host, without a port, to which peers connect where it differs from KVLINK_HOST.",
        "Set it behind NAT, with fixed KVLINK_PORT and KVLINK_AGENT_PORT.",
    )
    port: int = setting(
        "KVLINK_PORT",
        0,
        "Sets the port on which tcp serves data. 0 takes any free port.",
        **_OPEN_PORT,
    )
    agent_port: int = setting(
        "KVLINK_AGENT_PORT",
        0,
        "Sets the port of the agent, to which readers connect first. 0 takes any free port.",
        **_OPEN_PORT,
    )
    channel: str = setting(
        "KVLINK_CHANNEL",
        "off",
        "Sets whether readers without Python and gRPC may connect, by the native channel. `off` refuses them, `on` "
        "listens at KVLINK_HOST and any free port, and a number at that port.",
        "It has no TLS, and whoever has the worker's card may connect. Rank n of a server adds n to the port.",
    )
    progress_threads: int = setting(
        "KVLINK_PROGRESS_THREADS",
        1,
        "Sets the number of threads that move the bytes of pulls.",
        "Raise it if `kvlink_queued_transfers` grows while one core is full.",
        least=1,
        most=64,
    )
    inline_us: int = setting(
        "KVLINK_INLINE_US",
        500,
        "Sets the predicted time in microseconds up to which `pull` copies on the calling thread.",
        "This saves waking another thread, which takes over after this time. With 0, `pull` returns at once. The vLLM "
        "connector sets 0.",
        unit="µs",
        least=0,
        most=100_000,
    )
    lanes: int = setting(
        "KVLINK_LANES",
        0,
        "Sets the number of parallel connections to each peer. 0 leaves it to the transport.",
        "verbs opens KVLINK_RDMA_QPS for each pair of NIC ports, and others open 1. Raise it if one does not fill the "
        "link.",
        least=0,
        most=64,
    )
    lease_slots: int = setting(
        "KVLINK_LEASE_SLOTS",
        4096,
        "Sets the number of readers that can hold offers at the same time.",
        "A slot takes 80 bytes. While all are in use, `offer` raises ConfigError. The vLLM connector sets 32768.",
        least=1,
        most=MAX_SLOTS,
    )
    lease_s: float = setting(
        "KVLINK_LEASE_S",
        30.0,
        "Sets the lifetime in seconds of an offer that no reader settles.",
        "A longer lease lets readers come later, and pins the blocks of lost requests for longer.",
        **_DURATION,
    )
    timeout_s: float = setting(
        "KVLINK_TIMEOUT_S",
        30.0,
        "Sets the seconds that a whole pull may take, with its claim and connection.",
        "The argument `timeout_s` of a pull overrides it.",
        **_DURATION,
    )
    tls_ca: str = setting(
        "KVLINK_TLS_CA",
        "",
        "Names the PEM file with the CAs that sign the certificates of peers.",
        "Set all three KVLINK_TLS_ files. Without them kvlink speaks plaintext, and on loopback only.",
    )
    tls_cert: str = setting(
        "KVLINK_TLS_CERT", "", "Names the PEM file with the certificate of this process and its chain."
    )
    tls_key: str = setting(
        "KVLINK_TLS_KEY", "", "Names the PEM file with the private key of that certificate."
    )
    tls_hosts: bool = setting(
        "KVLINK_TLS_HOSTS",
        True,
        "Requires that a server's certificate names the host of its address, besides its role or tenant.",
        "Set it to 0 where addresses are not known when certificates are made.",
    )
    token_file: str = setting(
        "KVLINK_TOKEN_FILE",
        "",
        "Names the file with a token. With TLS the token identifies this process to the coordinator; without TLS, "
        "processes on loopback show it to each other. An empty value uses a file of this user.",
        "Set it without TLS if processes of several users work together.",
    )
    ticket_keys: str = setting(
        "KVLINK_TICKET_KEYS",
        "",
        "Names the file with the secrets that sign tickets, one per line, the newest first. All workers of a tenant "
        "need the same. Under TLS a file is required; on loopback without TLS the key comes from the token by default. "
        "The value `none` turns signatures off.",
    )
    same_model: str = setting(
        "KVLINK_SAME_MODEL",
        "",
        "Lists models that are equal although their identities differ. `A=B` lets a server whose model has the "
        "16 digits A, as `kvlink status` shows them, exchange caches with servers of B. Separate pairs by commas.",
        "Integrations of inference servers use it. Set it only if both compute the same cache from the same tokens.",
    )
    insecure: bool = setting(
        "KVLINK_INSECURE",
        False,
        "Allows plaintext connections to other hosts.",
        "Set it only on a network where everybody may read and write every request's blocks.",
    )
    fault: str = setting(
        "KVLINK_FAULT",
        "",
        "Sets the faults that a transport with a name such as `fault+shm` injects: `drop@3` loses the third read.",
        "It is for tests. `csrc/transports/fault/plan.h` has the grammar.",
    )
    metrics_port: int = setting(
        "KVLINK_METRICS_PORT",
        0,
        "Sets the port on which this worker serves /metrics for Prometheus. 0 serves none.",
        "It needs `kvlink[metrics]`. Rank n of a server adds n to the port.",
        **_PORT,
    )
    metrics_host: str = setting(
        "KVLINK_METRICS_HOST",
        "",
        "Sets the address on which /metrics listens. An empty value uses that of KVLINK_HOST.",
        "Everybody who reaches it can read the metrics.",
    )
    log: str = setting(
        "KVLINK_LOG",
        "warning",
        "Sets the lowest level of the messages that kvlink's commands log.",
        "`kvlink coordinator` logs from info on unless this is set. Servers and programs configure logging themselves.",
        choices=("debug", "info", "warning", "error"),
    )
    log_json: bool = setting(
        "KVLINK_LOG_JSON",
        False,
        "Writes each message that kvlink's commands log as one JSON object on a line.",
    )

    def __post_init__(self) -> None:
        for option in CATALOGUE:
            option.check(getattr(self, option.name))
        for name in ("host", "advertise", "metrics_host"):
            object.__setattr__(self, name, plain_host(getattr(self, name)))
        if self.advertise and not can_be_dialled(self.advertise):
            raise ConfigError(
                f"KVLINK_ADVERTISE={self.advertise!r} is no host that peers can connect to; set a name or an address, "
                "without a port"
            )
        parse_nics(self.nics)
        parse_channel(self.channel)
        self.check_rdma()
        parse_ways(self.gpudirect)
        for address in self.coordinator.split(",") if self.coordinator else ():
            split_address(address.strip())

    def of_worker(self, number: int) -> WorkerConfig:
        """Returns the options of worker `number` of a host, added to all configured ports. Raises ConfigError."""
        ports = {name: getattr(self, name) for name in ("port", "agent_port", "metrics_port")}
        counted: dict[str, Any] = {name: port + number for name, port in ports.items() if port}
        if channel := parse_channel(self.channel):
            counted["channel"] = str(channel + number)
        return replace(self, **counted)

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


def parse_channel(channel: str) -> int | None:
    """Returns the port of KVLINK_CHANNEL, where 0 is any free one, or None if it is off. Raises ConfigError."""
    given = channel.strip().lower()
    if given in ("", "off"):
        return None
    port = 0 if given == "on" else int(given) if re.fullmatch("[0-9]{1,5}", given) else -1
    if given == "on" or 0 < port < 65536:
        return port
    raise ConfigError(f"KVLINK_CHANNEL={channel!r} must be on, off, or a port from 1 to 65535")


CATALOGUE = tuple(
    Setting(name=f.name, default=cast(Any, f.default), **f.metadata)
    for f in sorted(fields(WorkerConfig), key=lambda f: f.name not in ("transports", "nics"))
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
