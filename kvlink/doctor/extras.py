# SPDX-License-Identifier: Apache-2.0
"""Lists what parts of kvlink need beyond its base requirements, and the extra that installs it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.device_caps import INSTALL as PYVERBS


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
