# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ tests and the simulation with mutants, and runs those tests that reach one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mutation.cpp_mutants import Site, rewritten
from mutation.mutants import Outcome
from mutation.python_tests import ROOT, patience_s

SIMULATION = "simulation"
_MODEL = re.compile(r"Model")


class Test(NamedTuple):
    """A test of GoogleTest, or the simulation with the gate's seeds."""

    name: str
    kind: str
    seconds: float
    reached: frozenset[int]


class Build:
    """A build of its own in build/mutation, with a copy of csrc, and the tests in some folders of tests/cpp."""

    def __init__(self, folder: Path, tests: Iterable[str]) -> None:
        self._tree, self._build, self._reached = folder / "tree", folder / "cpp", folder / "reached"
        shutil.rmtree(self._tree / "tests", ignore_errors=True)
        wanted = set(tests)
        files = [path for path in (ROOT / "tests" / "cpp").rglob("*.*") if path.is_file()]
        links = [
            str(path.relative_to(ROOT)) for path in files if path.suffix == ".h" or path.parent.name in wanted
        ]
        for link in (*links, "CMakeLists.txt", "kvlink", "tests/simulation", "tests/fake_cuda"):
            (self._tree / link).parent.mkdir(parents=True, exist_ok=True)
            if not (self._tree / link).is_symlink():
                (self._tree / link).symlink_to(ROOT / link)

    def _copy(self, rewritten_files: dict[str, str]) -> None:
        """Writes what differs, so that ninja compiles nothing else."""
        for path in (path for path in (ROOT / "csrc").rglob("*") if path.is_file()):
            file = str(path.relative_to(ROOT))
            text = rewritten_files.get(file, path.read_text())
            copied = self._tree / file
            if not copied.exists() or copied.read_text() != text:
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_text(text)
        for path in (self._tree / "csrc").rglob("*.*"):
            if path.is_file() and not (ROOT / path.relative_to(self._tree)).exists():
                path.unlink()
        header = self._tree / "csrc" / "mutation" / "switch.h"
        header.parent.mkdir(exist_ok=True)
        shutil.copy2(Path(__file__).parent / "switch.h", header)

    def make(self, chosen: Sequence[Site]) -> dict[int, Site]:
        """Builds with those mutants that compile, and returns them by number."""
        numbers = dict(enumerate(chosen, 1))
        while True:
            files: dict[str, list[tuple[int, Site]]] = {}
            for number, site in numbers.items():
                files.setdefault(site.mutant.file, []).append((number, site))
            self._copy({file: rewritten((ROOT / file).read_text(), file, of) for file, of in files.items()})
            errors = self._check(files) or self._compile()
            if not errors:
                return numbers
            wrong = self._blamed(errors, numbers)
            if not wrong:
                raise SystemExit(errors)
            numbers = {number: site for number, site in numbers.items() if number not in wrong}

    @staticmethod
    def _blamed(errors: str, numbers: dict[int, Site]) -> set[int]:
        """Those mutants in which there are errors; else those that an error mentions or whose line has one."""
        found = {
            int(each) for each in re.findall(r"^mutant:(\d+):[\d:]* (?:fatal )?error", errors, re.MULTILINE)
        }
        if not found & numbers.keys():
            found = {int(each) for each in re.findall(r"\bmutant:(\d+):", errors)}
            for file, line in re.findall(r"^(\S+\.(?:cc|h)):(\d+):[\d:]* error", errors, re.MULTILINE):
                near = (n for n, each in numbers.items() if each.mutant.file == file)
                found |= {number for number in near if abs(numbers[number].mutant.line - int(line)) < 3}
        return found & numbers.keys()

    def _check(self, files: Iterable[str]) -> str:
        """Finds most errors sooner than a build does, in the sources beside the files."""
        folders = sorted({Path(file).parent for file in files})
        sources = [path for folder in folders for path in sorted((self._tree / folder).glob("*.cc"))]
        command = ["c++", "-std=c++20", "-fsyntax-only", "-fmax-errors=0", "-I", str(self._tree / "csrc")]
        checked = (
            subprocess.run([*command, str(each)], capture_output=True, text=True, check=False)
            for each in sources
        )
        return "".join(each.stderr for each in checked if each.returncode)

    def _compile(self) -> str:
        environment = {**os.environ, "CCACHE_BASEDIR": str(self._tree), "CCACHE_NOHASHDIR": "1"}
        if not (self._build / "build.ninja").exists():
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            options = [
                "-DKVLINK_PYTHON=OFF",
                "-DKVLINK_TESTS=ON",
                "-DCMAKE_BUILD_TYPE=None",
                "-DCMAKE_UNITY_BUILD=ON",
                *launcher,
            ]
            flags = "-DCMAKE_CXX_FLAGS=-O1 -g0 -DNDEBUG"
            command = ["cmake", "-S", str(self._tree), "-B", str(self._build), "-G", "Ninja", *options, flags]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        made = subprocess.run(
            ["ninja", "-C", str(self._build), "-k", "0", "kvlink_tests", "kvlink_simulation"], env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return made.stdout if made.returncode else ""

    def _run(self, command: Sequence[str], mutant: int, seconds: float) -> tuple[int | None, str]:
        environment = {**os.environ, "KVLINK_MUTANT": str(mutant), "KVLINK_MUTATION_REACHED": ""}
        if mutant:
            del environment["KVLINK_MUTATION_REACHED"]
        else:
            environment["KVLINK_MUTATION_REACHED"] = str(self._reached)
        process = subprocess.Popen(
            [str(self._build / command[0]), *command[1:]], env=environment, cwd=self._build, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None, ""
        return process.returncode, output

    def record(self) -> list[Test]:
        """Runs each test alone, and the simulation, and returns what each reaches."""
        listed = self._run(["kvlink_tests", "--gtest_list_tests"], -1, 60)[1]
        names, suite = [], ""
        for line in listed.splitlines():
            word = line.split("#")[0].strip()
            if line.startswith(" "):
                names.append(suite + word)
            elif word.endswith("."):
                suite = word
        tests = [self._recorded(name) for name in names if "DISABLED" not in name]
        return [test for test in [*tests, self._recorded(SIMULATION)] if test]

    def _recorded(self, name: str) -> Test | None:
        self._reached.unlink(missing_ok=True)
        began = time.monotonic()
        if self._run(_command([name]), 0, 600)[0] != 0:
            print(f"left out, since it fails without a mutant: {name}", flush=True)
            return None
        reached = self._reached.read_text().split() if self._reached.exists() else ()
        kind = SIMULATION if name == SIMULATION else "model" if _MODEL.search(name) else "unit"
        return Test(name, kind, time.monotonic() - began, frozenset(map(int, reached)))

    def try_one(self, number: int, tests: Iterable[Test]) -> Outcome:
        """Returns how these tests, which are of one kind, end with a mutant."""
        reaching = sorted((test for test in tests if number in test.reached), key=lambda test: test.seconds)
        if not reaching:
            return Outcome("unreached")
        seconds = patience_s(sum(test.seconds for test in reaching))
        status, output = self._run(_command([test.name for test in reaching]), number, seconds)
        failed = re.search(r"^\[  FAILED  \] (\S+)", output, re.MULTILINE) or re.search(
            r"^(seed .*)", output, re.MULTILINE
        )
        running = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        name = failed[1] if failed else running[-1] if running else ""
        return Outcome(
            {None: "timeout", 0: "survived", 1: "killed"}.get(status, "crashed"), name if status else ""
        )


def _command(names: Sequence[str]) -> list[str]:
    if names == [SIMULATION]:
        return ["kvlink_simulation"]
    return ["kvlink_tests", "--gtest_fail_fast", f"--gtest_filter={':'.join(names)}"]
