# SPDX-License-Identifier: Apache-2.0
"""The package: what the wheel has, and the versions of Python that it names."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from pythons.interpreters import named, python, why_not
from scikit_build_core.build import build_sdist, prepare_metadata_for_build_wheel

import kvlink
from kvlink.doctor import software
from kvlink.doctor.software import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    "torch",
    "transformers",
    "cuda",
    "pyverbs",
    "cupy",
    "etcd3",
    "aetcd",
    "vllm",
    "sglang",
    "aiohttp",
    "prometheus_client",
    "opentelemetry",
)
BUILT_OF = (
    "kvlink",
    "csrc",
    "protos",
    "integrations",
    "benchmarks",
    "packaging",
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
)
PURE = ("errors", "types", "layout", "ticket", "config", "hardware.topology", "runtime.log", "tracing")

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""
IMPORT_ALL_OF_CONTROL = """
import importlib, pkgutil
import kvlink.control, kvlink.coordinator
for package in (kvlink.control, kvlink.coordinator):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def run_without(blocked: tuple[str, ...], program: str) -> None:
    """Runs `program` in a fresh interpreter in which importing any of `blocked` fails."""
    source = f"BLOCKED = {blocked!r}\n{BLOCK}\n{program}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def sources(*suffixes: str) -> Iterator[Path]:
    for folder in ("kvlink", "csrc", "benchmarks", "integrations", "protos", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "_pb2" not in path.name:
                yield path


def test_kvlink_imports_without_what_is_optional() -> None:
    run_without(OPTIONAL, "import kvlink, kvlink.integrations, kvlink.benchmarks, kvlink.cli, kvlink.doctor")


def test_the_worker_imports_without_what_is_optional() -> None:
    run_without(OPTIONAL, "import kvlink.worker, kvlink.transfer.pool, kvlink.transfer.engine")


def test_a_worker_loads_no_coordinator() -> None:
    loaded = "[name for name in sys.modules if name.startswith('kvlink.coordinator')]"
    run_without((), f"import sys, kvlink.worker; assert {loaded} == []")


def test_the_control_plane_needs_no_data_plane() -> None:
    run_without((*OPTIONAL, "numpy", "kvlink._core"), IMPORT_ALL_OF_CONTROL)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_need_the_standard_library_only(name: str) -> None:
    run_without(
        (*OPTIONAL, "numpy", "grpc", "google", "rich", "typer", "kvlink._core"), f"import kvlink.{name}"
    )


def test_the_metadata_is_complete() -> None:
    found = distribution("kvlink")
    assert found.version == kvlink.__version__
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata.get_all("License-File") == [
        "LICENSE",
        "NOTICE",
        "packaging/licenses/pybind11.txt",
        "packaging/licenses/rdma-core.txt",
    ]
    assert found.metadata["Author"] == "The kvlink authors"
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(
        found.metadata.get_all("Classifier") or ()
    )
    assert "RDMA" in (found.metadata["Keywords"] or "")
    commands = {entry.name: entry.value for entry in found.entry_points.select(group="kvlink.commands")}
    assert commands == {
        "bench": "kvlink.benchmarks:app",
        "predict": "kvlink.benchmarks.prediction.command:app",
        "report": "kvlink.benchmarks.report.command:app",
        "drain": "kvlink.integrations.router.commands.drain:app",
        "replicate": "kvlink.integrations.router.commands.replicate:app",
        "router": "kvlink.integrations.router.commands.router:app",
        "simulate": "kvlink.benchmarks.simulation.command:app",
    }
    (script,) = found.entry_points.select(group="console_scripts")
    assert callable(script.load())


def test_the_doctor_knows_every_extra() -> None:
    provided = set(distribution("kvlink").metadata.get_all("Provides-Extra") or ())
    assert {extra.name for extra in EXTRAS} == provided - {"all", "cuda12"}


def test_all_means_every_extra_that_has_wheels() -> None:
    needs = [line for line in distribution("kvlink").requires or [] if re.search(r"extra == .all.", line)]
    found = re.search(r"kvlink\[([\w,]+)\]", " ".join(needs))
    assert found
    assert set(found[1].split(",")) == {extra.name for extra in EXTRAS} - {"rdma"}


def test_the_doctor_names_the_extra_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        software, "find_spec", lambda name: None if name in ("cryptography", "pyverbs") else name
    )
    check = software.extras()
    assert check.evidence.startswith("torch, cuda, demo, router, metrics, otel; for limits of RDMA devices")
    assert "apt-get install python3-pyverbs" in check.evidence
    assert check.evidence.endswith("; for `kvlink certs`: pip install 'kvlink[certs]'")

    def without_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(software, "find_spec", without_parent)
    assert software.extras().evidence.startswith("none; for pools of tensors: pip install 'kvlink[torch]'")


