# SPDX-License-Identifier: Apache-2.0
"""Says how to install the other libraries: `make peers` in a checkout, commands beside an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import join, quote
from typing import Any

from .modes import MODES

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[1]


def python_of(peer: str, environments: Path) -> Path:
    """Returns the interpreter of a peer's environment, which may not exist."""
    return environments / peer / "bin" / "python"


def advice(rows: Iterable[Mapping[str, Any]], environments: Path) -> str:
    """Returns how to install the peers that the rows of a contest miss, or "" if they miss none."""
    tried = {row["peer"] for row in rows if "why_not" in row} & {mode.peer for mode in MODES}
    missing = sorted(peer for peer in tried if not python_of(peer, environments).exists())
    if not missing:
        return ""
    lines = (
        ["make peers"] if (_CHECKOUT / ".ci" / "peers").exists() else list(_commands(missing, environments))
    )
    return "\n    ".join([f"not installed: {', '.join(missing)}; to compare with them, run", *lines])


def _commands(peers: Iterable[str], environments: Path) -> Iterator[str]:
    for peer in peers:
        folder, python = environments / peer, str(python_of(peer, environments))
        yield join([sys.executable, "-m", "venv", str(folder)])
        yield join([python, "-m", "pip", "install", "--no-deps", "-r", str(_HERE / "locks" / f"{peer}.lock")])
        source = _HERE / "adapters" / f"{peer}.cc"
        if source.exists():  # the adapter of UCX is in C++
            yield f"""ucx=$({quote(python)} -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libucx"""
            yield (
                f"g++ -std=c++20 -O2 -fPIC -shared {quote(str(source))} -o {quote(str(folder))}/lib/libbench-ucx.so "
                '-pthread -isystem "$ucx/include" -L"$ucx/lib" -lucp -lucs -Wl,-rpath,"$ucx/lib"'
            )
