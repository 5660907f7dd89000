# SPDX-License-Identifier: Apache-2.0
"""The plugin in the wheels of all releases of NIXL that it says it knows, and its refusal of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import NEWEST, RELEASES, agents, introduce

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

PIECES, SIZE = 256, 4096


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_reads(release: str) -> None:
    with agents("owner", "reader", release=release) as (owner, reader):
        at = owner("register('pool', 1 << 20, 7)")
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        reader("prepare('read', 'owner', 'into', at, 256, 4096, b'read it')", at=at)
        assert reader("wait('read')") == "DONE", reader.said()
        assert reader("equals('into', 7, 256, 4096, 1 << 20)")
        assert owner("notes(1)") == {"reader": [b"read it"]}


@pytest.mark.parametrize("release", ["0.10.1", "1.5.2", "2.0.0", "nonsense", ""])
def test_others_are_refused_with_a_sentence(release: str) -> None:
    with agents("alone", KVLINK_NIXL_RELEASE=release) as (alone,):
        assert alone.started != ""
        alone.process.wait()
        said = alone.said()
        wanted = f"and this is {release}" if release else "cannot tell which release"
        assert wanted in said, said
        assert NEWEST in said
