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
_LOOP = "tests/loops/test_loops.py::test_a_loop_goes_on_after_an_exception_that_nobody_expects"
_SESSION = (
    *(f"tests/control/test_{name}.py" for name in ("session", "beats", "refused_offers", "status")),
    f"{_LOOP}[session]",
    f"{_LOOP}[session settles]",
)
_ETCD = (
    f"tests/control/test_{name}.py" for name in ("etcd_upkeep", "store_health", "etcd_history", "given_back")
)
_CONTRACT = tuple(f"tests/control_simulation/test_{name}.py" for name in ("etcd_contract", "simulated_quota"))
_STORES = ("tests/coordinator", "tests/control/store", *_ETCD, *_CONTRACT)


def _in_kinds(*unit: str) -> dict[str, tuple[str, ...]]:
    return {"unit": unit, "simulation": _SIMULATION}


MODULES = {
    "lease": Module(("csrc/lease/*",), 90, ("lease",)),
    "plan": Module(("csrc/plan/*",), 90, ("plan",)),
    "engine": Module(("csrc/engine/*",), 90, ("engine", "staging", "lease")),
    "staging": Module(("csrc/staging/*",), 80, ("staging", "engine")),
    "stores": Module(("kvlink/coordinator/store/**/*.py",), 90, tests=_in_kinds(*_STORES)),
    "session": Module(
        ("kvlink/control/session.py", "kvlink/control/beats.py"), 90, tests=_in_kinds(*_SESSION)
    ),
    "coordinator": Module(
        ("kvlink/coordinator/*.py",), 80, tests=_in_kinds("tests/coordinator", "tests/control/test_co*.py")
    ),
    "control": Module(
        ("kvlink/control/**/*.py",), 80, tests={"unit": ("tests/control",), "simulation": _SIMULATION}
    ),
    "worker": Module(("kvlink/worker/**/*.py",), 80, tests={"unit": ("tests/worker", "tests/cli")}),
    "transfer": Module(("kvlink/transfer/**/*.py",), 80, tests={"unit": ("tests/transfer", "tests/worker")}),
    "vllm": Module(("integrations/vllm/**/*.py",), 80, tests={"unit": ("tests/integrations/test_vllm*.py",)}),
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
