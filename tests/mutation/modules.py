# SPDX-License-Identifier: Apache-2.0
"""The modules that have a score, and the gate's tests for each, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Module(NamedTuple):
    """Sources, without those of an earlier module, and where their tests are."""

    sources: tuple[str, ...]
    bar: int
    """The score in percent below which a run of the module fails."""
    folders: tuple[str, ...] = ()
    """For C++, those of tests/cpp whose tests are compiled. Of these run those that reach the mutant."""
    tests: Mapping[str, tuple[str, ...]] = {}
    """Paths by kind, the fastest kind first, for Python."""

    def files(self) -> list[str]:
        """The source files of the module that exist now."""
        found = [path for source in self.sources for path in ROOT.glob(source)]
        return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix in (".py", ".cc", ".h"))


_SIMULATION = ("tests/control_simulation/test_control_simulation.py",)
_CONTROL = (
    *("tests/control/store", "tests/control/test_[!im]*.py", "tests/coordinator"),
    *("tests/loops", "tests/metrics", "tests/tracing/test_[!p]*.py"),
    *(f"tests/control_simulation/test_{name}.py" for name in ("etcd_contract", "simulated_quota")),
)
"""Without those that count instructions and bytes of another process."""
_OF_CONTROL = {"unit": _CONTROL, "simulation": _SIMULATION}
_WORKER = (
    *("tests/worker", "tests/transfer", "tests/unit", "tests/smoke"),
    *("tests/loops", "tests/metrics", "tests/tracing/test_[!p]*.py"),
)
_OF_WORKER = {"unit": _WORKER}
_VLLM = (
    "tests/loops",
    *(
        f"tests/integrations/test_{name}*.py"
        for name in ("vllm", "model_identity", "request_guard", "entry_names", "block_id_walk")
    ),
)


_OF_VLLM = {"unit": _VLLM}

MODULES = {
    "lease": Module(("csrc/lease/*",), 90, ("lease",)),
    "plan": Module(("csrc/plan/*",), 90, ("plan",)),
    "engine": Module(("csrc/engine/*",), 90, ("engine", "staging", "lease")),
    "staging": Module(("csrc/staging/*",), 80, ("staging", "engine")),
    "stores": Module(
        ("kvlink/coordinator/store/**/*.py",),
        90,
        tests=_OF_CONTROL,
    ),
    "session": Module(
        ("kvlink/control/session.py", "kvlink/control/beats.py"),
        90,
        tests=_OF_CONTROL,
    ),
    "coordinator": Module(("kvlink/coordinator/*.py",), 80, tests=_OF_CONTROL),
    "control": Module(("kvlink/control/**/*.py",), 80, tests=_OF_CONTROL),
    "worker": Module(("kvlink/worker/**/*.py",), 80, tests=_OF_WORKER),
    "transfer": Module(("kvlink/transfer/**/*.py",), 80, tests=_OF_WORKER),
    "vllm": Module(("integrations/vllm/**/*.py",), 80, tests=_OF_VLLM),
}


def files_of(name: str) -> list[str]:
    """The files of a module that no earlier one has."""
    taken: set[str] = set()
    for other, module in MODULES.items():
        files = [file for file in module.files() if file not in taken]
        if other == name:
            return files
        taken.update(files)
    raise KeyError(name)
