# SPDX-License-Identifier: Apache-2.0
"""Checks what a process needs to use an RDMA device: library, provider, device files, permission to pin memory."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvlink.doctor.host import may_pin_all
from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.sysfs import names, read, why_closed
from kvlink.hardware.topology import RdmaDevice

_LIBRARY = "libibverbs.so.1"
_INSTALL = "apt-get install libibverbs1 ibverbs-providers (Red Hat: dnf install libibverbs)"
_DEVICE_FILES = "in a container: --device=/dev/infiniband; Kubernetes: an RDMA device plugin"
_PROVIDER_FOLDERS = ("usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64")
# Kernel driver to provider library, where the two have different names.
_PROVIDERS = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "idpf": "irdma",
    "i40e": "irdma",
    "efa": "efa",
    "cxgb4": "cxgb4",
    "qede": "qedr",
    "hns3": "hns",
    "mana": "mana",
    "erdma": "erdma",
}


def checks(root: Path, nics: Sequence[RdmaDevice]) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown; without a device only the library's."""
    yield library()
    if nics:
        yield providers(root, nics)
        yield device_files(root)
        yield connection_manager(root, nics)
        yield pinning(root)


def library(load: Callable[[str], object] = ctypes.CDLL) -> Check:
    """Checks that libibverbs loads, which kvlink opens at run time."""
    try:
        load(_LIBRARY)
    except OSError as error:
        return Check("libibverbs", Verdict.WARN, f"does not load: {error}", _INSTALL)
    return Check("libibverbs", Verdict.PASS, f"{_LIBRARY} loads")


def providers(root: Path, nics: Sequence[RdmaDevice]) -> Check:
    """Checks for the provider, the part of libibverbs that drives the card."""
    found = _provider_names(root)
    evidence = f"installed: {', '.join(sorted(found)) or 'none'}"
    needed = {nic.name: _provider_of(root, nic) for nic in nics}
    missing = [f"{name} needs {wants}" for name, wants in needed.items() if wants and wants not in found]
    if missing or not found:
        evidence = "; ".join((*missing, evidence))
        return Check("rdma providers", Verdict.WARN, evidence, "apt-get install ibverbs-providers")
    return Check("rdma providers", Verdict.PASS, evidence)


def _provider_names(root: Path) -> set[str]:
    """Returns the names of the installed providers: "mlx5" for …/libibverbs/libmlx5-rdmav34.so in a library folder."""
    return {
        path.name.removeprefix("lib").partition("-rdmav")[0]
        for folder in _PROVIDER_FOLDERS
        for pattern in ("libibverbs/lib*-rdmav*.so", "*/libibverbs/lib*-rdmav*.so")
        for path in (root / folder).glob(pattern)
    }


def _provider_of(root: Path, nic: RdmaDevice) -> str:
    """Returns the provider that a NIC needs, or "" if this table does not have it."""
    if nic.pci is None:
        return next((soft for soft in ("rxe", "siw") if nic.name.startswith(soft)), "")
    driver = root / f"sys/bus/pci/devices/{nic.pci.address}/driver"
    return _PROVIDERS.get(driver.readlink().name, "") if driver.is_symlink() else ""


def device_files(root: Path) -> Check:
    """Checks for one uverbs file per device, readable and writable by this user."""
    refused: dict[str, list[str]] = {}
    opened: list[str] = []
    files = [name for name in names(root, "sys/class/infiniband_verbs") if name.startswith("uverbs")]
    for name in files:
        device = read(root, f"sys/class/infiniband_verbs/{name}/ibdev")
        why = why_closed(root / "dev/infiniband" / name)
        (refused.setdefault(why, []) if why else opened).append(f"/dev/infiniband/{name} ({device})")
    if not files:
        fix = "sudo modprobe ib_uverbs"
        return Check(
            "uverbs", Verdict.WARN, "the kernel has no uverbs device, because ib_uverbs is not loaded", fix
        )
    evidence = f"{', '.join(opened)}: readable and writable" if opened else ""
    others = "; ".join(f"{', '.join(nodes)}: {why}" for why, nodes in refused.items())
    if opened and not any("Permission denied" in why for why in refused):
        left_out = f"; of the host's other devices this process has none: {others}" if others else ""
        return Check("uverbs", Verdict.PASS, evidence + left_out)
    absent = any("No such file" in why for why in refused)
    fix = _DEVICE_FILES if absent else f"sudo chmod 0666 /dev/infiniband/uverbs*; {_DEVICE_FILES}"
    return Check("uverbs", Verdict.WARN, "; ".join(filter(None, (others, evidence))), fix)


def connection_manager(root: Path, nics: Sequence[RdmaDevice]) -> Check:
    """Checks /dev/infiniband/rdma_cm, which iWARP cards need to connect."""
    iwarp = [nic.name for nic in nics if nic.is_iwarp]
    why = why_closed(root / "dev/infiniband/rdma_cm")
    if not why:
        return Check("rdma_cm", Verdict.PASS, "/dev/infiniband/rdma_cm opens")
    if not iwarp:
        return Check("rdma_cm", Verdict.PASS, f"{why}; only iWARP cards need it, and there is none")
    fix = f"sudo modprobe rdma_ucm; {_DEVICE_FILES}"
    return Check("rdma_cm", Verdict.WARN, f"{why}; {', '.join(iwarp)} cannot connect without it", fix)


def pinning(root: Path) -> Check:
    """Checks whether this process may register a large pool, by CAP_IPC_LOCK or without a limit."""
    if may_pin_all(root):
        return Check("capabilities", Verdict.PASS, "CAP_IPC_LOCK: registered memory is not limited")
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return Check("capabilities", Verdict.PASS, "no CAP_IPC_LOCK, but locked memory is unlimited")
    fix = "docker run --cap-add=IPC_LOCK --ulimit memlock=-1; Kubernetes: securityContext.capabilities.add: [IPC_LOCK]"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    evidence = (
        f"no CAP_IPC_LOCK, and locked memory is limited to {limit >> 10} KiB. A pool in host memory needs its size, "
        "and one on a GPU 4 MiB for its lease table and about 1 MiB for the queues of each peer"
    )
    return Check("capabilities", Verdict.WARN, evidence, fix)
