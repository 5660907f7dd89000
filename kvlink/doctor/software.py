# SPDX-License-Identifier: Apache-2.0
"""Checks what is installed and configured: the extension, its transports, options, torch, driver."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kvlink.config import CATALOGUE, WorkerConfig, env_names, sources, unknown
from kvlink.doctor import fabric, nixl
from kvlink.doctor.verdict import Check, Verdict
from kvlink.errors import ConfigError
from kvlink.hardware.device_caps import INSTALL as PYVERBS
from kvlink.hardware.sysfs import read
from kvlink.transfer.transport_names import select


def checks(root: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown."""
    yield Check("python", Verdict.PASS, f"{platform.python_version()} on {platform.platform(terse=True)}")
    core, check = extension()
    yield check
    names: list[str] = []
    for name, summary, lanes, why_not, fix in core.transports() if core else ():
        names.append(name)
        yield transport(name, summary, lanes, why_not, fix)
    if core:
        yield from fabric.checks(env, names, core.fabric_providers)
    yield options(env, names)
    yield torch()
    yield gpu(root)
    yield extras()
    yield nixl.check()


def extension() -> tuple[ModuleType | None, Check]:
    """Loads the extension module, and returns it, or None, with the check."""
    try:
        import kvlink._core as core
    except ImportError as error:
        fix = "install the wheel again (pip install --force-reinstall FILE); in a checkout: make build"
        return None, Check("data plane", Verdict.FAIL, f"kvlink._core does not load: {error}", fix)
    return core, Check("data plane", Verdict.PASS, f"kvlink {importlib.metadata.version('kvlink')}")


def transport(name: str, summary: str, lanes: int, why_not: str, fix: str) -> Check:
    """Shows one transport of this build, and whether it can work here."""
    if why_not:
        # A machine may lack a device; a build that lacks a transport is a mistake of whoever made it.
        verdict = Verdict.FAIL if why_not.startswith("kvlink was built without") else Verdict.WARN
        return Check(name, verdict, why_not, fix)
    return Check(name, Verdict.PASS, f"{summary}, {lanes} lane{'s' if lanes > 1 else ''}")


def options(env: Mapping[str, str], transports: list[str]) -> Check:
    """Checks the KVLINK_* variables of the environment."""
    try:
        config = WorkerConfig.from_env(env)
        if transports:
            select(config.transports, transports)
    except ConfigError as error:
        return Check("options", Verdict.FAIL, str(error), "kvlink config lists what is valid")
    if misspelt := unknown(env):
        fix = f"unset {' '.join(misspelt)}; kvlink config lists the known ones"
        shown = "; ".join(f"{name} ({env_names.advice(name, near)})" for name, near in misspelt.items())
        return Check("options", Verdict.WARN, f"no such option: {shown}", fix)
    given = sources(env)
    named = [f"{s.env}={env[s.env]}" for s in CATALOGUE if given[s.name] != "default"]
    return Check("options", Verdict.PASS, ", ".join(named) or "all defaults")


def check_transports(config: WorkerConfig) -> None:
    """Raises ConfigError if KVLINK_TRANSPORTS names a transport that this build does not have."""
    core, _ = extension()
    if core is not None:
        select(config.transports, [row[0] for row in core.transports()])


def torch() -> Check:
    """Looks for torch without importing it, which would take seconds."""
    try:
        return Check("torch", Verdict.PASS, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install 'kvlink[torch]'"
        return Check("torch", Verdict.PASS, f"absent; pools are numpy arrays ({fix} for tensors)")


def gpu(root: Path) -> Check:
    """Checks whether an NVIDIA driver is loaded."""
    version = read(root, "proc/driver/nvidia/version").splitlines()
    return Check("gpu", Verdict.PASS, version[0] if version else "absent: no NVIDIA driver")


class Extra(NamedTuple):
    """One extra of the package. It is present if all `modules` are."""

    name: str
    modules: tuple[str, ...]
    purpose: str
    how: str = ""
    """How to install it, where `pip install 'kvlink[name]'` does not suffice."""


EXTRAS = (
    Extra("torch", ("torch",), "pools of tensors"),
    Extra(
        "cuda",
        ("cuda.bindings",),
        "GPUDirect",
        "pip install 'kvlink[cuda]' (kvlink[cuda12] for a driver of CUDA 12)",
    ),
    Extra("rdma", ("pyverbs",), "limits of RDMA devices in `kvlink topology` and `kvlink doctor`", PYVERBS),
    Extra("demo", ("torch", "transformers"), "`kvlink demo --engine transformers`"),
    Extra("router", ("aiohttp",), "`kvlink router`"),
    Extra("metrics", ("aiohttp", "prometheus_client"), "/metrics and the status page"),
    Extra("certs", ("cryptography",), "`kvlink certs`"),
    Extra("otel", ("opentelemetry.sdk", "opentelemetry.exporter.otlp"), "spans"),
)


def extras() -> Check:
    """Names the missing extras and their purposes. Only their parent packages are imported."""
    there = [extra.name for extra in EXTRAS if all(map(_is_there, extra.modules))]
    missing = [
        f"; for {extra.purpose}: " + (extra.how or f"pip install 'kvlink[{extra.name}]'")
        for extra in EXTRAS
        if extra.name not in there
    ]
    evidence = (", ".join(there) or "none") + "".join(missing)
    return Check("extras", Verdict.PASS, evidence)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing or blocked
        return False
