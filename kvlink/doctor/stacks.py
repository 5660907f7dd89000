# SPDX-License-Identifier: Apache-2.0
"""Finds the driver stacks around GPUs and NICs, with their versions, and says what each means for kvlink."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.sysfs import names, read
from kvlink.hardware.topology import RdmaDevice

_ORIGINAL_PEER_MEMORY = "sys/module/nv_peer_mem"
_DPUS = {0xA2D6: "BlueField-2", 0xA2DC: "BlueField-3"}


def checks(root: Path, nics: Sequence[RdmaDevice], env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yields one check for each stack that is found. Only nv_peer_mem, which is obsolete, is a warning."""
    for find in (_ofed, _peer_memory, _fabric_manager, _imex, _storage, _gdrcopy):
        if check := find(root):
            yield check
    yield from _dpus(nics)
    if check := _pod_resources(env):
        yield check


def _found(name: str, evidence: str, meaning: str) -> Check:
    return Check(name, Verdict.PASS, f"{evidence}: {meaning}")


def _module(name: str, meaning: str, label: str) -> Callable[[Path], Check | None]:
    """Returns the check of a kernel module."""

    def find(root: Path) -> Check | None:
        if not (root / "sys/module" / name).is_dir():
            return None
        version = read(root, f"sys/module/{name}/version")
        return _found(label, f"{name} {version}".strip(), meaning)

    return find


_gdrcopy = _module("gdrdrv", "kvlink does not use GDRCopy; it does no harm", "gdrcopy")
_storage = _module(
    "nvidia_fs", "GPUDirect Storage; kvlink does not use it, and it does no harm", "gpudirect storage"
)


def _ofed(root: Path) -> Check | None:
    """MLNX_OFED and DOCA-OFED replace the kernel's modules, which have no version of their own."""
    version = read(root, "sys/module/mlx5_core/version")
    if not version:
        return None
    kind = "DOCA-OFED or MLNX_OFED"
    return _found(
        "ofed", f"mlx5_core {version}", f"{kind} instead of the kernel's driver; it brings peer memory too"
    )


def _peer_memory(root: Path) -> Check | None:
    if not (root / _ORIGINAL_PEER_MEMORY).is_dir():
        return None
    version = read(root, f"{_ORIGINAL_PEER_MEMORY}/version")
    fix = "sudo rmmod nv_peer_mem && sudo modprobe nvidia-peermem, and remove its package"
    return Check("nv_peer_mem", Verdict.WARN, f"nv_peer_mem {version} is loaded and is obsolete", fix)


def _fabric_manager(root: Path) -> Check | None:
    """HGX boards with NVSwitch need it, or no GPU initializes."""
    if (
        not names(root, "sys/bus/pci/drivers/nvidia-nvswitch")
        and not (root / "dev/nvidia-nvswitchctl").exists()
    ):
        return None
    running = any(read(root, f"proc/{pid}/comm") == "nv-fabricmanager" for pid in _processes(root))
    if running or (root / "var/run/nvidia-fabricmanager").is_dir():
        return _found("fabric manager", "nv-fabricmanager runs", "NVLink between the GPUs of this host works")
    fix = "sudo systemctl start nvidia-fabricmanager; in a container, run this on the host"
    return Check("fabric manager", Verdict.WARN, "NVSwitches, and no nv-fabricmanager in sight", fix)


def _imex(root: Path) -> Check | None:
    """IMEX shares GPU memory between the hosts of an NVLink domain (NVL72)."""
    if "nvidia-caps-imex-channels" not in read(root, "proc/devices"):
        return None
    channels = names(root, "dev/nvidia-caps-imex-channels")
    evidence = f"{len(channels)} IMEX channels are visible"
    return _found(
        "imex", evidence, "kvlink does not use NVLink between hosts yet; NICs carry those transfers"
    )


def _dpus(nics: Sequence[RdmaDevice]) -> Iterator[Check]:
    for nic in nics:
        if nic.pci and (kind := _DPUS.get(nic.pci.device_id)):
            query = f"sudo mlxconfig -d {nic.pci.address} q INTERNAL_CPU_OFFLOAD_ENGINE"
            meaning = f"`{query}` says DISABLED in NIC mode; in DPU mode its Arm cores forward the packets"
            yield _found(f"dpu {nic.name}", f"{kind}, firmware {nic.firmware or 'unknown'}", meaning)


def _pod_resources(env: Mapping[str, str]) -> Check | None:
    """The device plugins of the NVIDIA Network Operator set these variables in a pod."""
    found = sorted(name for name in env if name.startswith("PCIDEVICE_") and not name.endswith("_INFO"))
    if not found:
        return None
    evidence = ", ".join(f"{name}={env[name]}" for name in found)
    return _found("pod resources", evidence, "device plugins gave this pod these NICs")


def _processes(root: Path) -> list[str]:
    return [name for name in names(root, "proc") if name.isdigit()]
