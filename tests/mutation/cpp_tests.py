# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ tests, the simulation and the memory model with mutants, and runs those tests that reach one.

The sources of a module, the tests in its folders and both programs are compiled with the sources that have mutants.
All else is linked from the archive that `make build` has made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mutation.cpp_mutants import Site, rewritten
from mutation.mutants import Outcome
from mutation.python_tests import ROOT, patience_s

SIMULATION, MEMORY_MODEL = "simulation", "memory model"
_PROGRAMS = {"kvlink_simulation": SIMULATION, "kvlink_memory_model": MEMORY_MODEL}
"""Programs, each with its name as a test."""
_FAILED = re.compile(r"^\[  FAILED  \] (\S+)|^(seed .*)|^ +(\([a-i]\) .*)", re.MULTILINE)


class Test(NamedTuple):
    """A test of GoogleTest, the simulation with the gate's seeds, or the memory model."""

    name: str
    kind: str
    seconds: float
    reached: frozenset[int]


class Build:
    """The programs with the mutants of a module. `folders` are those below tests/cpp whose tests reach them."""

    def __init__(self, folder: Path, folders: Iterable[str], kinds: Sequence[str]) -> None:
        self._made, self._sources, self._reached = folder / "cpp", folder / "csrc", folder / "reached"
        self._folders, self._kinds = set(folders), kinds
        archives = sorted(ROOT.glob("build/cp*/libkvlink_core.a"), key=lambda path: path.stat().st_mtime)
        if not archives:
            raise SystemExit("there is no build/cp*/libkvlink_core.a: run make build")
        self._archive = str(archives[-1])
        options = ["-DKVLINK_PYTHON=OFF", "-DKVLINK_TESTS=ON", f"-DKVLINK_CORE={self._archive}"]
        subprocess.run(
            ["cmake", "-S", ROOT, "-B", self._made, "-G", "Ninja", *options],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(
            ["cmake", "--build", self._made, "--target", "kvlink_fake_cuda"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self._commands = json.loads((self._made / "compile_commands.json").read_text())
        shutil.rmtree(self._sources, ignore_errors=True)
        (self._sources / "mutation").mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "switch.h", self._sources / "mutation")

    def make(self, chosen: Sequence[Site]) -> dict[int, Site]:
        """Builds with those mutants that compile, and returns them by number."""
        numbers = dict(enumerate(chosen, 1))
        while True:
            files: dict[str, list[tuple[int, Site]]] = {site.mutant.file: [] for site in chosen}
            for number, site in numbers.items():
                files[site.mutant.file].append((number, site))
            for file, of in files.items():
                path = self._sources.parent / file
                path.parent.mkdir(exist_ok=True)
                path.write_text(rewritten((ROOT / file).read_text(), file, of))
            wrong = self._compile_all(files.keys(), numbers)
            if not wrong:  # those that cross another one are not in the text
                texts = "".join((self._sources.parent / file).read_text() for file in files)
                inside = {int(each) for each in re.findall(r"::mutation::\w+\((\d+)", texts)}
                return {number: site for number, site in numbers.items() if number in inside}
            numbers = {number: site for number, site in numbers.items() if number not in wrong}

    def _compile_all(self, files: Iterable[str], numbers: dict[int, Site]) -> set[int]:
        """Compiles the sources of a module, then the rest, and links. Returns mutants that do not compile."""
        rooms = {str(Path(file).parent) for file in files}
        # Sources of the product are linked from the archive, and have no entry but in the simulation's.
        plain = next(each for each in self._commands if "kvlink_tests.dir" in each["output"])
        sources = [path for room in sorted(rooms) for path in sorted((ROOT / room).glob("*.cc"))]
        jobs = [("kvlink_tests", plain, str(path.relative_to(ROOT))) for path in sources]
        for each in self._commands:
            file = self._file(each)
            tested = Path(file).parent.name in self._folders or not file.endswith("_test.cc")
            program = next((name for name in _PROGRAMS if f"{name}.dir" in each["output"]), "")
            if program:
                if _kind(_PROGRAMS[program]) in self._kinds:
                    jobs.append((program, each, file))
            elif file.startswith("tests/cpp/") and tested:
                jobs.append(("kvlink_tests", each, file))
        made: dict[str, list[str]] = {}
        wrong: set[int] = set()
        for program, entry, file in jobs:
            if not (wrong and entry is not plain):
                target, errors = self._compile(entry, file, program)
                made.setdefault(program, []).append(target)
                wrong |= self._blamed(errors, numbers) if errors else set()
        for program, objects in made.items() if not wrong else ():
            libraries = [self._archive, "-lgtest_main", "-lgtest"] if program == "kvlink_tests" else []
            command = ["c++", "-o", str(self._made / program), *objects, *libraries, "-lpthread", "-ldl"]
            subprocess.run(command, check=True)
        return wrong

    @staticmethod
    def _file(entry: dict[str, str]) -> str:
        return (
            str(Path(entry["file"]).resolve().relative_to(ROOT))
            if entry["file"].startswith(str(ROOT))
            else ""
        )

    def _compile(self, entry: dict[str, str], file: str, program: str) -> tuple[str, str]:
        """Compiles a file as the entry's is, and returns the object and the errors."""
        words = [each for each in shlex.split(entry["command"]) if not each.startswith("-Werror")]
        words = words[: words.index("-o")]
        target = str(self._made / f"{program}+{file.replace('/', '+')}.o")
        copied = self._sources.parent / file
        launcher = ["ccache"] if shutil.which("ccache") else []
        words = [*launcher, words[0], "-I", str(self._sources), *words[1:], "-I", str(ROOT / "csrc")]
        source = copied if copied.exists() else ROOT / file
        level = [] if program in _PROGRAMS else ["-O1"]
        command = [*words, "-w", *level, "-g0", "-fmax-errors=0", "-o", target, "-c", str(source)]
        ended = subprocess.run(
            command, cwd=self._made, env={**os.environ, "CCACHE_BASEDIR": str(ROOT)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return target, ended.stderr if ended.returncode else ""

    @staticmethod
    def _blamed(errors: str, numbers: dict[int, Site]) -> set[int]:
        """Returns the mutants with errors; else those that an error mentions or whose line has one."""
        found = {
            int(each) for each in re.findall(r"^mutant:(\d+):[\d:]* (?:fatal )?error", errors, re.MULTILINE)
        }
        if not found & numbers.keys():
            found = {int(each) for each in re.findall(r"\bmutant:(\d+):", errors)}
            for file, line in re.findall(r"^(\S+\.(?:cc|h)):(\d+):[\d:]* error", errors, re.MULTILINE):
                near = (n for n, each in numbers.items() if each.mutant.file == file)
                found |= {number for number in near if abs(numbers[number].mutant.line - int(line)) < 3}
        if not found & numbers.keys():
            raise SystemExit(errors)
        return found & numbers.keys()

    def _run(self, command: Sequence[str], mutant: int, seconds: float) -> tuple[int | None, str]:
        recording = {"KVLINK_MUTATION_REACHED": str(self._reached)} if mutant == 0 else {}
        process = subprocess.Popen(
            [str(self._made / command[0]), *command[1:]], text=True, start_new_session=True, errors="replace",
            env={**os.environ, "KVLINK_MUTANT": str(mutant), **recording}, cwd=self._made,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None, ""
        return process.returncode, output

    def record(self) -> list[Test]:
        """Runs each test of the folders alone, and both programs, and returns what each reaches."""
        texts = [
            path.read_text() for each in self._folders for path in (ROOT / "tests/cpp" / each).glob("*.cc")
        ]
        suites = {name for text in texts for name in re.findall(r"TEST(?:_F|_P)?\((\w+),", text)}
        listed = self._run(["kvlink_tests", "--gtest_list_tests"], -1, 60)[1]
        names, suite = [], ""
        for line in listed.splitlines():
            word = line.split("#")[0].strip()
            if not line.startswith(" "):
                suite = word if set(word.replace(".", "").split("/")) & suites else ""
            elif suite and "DISABLED" not in word:
                names.append(suite + word)
        wanted = [name for name in [*names, *_PROGRAMS.values()] if _kind(name) in self._kinds]
        return [test for test in map(self._recorded, wanted) if test]

    def _recorded(self, name: str) -> Test | None:
        self._reached.unlink(missing_ok=True)
        began = time.monotonic()
        if self._run(_command([name]), 0, 600)[0] != 0:
            print(f"left out, since it fails without a mutant: {name}", flush=True)
            return None
        reached = self._reached.read_text().split() if self._reached.exists() else ()
        return Test(name, _kind(name), time.monotonic() - began, frozenset(map(int, reached)))

    def try_one(self, number: int, tests: Iterable[Test]) -> Outcome:
        """Returns how these tests, which are of one kind, end with a mutant."""
        reaching = sorted((test for test in tests if number in test.reached), key=lambda test: test.seconds)
        if not reaching:
            return Outcome("unreached")
        programs = [[test] for test in reaching if test.name in _PROGRAMS.values()]
        for together in filter(None, ([test for test in reaching if [test] not in programs], *programs)):
            seconds = patience_s(sum(test.seconds for test in together))
            status, output = self._run(_command([test.name for test in together]), number, seconds)
            if status != 0:
                break
        failed = _FAILED.search(output)
        running = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        name = failed[failed.lastindex or 0] if failed else running[-1] if running else ""
        return Outcome(
            {None: "timeout", 0: "survived", 1: "killed"}.get(status, "crashed"), name if status else ""
        )


def _kind(name: str) -> str:
    return (
        SIMULATION if name == SIMULATION else "model" if name == MEMORY_MODEL or "Model" in name else "unit"
    )


def _command(names: Sequence[str]) -> list[str]:
    for program, name in _PROGRAMS.items():
        if names == [name]:
            return [program]
    return ["kvlink_tests", "--gtest_fail_fast", f"--gtest_filter={':'.join(names)}"]
