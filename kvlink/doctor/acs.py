# SPDX-License-Identifier: Apache-2.0
"""Checks PCIe Access Control Services, by which a bridge sends traffic between two cards up to the CPU and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.topology import PciDevice
from kvlink.hardware.topology.pci import DEVICES

# The source is PCI Express Base Specification, 7.7.11: extended capability 0x000D, control register at offset 6.
_FIRST_EXTENDED = 0x100
_ACS = 0x000D
_CONTROL = 6
_REDIRECTS = 0b11100  # request redirect, completion redirect, upstream forwarding


def redirection(root: Path, cards: Sequence[PciDevice]) -> Check:
    """Checks every bridge above the GPUs and NICs for redirection."""
    bridges = list(dict.fromkeys(bridge for card in cards for bridge in card.path[1:-1]))
    if not bridges:
        return Check("acs", Verdict.PASS, "no PCIe bridge above GPUs and NICs is visible here")
    found = {bridge: acs_control(_config(root, bridge)) for bridge in bridges}
    redirecting = [bridge for bridge, control in found.items() if control and control & _REDIRECTS]
    if redirecting:
        fix = "; ".join(f"sudo setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in redirecting)
        evidence = f"{', '.join(redirecting)} redirect traffic between cards through the CPU"
        return Check("acs", Verdict.WARN, evidence, f"{fix} (after each boot; not where VMs need isolation)")
    unknown = [bridge for bridge, control in found.items() if control is None]
    if unknown:
        evidence = f"unknown: only root can read the registers of {', '.join(unknown)}"
        return Check("acs", Verdict.WARN, evidence, "sudo kvlink doctor, or: sudo lspci -vvv | grep ACSCtl")
    return Check("acs", Verdict.PASS, f"no redirection by {len(bridges)} bridge(s) above GPUs and NICs")


def _config(root: Path, address: str) -> bytes:
    try:
        return (root / DEVICES / address / "config").read_bytes()
    except OSError:
        return b""


def acs_control(config: bytes) -> int | None:
    """Returns the ACS control register of a configuration space; 0 if there is none, None if it was truncated."""
    if len(config) < _FIRST_EXTENDED + 4:
        return None
    at, seen = _FIRST_EXTENDED, set[int]()
    while _FIRST_EXTENDED <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + _CONTROL)
            return int(control)
        at = header >> 20
    return 0
