# SPDX-License-Identifier: Apache-2.0
"""Imports each module of kvlink, its integrations and benchmarks, from the sources and without the built extensions.

Stubs stand in for the extensions. Modules that need an inference engine or a device's package are counted.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_MAY_BE_ABSENT = {
    *(
        "aiconfigurator",
        "cuda",
        "grpc_tools",
        "hypothesis",
        "lmcache",
        "mooncake",
        "mori",
        "mpi4py",
        "nixl",
        "nixl_cu12",
    ),
    *("psutil", "pytest", "pyverbs", "sglang", "torch", "transformers", "uccl", "vllm", "zmq"),
}


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = name in ("kvlink._core", "kvlink._bench")
        return importlib.machinery.ModuleSpec(name, self) if is_ours else None

    def exec_module(self, module: ModuleType) -> None:
        """Runs the stub. Its constants have no value, and its functions return nothing, but one that a module calls."""
        place = ROOT / module.__name__.replace(".", "/")
        stub = place / "__init__.pyi" if place.is_dir() else place.with_suffix(".pyi")
        source = "from __future__ import annotations\n" + stub.read_text()
        exec(compile(source, str(stub), "exec"), module.__dict__)
        vars(module)["prior_cost"] = lambda transport: (1.0, 1.0, 1.0)
        for owner in (module, *(one for one in vars(module).values() if isinstance(one, type))):
            for name in getattr(owner, "__annotations__", {}):
                if not hasattr(owner, name):
                    setattr(owner, name, 0)


def _sources(place: Path) -> None:
    """Links the three folders as they are installed."""
    (place / "kvlink").mkdir()
    for entry in (ROOT / "kvlink").iterdir():
        if not entry.name.endswith(".so"):
            (place / "kvlink" / entry.name).symlink_to(entry)
    for name in ("integrations", "benchmarks"):
        (place / "kvlink" / name).symlink_to(ROOT / name)
    (place / "kvlink-0.dist-info").mkdir()
    (place / "kvlink-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvlink\nVersion: 0\n"
    )


def _names(place: Path) -> list[str]:
    found = []
    for folder in (place / "kvlink", *(place / "kvlink").iterdir()):
        pattern = "*.py" if folder == place / "kvlink" else "**/*.py"
        found += [path.relative_to(place) for path in folder.glob(pattern) if folder.is_dir()]
    return sorted(
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in found
        if path.stem != "__main__" and all(part.isidentifier() for part in path.with_suffix("").parts)
    )


def main() -> int:
    """Imports all. Returns how many failed."""
    imported, absent, failed = 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        _sources(Path(place))
        sys.path.insert(0, place)
        sys.meta_path.insert(0, _Stubs())
        for name in _names(Path(place)):
            try:
                importlib.import_module(name)
                imported += 1
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in _MAY_BE_ABSENT:
                    absent += 1
                else:
                    failed += 1
                    print(f"{name}: {error}")
            except BaseException as error:
                failed += 1
                line = traceback.format_exception_only(type(error), error)[-1].strip()
                print(f"{name}: {line}")
    print(
        f"Python {sys.version.split()[0]}: {imported} modules imported, {absent} need the packages of an engine or a "
        f"device, {failed} failed"
    )
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
