# SPDX-License-Identifier: Apache-2.0
"""Checks sockets: the address that workers listen on, buffer limits, the coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvlink.config import WorkerConfig
from kvlink.config.addresses import is_loopback, split_address
from kvlink.doctor.verdict import Check, Verdict
from kvlink.errors import ConfigError
from kvlink.hardware.sysfs import read
from kvlink.worker.reachability import advertised_host, loopback_problem

_TIMEOUT_S = 3.0
# With this much in flight one connection fills 10 Gbit/s over a round trip of 3 ms.
_ENOUGH_BUFFER_BYTES = 4 << 20


def checks(root: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown."""
    yield tcp_buffers(root)
    try:
        config = WorkerConfig.from_env(env)
    except ConfigError:  # the check of the options reports it
        return
    yield listen_address(config.host)
    yield advertised_address(config)
    yield coordinator(config.coordinator)


def tcp_buffers(root: Path) -> Check:
    """Checks how far the kernel lets a connection's buffers grow automatically."""
    names = ("tcp_rmem", "tcp_wmem")
    grows_to = {name: int((read(root, f"proc/sys/net/ipv4/{name}").split() or ["0"])[-1]) for name in names}
    evidence = ", ".join(f"{name} up to {value} bytes" for name, value in grows_to.items())
    small = [name for name, value in grows_to.items() if value < _ENOUGH_BUFFER_BYTES]
    if not small:
        return Check("tcp buffers", Verdict.PASS, evidence)
    fix = "sudo sysctl " + " ".join(f"net.ipv4.{name}='4096 131072 16777216'" for name in small)
    return Check("tcp buffers", Verdict.WARN, evidence, fix)


def listen_address(host: str) -> Check:
    """Listens on KVLINK_HOST, connects, and sends one byte there and back."""
    try:
        took_us = _round_trip_us(host)
    except OSError as error:
        fix = "set KVLINK_HOST to an address of this machine (ip -brief address)"
        return Check("listen address", Verdict.FAIL, f"{host}: {error.strerror or error}", fix)
    return Check(
        "listen address", Verdict.PASS, f"{host}: connected and answered, {took_us:.0f} µs there and back"
    )


def advertised_address(config: WorkerConfig) -> Check:
    """Checks whether the workers that share the coordinator can reach the address that this one reports."""
    name = "advertised address"
    try:
        host = advertised_host(config)
    except ConfigError as error:
        return Check(name, Verdict.FAIL, f"KVLINK_HOST={config.host} is not one address", str(error))
    reason, fix = loopback_problem(config)
    if reason:
        return Check(name, Verdict.FAIL, reason, fix)
    return Check(name, Verdict.PASS, f"{host}{': on this host alone' if is_loopback(host) else ''}")


def _round_trip_us(host: str) -> float:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as server:
        server.settimeout(_TIMEOUT_S)
        with socket.create_connection(server.getsockname()[:2], _TIMEOUT_S) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(_TIMEOUT_S)
                start = time.perf_counter_ns()
                near.sendall(b"k")
                far.sendall(far.recv(1))
                near.recv(1)
                return (time.perf_counter_ns() - start) / 1000


def coordinator(addresses: str) -> Check:
    """Checks whether every replica in KVLINK_COORDINATOR answers."""
    if not addresses:
        return Check("coordinator", Verdict.PASS, "none configured (KVLINK_COORDINATOR)")
    checks = [_replica(address.strip()) for address in addresses.split(",")]
    return next((check for check in checks if check.verdict is Verdict.FAIL), checks[0])


def _replica(address: str) -> Check:
    try:
        socket.create_connection(split_address(address), _TIMEOUT_S).close()
    except OSError as error:
        fix = (
            f"start one: kvlink coordinator --port {split_address(address)[1]}, or correct KVLINK_COORDINATOR"
        )
        return Check("coordinator", Verdict.FAIL, f"{address}: {error.strerror or error}", fix)
    return Check("coordinator", Verdict.PASS, f"{address} accepts connections")
