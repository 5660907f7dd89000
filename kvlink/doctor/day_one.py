# SPDX-License-Identifier: Apache-2.0
"""Runs everything that one new GPU or RDMA host can say about itself, and writes it into one file to send back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlink.errors import ConfigError

_MOST_OUTPUT_BYTES = 256 << 10
_KVLINK = (sys.executable, "-m", "kvlink")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the name that the report gives it, and the seconds after which it is ended."""

    title: str
    command: tuple[str, ...]
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """Holds what a step did. `status` is None if the program is absent or was ended."""

    step: Step
    status: int | None
    seconds: float
    output: str


def steps(num_gpus: int, nics: Sequence[str]) -> Iterator[Step]:
    """Yields the commands for a host with so many GPUs and these RDMA devices, facts first and measurements last."""
    for title, command in {
        "kernel": ("uname", "-a"),
        "kernel options": ("cat", "/proc/cmdline"),
        "modules": ("grep", "-E", "nvidia|gdrdrv|mlx|ib_|rdma", "/proc/modules"),
        "RDMA statistics before": ("rdma", "statistic"),
        "NICs": ("ibv_devinfo", "-v"),
        "GPU driver": ("cat", "/proc/driver/nvidia/version"),
        "GPU topology": ("nvidia-smi", "topo", "-m"),
        "GPU memory and BAR1": ("nvidia-smi", "-q", "-d", "MEMORY"),
    }.items():
        yield Step(title, command)
    yield _own("version", "version")
    yield _own("doctor", "doctor", "--json")
    yield _own("topology", "topology", "--json")
    yield _own("transports", "bench", "pull", "--transport", "all", "--json")
    if num_gpus:
        yield _own("GPU pulls", "bench", "gpu", "--json")
    if num_gpus > 1:
        yield _own("GPU pulls between two GPUs", "bench", "gpu", "--gpus", "0,1", "--json")
    if num_gpus and nics:
        yield _own("GPUDirect, compared byte by byte", "doctor", "--gpudirect", "--json")
        for block_bytes in ("4096", "65536"):
            path = ("--path", "gpudirect,bounce", "--block-bytes", block_bytes, "--json")
            yield _own(f"GPU over RDMA, blocks of {block_bytes} bytes", "bench", "pull", *path)
    if nics:
        yield Step("RDMA statistics after", ("rdma", "statistic"))


def run(step: Step) -> Result:
    """Runs a step. Never raises: an absent program or one that hangs is a result, too."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            step.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=step.limit_s,
        )
        status, output = done.returncode, done.stdout
    except FileNotFoundError:
        status, output = None, b"not installed"
    except OSError as error:
        status, output = None, str(error).encode()
    except subprocess.TimeoutExpired as expired:
        status, output = None, (expired.stdout or b"") + b"\nended after its time limit"
    text = output[-_MOST_OUTPUT_BYTES:].decode(errors="replace").strip()
    return Result(step, status, time.monotonic() - began, text)


def report(results: Sequence[Result], running: Step | None = None) -> str:
    """Returns the file's text: a table of the steps, then the output of each.

    It says that it is not complete if it is written before the step `running`.
    """
    lines = ["# kvlink day-one report", ""]
    if running is not None:
        lines += [f'Not complete: the run was interrupted in the step "{running.title}".', ""]
    lines += ["| step | exit status | seconds |", "|---|---|---|"]
    lines += [f"| {each.step.title} | {_shown(each)} | {each.seconds:.1f} |" for each in results]
    for each in results:
        command = " ".join(each.step.command).replace(" ".join(_KVLINK), "kvlink")
        lines += ["", f"## {each.step.title}", "", f"`{command}`", "", "````", each.output, "````"]
    return "\n".join(lines) + "\n"


def write(path: Path, found: Sequence[Step], run: Callable[[Step], Result] = run) -> Iterator[str]:
    """Runs the steps, yields a line for each, and writes the report. Raises ConfigError if the file exists.

    The report is on the disk before each step, so that it names a step that stops this process or the host.
    """
    try:
        path.open("x").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file by --report") from None
    results: list[Result] = []
    for step in found:
        _replace(path, report(results, step))
        results.append(run(step))
        yield f"{_shown(results[-1]):>12}  {results[-1].seconds:6.1f} s  {step.title}"
    _replace(path, report(results))
    failed = sum(each.status not in (0, None) for each in results)
    yield f"{path} has {len(results)} steps, of which {failed} failed. Please send it back."


def _replace(path: Path, text: str) -> None:
    """Writes the file so that a crash leaves the old text or the new one. Nobody else can have made the new file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def _own(title: str, *words: str) -> Step:
    return Step(title, (*_KVLINK, *words), limit_s=600.0)


def _shown(result: Result) -> str:
    if result.status is None:
        return result.output.rpartition("\n")[2][:40]
    return str(result.status)
