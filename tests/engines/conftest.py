# SPDX-License-Identifier: Apache-2.0
"""Servers that live as long as tests use them: a pair of each connector and model, started once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from connectors import pair_of
from pair import Pair
from references import References, references_for
from servers import ENGINES, MODELS, STEADY_MALLOC, Server, router, running

CONNECTORS = os.environ.get("KVLINK_ENGINES_CONNECTORS", "KVLinkConnector").split(",")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`pair` is parametrized by what the test's marker `pairs` lists, options of pair_of; llama without one."""
    if "pair" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("pairs")
        kinds = marker.args if marker else ({"model": "llama"},)
        places = [{"connector": connector, **kind} for connector in CONNECTORS for kind in kinds]
        metafunc.parametrize("pair", places, ids=map(_output, places), indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one pair in a row: pytest goes by the place in each test's list, and would start pairs over and over."""
    places: dict[str, int] = {}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        pair = callspec.params.get("pair") if callspec else None
        return (
            places.setdefault(_output(pair), len(places)) if isinstance(pair, dict) else -1
        )  # others' pairs

    items.sort(key=place)


def _output(options: Mapping[str, Any]) -> str:
    return "-".join(
        "".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in options.values()
    )


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if not (ENGINES / "vllm" / ".made").exists():
        pytest.skip("no vLLM in build/engines; make test-engines makes it")
    with pair_of(**request.param, env=STEADY_MALLOC) as pair:
        yield pair


@pytest.fixture(scope="session")
def variants() -> None:
    """Makes what variants.py writes beside the models, once."""
    script = Path(__file__).with_name("variants.py")
    subprocess.run([str(ENGINES / "vllm" / "bin" / "python"), str(script), str(MODELS)], check=True)


@pytest.fixture(scope="session")
def references(pair: Pair) -> Iterator[References]:
    references = references_for(pair.model)
    yield references
    references.close()


@pytest.fixture
def routed(pair: Pair) -> Iterator[Server]:
    """kvlink's router in front of the pair."""
    with running([router([pair.prefill], [pair.decode])]) as (server,):
        yield server
