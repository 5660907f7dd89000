# SPDX-License-Identifier: Apache-2.0
"""No call of kvlink._core keeps the GIL while it waits. The list of calls comes from the module.

Each call that may wait runs on a thread that stops in its first call of the C library that may wait, until the main
thread, which needs the GIL for that, releases it. No clock judges.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transfer.core_calls import CASES

from kvlink import _core

_HERE = Path(__file__).parent

_CONSTANT = "returns what does not change"
_ATOMIC = "reads or stores words of memory"
_MOMENT = "its lock is held for as long as a list or some counters change"
_BEFORE = "stores its arguments in an engine that has not started, which no other thread uses"
_COMPUTES = "computes, for less time than a thread keeps the GIL anyway"

EXEMPT = {
    "ChannelClient.ended": _MOMENT,
    "CompletionQueue.__init__": "opens an eventfd",
    "CompletionQueue.close": _MOMENT,
    "CompletionQueue.drain": _MOMENT,
    "CompletionQueue.fileno": _CONSTANT,
    "Connection.broken": _ATOMIC,
    "Connection.hellos": _CONSTANT,
    "Connection.idle": _ATOMIC,
    "Connection.lost_large": _CONSTANT,
    "Connection.num_missing": _CONSTANT,
    "Connection.paths": _CONSTANT,
    "Connection.pending": _ATOMIC,
    "Connection.predict_us": _MOMENT,
    "Connection.take_lost": _MOMENT,
    "Connection.token": _CONSTANT,
    "Connection.why_broken": _CONSTANT,
    "CudaMemory.address": _CONSTANT,
    "CudaMemory.bytes": _CONSTANT,
    "Engine.access": _CONSTANT,
    "Engine.add_foreign_region": _BEFORE,
    "Engine.add_pool_region": _BEFORE,
    "Engine.force_bounce": _BEFORE,
    "Engine.holds_lease": _ATOMIC,
    "Engine.left_out": _CONSTANT,
    "Engine.set_control": _BEFORE,
    "Engine.ports": _MOMENT,
    "Engine.set_staging": _BEFORE,
    "Engine.staging_refused": _CONSTANT,
    "Engine.watch_ended": _MOMENT,
    "fabric_providers": "releases the GIL as probe does, and does not wait where libfabric is absent",
    "Engine.watch_ports": _MOMENT,
    "HostMemory.address": _CONSTANT,
    "HostMemory.bytes": _CONSTANT,
    "Layout.__init__": _COMPUTES,
    "PathStats.__init__": _COMPUTES,
    "PathStats.counts": _MOMENT,
    "Plan.bytes": _CONSTANT,
    "Plan.num_ops": _CONSTANT,
    "Plan.num_segments": _CONSTANT,
    "Plan.ops": "makes an array of numpy, for tests",
    "Plan.segments": "makes an array of numpy, for tests",
    "Planner.__init__": _COMPUTES,
    "Planner.num_layers": _CONSTANT,
    "Planner.plan": "only tests and benchmarks call it; pulls plan without the GIL",
    "Pull.done": _ATOMIC,
    "Pull.empty": _COMPUTES,
    "Pull.kept_blocks": _CONSTANT,
    "Pull.proven_tokens": _ATOMIC,
    "Pull.state": _ATOMIC,
    "Pull.token": _CONSTANT,
    "RdmaOptions.__init__": _COMPUTES,
    "RdmaOptions.__repr__": _COMPUTES,
    "RelaxedCapture.__enter__": "sets a mode of this thread; the driver was loaded when the pool was made",
    "RelaxedCapture.__exit__": "sets a mode of this thread",
    "RelaxedCapture.__init__": _ATOMIC,
    "Transfer.proven_units": _ATOMIC,
    "Transfer.started_ns": _CONSTANT,
    "Transfer.state": _ATOMIC,
    "prior_cost": _COMPUTES,
    "read_ticket": _COMPUTES,
    "waiting_pull": _COMPUTES,
    "write_ticket": _COMPUTES,
}
"""The calls that need not release the GIL, and why."""

WITH_GIL = {
    "Engine.revoke, of what readers may read": [
        "pthread_mutex_lock"
    ],  # of the lease table, which nobody else has
}
"""The calls of the C library that may wait and that a binding makes with the GIL."""


def bindings() -> set[str]:
    """Returns the functions of the module, and the methods and properties of its classes."""
    names = set()
    for name, member in vars(_core).items():
        if isinstance(member, type):
            names |= {
                f"{name}.{inner}" for inner, value in vars(member).items() if _is_bound(member, inner, value)
            }
        elif callable(member):
            names.add(name)
    return names


def _is_bound(kind: type, name: str, value: Any) -> bool:
    if name == "__init__":  # every class has one; without a constructor it only refuses
        return "self: kvlink" in (kind.__init__.__doc__ or "")
    return not name.startswith("_pybind11") and (callable(getattr(kind, name)) or isinstance(value, property))


def test_each_binding_is_tried_or_exempt() -> None:
    tried = {name.partition(",")[0] for name in CASES}
    assert bindings() == {name for name in tried if not name.endswith("__del__")} | set(EXEMPT)
    assert not tried & set(EXEMPT)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what each case did: whether it stopped where only another Python thread releases it, and with the GIL."""
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    folder = tmp_path_factory.mktemp("stand-ins")
    shared = [compiler, "-shared", "-fPIC", "-pthread", "-O0"]
    preloaded = folder / "waiting_calls.so"
    subprocess.run([*shared, "-x", "c", "-o", str(preloaded), str(_HERE / "waiting_calls.c")], check=True)
    driver = [*map(str, sorted((_HERE.parent / "fake_cuda").glob("*.cc")))]
    subprocess.run([*shared, "-std=c++20", "-o", str(folder / "libcuda.so.1"), *driver], check=True)
    done = subprocess.run(
        [sys.executable, str(_HERE / "core_calls.py")],
        env={**os.environ, "LD_PRELOAD": str(preloaded), "LD_LIBRARY_PATH": str(folder)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_other_threads_run_while_it_waits(found: dict[str, Any], name: str) -> None:
    assert found[name] == {"waited": True, "with_gil": WITH_GIL.get(name, [])}
