# SPDX-License-Identifier: Apache-2.0
"""The machine of a new user: no checkout, an empty home and /opt, and a pip that finds the wheel beside its index."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_WHEELS = ROOT / "dist" / "release"


class Machine:
    """Runs shell commands in a mount namespace that hides the checkout. Commands without pip have loopback only."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
            pytest.skip("namespaces need root, util-linux and iproute2: sudo make test-newcomer")
        wheels = sorted(_WHEELS.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)
        if not wheels:
            pytest.skip("no wheel in dist/release: make release-wheel")
        self.home = folder / "home"
        self._opt, self._etc, self._shelf = folder / "opt", folder / "etc", folder / "shelf"
        for made in (self.home, self._opt, self._etc / "upper", self._etc / "work", self._shelf):
            made.mkdir(parents=True)
        shutil.copy(wheels[-1], self._shelf)
        shutil.copy(ROOT / "constraints.txt", self._shelf)
        subprocess.run(["python3", "-m", "venv", self.home / "venv"], check=True, env=self._env())

    def give(self, path: str) -> None:
        """Puts a file or folder of the repository into the working folder, where a page says that it is."""
        source, target = ROOT / path, self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of a page as it stands. Asserts that it succeeds."""
        done = subprocess.run(
            self._inside(command), env=self._env() | env, capture_output=True, text=True, timeout=1_200
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        return done

    def start(self, command: str, **env: str) -> subprocess.Popen[str]:
        """Starts a line of a page. It shares loopback with nobody."""
        return subprocess.Popen(
            self._inside(command), env=self._env() | env, stdout=subprocess.PIPE, text=True
        )

    def _inside(self, command: str) -> list[str]:
        network = [] if "pip install" in command else ["--net"]
        etc = f"lowerdir=/etc,upperdir={self._etc}/upper,workdir={self._etc}/work"
        script = "\n".join(
            [
                f"mount -t tmpfs hidden {ROOT}",
                f"mount --bind {self._opt} /opt",
                f"mount -t overlay -o {etc} overlay /etc",
                "ip link set lo up" if network else "",
                f"cd {self.home}",
                command,
            ]
        )
        return [
            "unshare",
            "--mount",
            "--propagation=private",
            *network,
            "bash",
            "-euo",
            "pipefail",
            "-c",
            script,
        ]

    def _env(self) -> dict[str, str]:
        foreign = ("KVLINK_", "PYTHON", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        here = [part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(str(ROOT))]
        return kept | {
            "HOME": str(self.home),
            "PATH": os.pathsep.join([str(self.home / "venv" / "bin"), *here]),
            "PIP_FIND_LINKS": str(self._shelf),
            "PIP_CONSTRAINT": str(self._shelf / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
