# SPDX-License-Identifier: Apache-2.0
"""Asks the driver of an RDMA device, through pyverbs, for what sysfs does not show. pyverbs is optional."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvlink.hardware.topology import RdmaDevice

# Distributions install pyverbs here, where a virtual environment does not look for it.
_DISTRIBUTION = "/usr/lib/python3/dist-packages"
INSTALL = (
    "apt-get install python3-pyverbs (it loads only in the distribution's own Python version), or compile it: "
    "PIP_CONSTRAINT=FILE pip install 'kvlink[rdma]', where FILE says cython==3.0.12"
)
_OPEN_FIX = "check that /dev/infiniband/uverbs* exists and that this user may open it"


@dataclass(frozen=True, slots=True)
class VerbsCaps:
    """The capabilities of one device. Limits apply to one queue pair, and sizes are in bytes."""

    device: str
    max_qp_rd_atom: int
    """The number of reads that peers may have in flight at this device."""
    max_qp_init_rd_atom: int
    """The number of reads that this device may have in flight at a peer."""
    max_sge: int
    max_sge_rd: int
    """The number of local pieces of one RDMA read."""
    max_mr_bytes: int
    atomics: str
    """NONE, HCA or GLOB."""
    has_memory_windows: bool
    """Whether it has memory windows of type 2B, which a lease could revoke."""
    has_odp_read: bool
    active_mtu_bytes: tuple[int, ...]
    """The active MTU of each port, in order."""


@dataclass(frozen=True, slots=True)
class VerbsReport:
    """The devices that answered, and in `problem` why others did not. `fix` says what to do about `problem`."""

    caps: tuple[VerbsCaps, ...]
    knows_dmabuf: bool = False
    """Whether the library can register dma-buf memory. Only an attempt shows whether a driver can."""
    problem: str = ""
    fix: str = ""


def query(devices: Iterable[RdmaDevice]) -> VerbsReport:
    """Opens every device once. Never raises, because a device that does not answer becomes part of `problem`."""
    try:
        pyverbs = _import("pyverbs.device")
        enums = _import("pyverbs.enums")
    except ImportError as error:
        return VerbsReport((), problem=f"pyverbs cannot be imported ({error})", fix=INSTALL)
    answers = {device.name: _try(pyverbs, enums, device) for device in devices}
    caps = tuple(answer for answer in answers.values() if isinstance(answer, VerbsCaps))
    silent: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if isinstance(answer, str):
            silent.setdefault(answer, []).append(name)
    problem = "; ".join(f"{', '.join(names)}: {error}" for error, names in silent.items())
    return VerbsReport(caps, _has("pyverbs.dmabuf"), problem, _OPEN_FIX if problem else "")


def _try(pyverbs: ModuleType, enums: ModuleType, device: RdmaDevice) -> VerbsCaps | str:
    try:
        return _ask(pyverbs, enums, device)
    except Exception as error:  # the errors of pyverbs have no closer common base
        return str(error)


def _ask(pyverbs: ModuleType, enums: ModuleType, device: RdmaDevice) -> VerbsCaps:
    with pyverbs.Context(name=device.name) as context:
        limits, more = context.query_device(), context.query_device_ex()
        return VerbsCaps(
            device=device.name,
            max_qp_rd_atom=limits.max_qp_rd_atom,
            max_qp_init_rd_atom=limits.max_qp_init_rd_atom,
            max_sge=limits.max_sge,
            max_sge_rd=limits.max_sge_rd,
            max_mr_bytes=limits.max_mr_size,
            atomics=_atomics(enums, limits.atomic_caps),
            has_memory_windows=bool(limits.device_cap_flags & enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B),
            has_odp_read=bool(more.odp_caps.rc_odp_caps & enums.IBV_ODP_SUPPORT_READ),
            active_mtu_bytes=tuple(
                128 << context.query_port(port.number).active_mtu  # ibv_mtu counts powers of two from 256 = 1
                for port in device.ports
            ),
        )


def _atomics(enums: ModuleType, value: int) -> str:
    names = {enums.IBV_ATOMIC_NONE: "NONE", enums.IBV_ATOMIC_HCA: "HCA", enums.IBV_ATOMIC_GLOB: "GLOB"}
    return names.get(value, str(value))


def _has(name: str) -> bool:
    try:
        _import(name)
    except ImportError:
        return False
    return True


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        if "pyverbs" in sys.modules:  # found, but built for another Python
            raise
    sys.path.append(_DISTRIBUTION)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(_DISTRIBUTION)
