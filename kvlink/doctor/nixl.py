# SPDX-License-Identifier: Apache-2.0
"""Finds NIXL and kvlink's backend for it, and checks whether one would load the other."""

from __future__ import annotations

import importlib.metadata
import re
from importlib.util import find_spec
from pathlib import Path

from kvlink.doctor.verdict import Check, Verdict

OLDEST, NEWEST = "1.0.0", "1.5.1"
"""The releases of NIXL that the plugin accepts; integrations/nixl/release.h has the same."""
LIBRARY = "libplugin_KVLINK.so"
_PACKAGES = ("nixl-cu12", "nixl-cu13")
_HOW = "in a checkout of kvlink: pip install packaging/nixl"


def plugin_folder() -> Path | None:
    """Returns the folder of the plugin that is installed here, for NIXL_PLUGIN_DIR."""
    spec = find_spec("kvlink_nixl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((Path(folder) for folder in folders if (Path(folder) / LIBRARY).exists()), None)


def releases() -> dict[str, str]:
    """Returns the installed packages with NIXL's libraries, and the release of each."""
    return {
        package: importlib.metadata.version(package)
        for package in _PACKAGES
        if any(importlib.metadata.distributions(name=package))
    }


def accepts(release: str) -> bool:
    """Whether the plugin loads into this release of NIXL."""
    numbers = [tuple(map(int, re.findall(r"\d+", text))) for text in (OLDEST, release, NEWEST)]
    return re.fullmatch(r"\d+\.\d+\.\d+", release) is not None and numbers[0] <= numbers[1] <= numbers[2]


def check() -> Check:
    """Checks the pair. Neither has to be there."""
    folder, found = plugin_folder(), releases()
    shown = ", ".join(f"{package} {release}" for package, release in found.items()) or "no NIXL"
    wrong = [package for package, release in found.items() if not accepts(release)]
    if folder is None:
        return Check("nixl", Verdict.PASS, f"{shown}; kvlink's backend for it is absent ({_HOW})")
    if wrong:
        fix = f"pip install {wrong[0]}=={NEWEST}"
        evidence = f"{shown}: kvlink's backend knows NIXL {OLDEST} to {NEWEST}, and refuses to load"
        return Check("nixl", Verdict.WARN, evidence, fix)
    return Check("nixl", Verdict.PASS, f"{shown}; kvlink's backend is in {folder}")
