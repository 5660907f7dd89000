# SPDX-License-Identifier: Apache-2.0
"""`kvlink._bench` measures the machine; `kvlink._core`, which servers load, has none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from waiting import closed_port

from kvlink import _bench, _core
from kvlink.errors import ConfigError, PeerUnreachable


def test_the_core_has_no_benchmark_code() -> None:
    assert not {name for name in dir(_bench) if not name.startswith("__")} & set(dir(_core))
    binary = Path(str(_core.__file__)).read_bytes()
    assert [name for name in (b"time_posting", b"time_bounce", b"BaselineSource") if name in binary] == []


def test_it_takes_memory_of_the_core_when_it_is_imported_first() -> None:
    code = """
from kvlink import _bench
from kvlink._core import HostMemory
assert _bench.baseline_memfd(HostMemory(4096)) >= 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_raises_the_errors_of_kvlink() -> None:
    with pytest.raises(ConfigError, match="pieces are rows"):
        _bench.baseline_memcpy(np.zeros(3, np.uint64))
    with closed_port() as address, pytest.raises(PeerUnreachable, match="the bare connect"):
        _bench.BaselineSink(int(address.rpartition(":")[2]))