def test_extras_are_not_required() -> None:
    required = [line for line in distribution("kvlink").requires or [] if "extra ==" not in line]
    assert required
    assert not [line for line in required if line.startswith(OPTIONAL)]


def test_packages_are_where_they_are_installed() -> None:
    for name in ("kvlink.integrations", "kvlink.benchmarks", "kvlink.v1", "kvlink.coordinator"):
        assert importlib.import_module(name).__file__
    assert (Path(str(kvlink.__file__)).parent / "py.typed").is_file()


def test_every_source_names_its_licence() -> None:
    marks = ("# SPDX-License-Identifier: Apache-2.0", "// SPDX-License-Identifier: Apache-2.0")
    found = list(sources(".py", ".h", ".cc", ".proto"))
    assert found
    without = [str(path) for path in found if path.read_text().split("\n", 1)[0] not in marks]
    assert not without


_MOST_LINES = 60
_LISTS = re.compile(r"\b(register_\w+|fill_api)\(")
"""Functions that are a list of what they register."""
_NOISE = re.compile(r"^ *#.*|//.*|/\*(?:.|\n)*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.MULTILINE)
_NO_FUNCTION = re.compile(r"\b(namespace|class|struct|enum|union)\b|=\s*$")


def cpp_functions(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields the first line, the number of lines of the body, and the head of each outermost function."""
    plain = _NOISE.sub(lambda noise: "\n" * noise[0].count("\n"), text)
    opened: list[bool] = []
    begun, since, line = (0, ""), 0, 1
    for at in (match.start() for match in re.finditer(r"[{};]", plain)):
        line += plain.count("\n", since, at)
        if plain[at] == "{":
            head = plain[since:at]
            begins = not any(opened) and ")" in head and not _NO_FUNCTION.search(head)
            opened.append(begins)
            begun = (line, " ".join(head.split())) if begins else begun
        elif plain[at] == "}" and opened.pop():
            yield begun[0], line - begun[0] - 1, begun[1]
        since = at + 1


def python_functions(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields the same of each Python function. The signature and the docstring do not count."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            yield node.lineno, (node.end_lineno or 0) - first.lineno + 1, node.name


@pytest.mark.parametrize(
    ("suffixes", "functions"),
    [((".py",), python_functions), ((".h", ".cc"), cpp_functions)],
    ids=["Python", "C++"],
)
def test_no_function_is_longer_than_a_screen(
    suffixes: tuple[str, ...], functions: Callable[[str], Iterator[tuple[int, int, str]]]
) -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line} {name[-80:]} has {lines} lines"
        for path in sources(*suffixes)
        for line, lines, name in functions(path.read_text())
        if lines > _MOST_LINES and not _LISTS.search(name)
    ]


def test_the_lines_of_functions_are_counted() -> None:
    body = "".join(f"  a[{number}] = '}}';  // {{\n" for number in range(61))
    text = f"namespace n {{\nstruct S {{\n  int b = 1;\n}};\nvoid f(int a) {{\n{body}}}\nint g() {{ return 1; }}\n}}\n"
    assert [(line, lines) for line, lines, _ in cpp_functions(text)] == [(5, 61), (68, -1)]
    [(_, lines, name)] = python_functions(
        'def f(\n    a: int,\n) -> None:\n    """Doc."""\n    a += 1\n    a += 1\n'
    )
    assert (lines, name) == (2, "f")


def test_no_generated_file_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "*_pb2*", "*.so"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout; run in a clone")
    assert listed.stdout == ""


def test_a_source_distribution_has_all_that_a_wheel_is_built_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = subprocess.run(["git", "ls-files", *BUILT_OF], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout; run in a clone")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(listed.stdout.split()) <= held
    assert not [
        name for name in held if name.endswith((".so", ".pyc")) or name.startswith(("build/", ".venv/"))
    ]


def test_the_image_copies_all_that_a_wheel_is_built_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build needs a container engine; what it copies from the repository, and the metadata of it, does not."""
    steps = (ROOT / "integrations/deploy/image/Containerfile").read_text()
    copied = [step.split() for step in re.findall(r"^COPY (?!--)(.*)$", steps, re.MULTILINE)]
    for *given, into in copied:
        for name in given:
            place = tmp_path / into / name if into == "./" else tmp_path / into
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(ROOT / name, place)
    assert {name for *given, _ in copied for name in given} >= set(BUILT_OF)
    monkeypatch.chdir(tmp_path)
    prepare_metadata_for_build_wheel("metadata")
    assert list(tmp_path.glob("metadata/*/METADATA"))


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_build_without_rdma_happens_only_when_asked_for(tmp_path: Path, asked_for: bool) -> None:
    without_headers = ["-DKVLINK_PYTHON=OFF", "-DKVLINK_VERBS_INCLUDE="]
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), *without_headers]
    command += ["-DKVLINK_VERBS=OFF"] if asked_for else []
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == asked_for, done.stderr
    assert ("apt-get install\n  libibverbs-dev librdmacm-dev" in done.stderr) != asked_for, done.stderr


