# SPDX-License-Identifier: Apache-2.0
"""The rooms of csrc/ and what each may include. Includes are written from csrc on and go down only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "csrc"

ALLOWED = {
    "base": set(),
    "memory": {"base"},
    "transport_api": {"base", "memory"},
    "device": {"base", "memory"},
    "plan": {"base", "memory", "transport_api"},
    "lease": {"base"},
    "codec": {"base", "plan", "lease"},
    "staging": {"base", "memory", "transport_api", "device"},
    "transports": {"base", "memory", "transport_api", "lease", "transports/same_host"},
    "transports/same_host": {"base", "memory", "transport_api"},
    "transports/cuda": {"base", "memory", "transport_api", "device", "transports", "transports/same_host"},
    "transports/tcp": {"base", "memory", "transport_api", "lease", "staging", "transports"},
    "transports/verbs": {"base", "memory", "transport_api", "transports"},
    "transports/fabric": {"base", "memory", "transport_api", "transports", "transports/tcp"},
    "transports/fault": {"base", "transport_api", "transports"},
    "engine": {"base", "memory", "transport_api", "device", "plan", "lease", "staging", "transports"},
    "channel": {"base", "codec", "engine", "transports/tcp"},
    "capi": {"base", "memory", "plan", "codec", "engine", "channel"},
    "bindings": {"base", "memory", "device", "plan", "codec", "engine", "channel", "transports"},
    "bench": {"base", "memory", "device", "plan", "lease", "staging", "transports/verbs", "bindings"},
}
"""By room: the rooms that its files include, besides their own."""

CONDITIONAL = {"simulated_sync.h", "simulated_poll_timer.h"}
"""Headers of tests/simulation, which only the simulation's build finds."""


def room(path: str) -> str:
    return path.rpartition("/")[0]


def included(root: Path = ROOT) -> list[tuple[str, str]]:
    """File and header, both from the root on."""
    return [
        (file.relative_to(root).as_posix(), header)
        for file in sorted(root.rglob("*"))
        if file.suffix in (".h", ".c", ".cc")
        for header in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
        if header not in CONDITIONAL
    ]


def test_includes_are_written_from_csrc_on() -> None:
    assert [pair for pair in included() if not (ROOT / pair[1]).is_file()] == []


def test_includes_go_down_only() -> None:
    refused = [
        f"{file} includes {header}"
        for file, header in included()
        if room(header) != room(file) and room(header) not in ALLOWED[room(file)]
    ]
    assert refused == []


def test_no_allowance_is_unused() -> None:
    used = {(room(file), room(header)) for file, header in included()}
    assert {(one, other) for one, others in ALLOWED.items() for other in others} <= used


def test_headers_do_not_include_each_other() -> None:
    includes: dict[str, set[str]] = {}
    for file, header in included():
        includes.setdefault(file, set()).add(header)

    def reaches(start: str, goal: str) -> bool:
        seen, todo = set(), [start]
        while todo:
            for header in includes.get(todo.pop(), ()):
                if header == goal:
                    return True
                if header not in seen:
                    seen.add(header)
                    todo.append(header)
        return False

    assert [file for file in includes if file.endswith(".h") and reaches(file, file)] == []


def test_a_build_without_libfabric_lacks_nothing() -> None:
    """CMakeLists.txt leaves out all but the files of transports/fabric that begin with p: they need no header of it."""
    tests = included(ROOT.parent / "tests")
    in_tests = {(file, header) for file, header in tests if header.startswith("transports/fabric/")}
    kept = {file for file, _ in included() if file.startswith("transports/fabric/p")}
    in_csrc = {(file, header) for file, header in included() if file in kept and room(header) == room(file)}
    assert {header for _, header in in_tests | in_csrc} <= kept
    assert not [file for file in kept if "#include <rdma/" in (ROOT / file).read_text()]
    registry = (ROOT / "transports" / "registry.cc").read_text()
    stands_in = re.findall(r"\b(fabric_\w+)\(", registry.partition("NO_FABRIC")[2].partition("#endif")[0])
    headers = "".join((ROOT / "transports" / name).read_text() for name in ("factories.h", "registry.h"))
    assert set(stands_in) == set(re.findall(r"\b(fabric_\w+)\(", headers))


def test_the_contract_of_transports_is_small() -> None:
    contract = (ROOT / "transport_api" / "transport.h").read_text()
    virtuals = re.findall(r"^  virtual (?!~)", contract, re.MULTILINE)
    assert 0 < len(virtuals) <= 20


@pytest.mark.parametrize("name", ["pybind11", "Python.h", "_core"])
def test_only_the_bindings_know_python(name: str) -> None:
    knowing = {
        file.relative_to(ROOT).parts[0]
        for file in ROOT.rglob("*.[hc]*")
        if re.search(rf"#include <{name}|{name}\.", file.read_text())
    }
    assert knowing <= {"bindings", "bench"}
