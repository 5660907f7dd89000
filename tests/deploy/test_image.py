# SPDX-License-Identifier: Apache-2.0
"""The image: built as its Containerfile says, looked into, and run with the image's own command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deploy import commands
from deploy.containers import Image, find_engine
from deploy.running import PATHS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

_MOST_ADDED_BYTES = 300 << 20
"""To what it starts from; torch alone would be more."""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    image = Image(find_engine())
    try:
        image.build()
        yield image
    finally:
        image.close()


def test_settings_are_those_of_the_file(image: Image) -> None:
    settings = image.settings()
    assert settings["User"] == "7400:7400"
    assert settings["StopSignal"] in ("SIGTERM", "15")
    assert settings["Healthcheck"]["Test"] == ["CMD", *commands.image_command("HEALTHCHECK")]
    assert settings["Cmd"] == commands.image_command("CMD")


def test_it_is_small(image: Image) -> None:
    added = image.added_bytes()
    print(f"{added / 2**20:.0f} MiB added")
    assert 0 < added < _MOST_ADDED_BYTES


def test_it_has_no_compiler(image: Image) -> None:
    found = image.call("sh", "-c", "command -v sh g++ cmake").stdout.split()
    assert [path.rpartition("/")[2] for path in found] == ["sh"]


def test_it_has_no_torch_and_runs_as_nobody_else(image: Image) -> None:
    assert image.call("id", "-u").stdout.strip() == "7400"
    imported = image.call("python3", "-c", "import kvlink._core, torch")
    assert "No module named 'torch'" in imported.stderr
    assert "kvlink" in image.call("kvlink", "--help").stdout


def test_it_serves_is_healthy_and_ends_by_sigterm(image: Image) -> None:
    certificates = image.volume()
    made = image.call("kvlink", "certs", "--dir=/certs", "--tenant=default", volume=certificates)
    assert made.returncode == 0, made.stderr
    env = {name: f"/certs/{file}" for name, file in PATHS.items()}
    container = image.start(certificates, env)
    healthy = image.inside(container, *commands.image_command("HEALTHCHECK"))
    assert healthy.returncode == 0, healthy.stderr
    assert '"workers": 0' in healthy.stdout
    refused = image.inside(container, "sh", "-c", "echo x >/certs/x")
    assert refused.returncode != 0
    assert image.stop(container) == 0