def test_a_build_without_libfabric_says_so_by_name(tmp_path: Path) -> None:
    """It links without the files that are left out: tests/unit/test_rooms.py."""
    options = ["-DKVLINK_PYTHON=OFF", "-DKVLINK_FABRIC=OFF"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tmp_path), *options], capture_output=True, check=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    compiled = {Path(each["file"]).relative_to(ROOT).as_posix(): each["command"] for each in commands}
    of_fabric = {Path(name).name for name in compiled if name.startswith("csrc/transports/fabric/")}
    assert of_fabric == {"post_queue.cc", "protocol.cc"}
    assert "-DKVLINK_NO_FABRIC" in compiled["csrc/transports/registry.cc"]


NAMES = ROOT / "tests" / "pythons" / "names.py"


def found_by(interpreter: str, *folders: Path) -> str:
    call = [interpreter, "-I", str(NAMES), *map(str, folders)]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout


def interpreter_of(version: str) -> str:
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(why_not(version))
    return interpreter


@pytest.mark.parametrize("version", named())
def test_the_standard_library_has_what_the_sources_use(version: str) -> None:
    folders = [ROOT / name for name in ("kvlink", "integrations", "benchmarks")]
    assert found_by(interpreter_of(version), *folders).strip() == ""


def test_the_oldest_is_that_of_the_metadata_and_of_the_checkers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    oldest = named()[0]
    assert f'requires-python = ">={oldest}"' in text
    assert f'python_version = "{oldest}"' in text
    assert f'target-version = "py{oldest.replace(".", "")}"' in text


LATER = """import asyncio
import tomllib
from typing import Any, Self
async def wait() -> None:
    async with asyncio.timeout(1):
        raise ExceptionGroup("", [])
if sys.version_info >= (3, 11):
    from typing import Never
try:
    from typing import LiteralString
except ImportError:
    LiteralString = str
"""


def test_what_came_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(LATER)
    (tmp_path / "b.py").write_text("type A = int\n")
    found = found_by(interpreter_of("3.10"), tmp_path).replace(f"{tmp_path}/", "").splitlines()
    assert [line.partition(": ")[0] for line in found] == ["a.py:2", "a.py:3", "a.py:5", "a.py:6", "b.py:1"]


def test_what_never_was_is_found(tmp_path: Path) -> None:
    source = "import os.path\nimport json as j\nos.path.nothing\nj.nothing\nno_such_name\n"
    (tmp_path / "a.py").write_text(source)
    assert len(found_by(sys.executable, tmp_path).splitlines()) == 3
