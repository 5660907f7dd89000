# SPDX-License-Identifier: Apache-2.0
"""Reads the workloads of public suites from their own files: bursts of requests whose blocks move together.

- InferenceX, suite kv-transfer (experimental/CollectiveX/configs/kv_sweep.json): prompt lengths × page sizes × requests
  of a burst, of one model's cache
- NIXL's kvbench (benchmark/kvbench/examples): the file of a model and the file of a configuration, a burst each
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout import Geometry

from .models import MODELS, Model, model_of

_MOST_BYTES = 1 << 20  # of a file
_MOST = 1 << 24
_DTYPES = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "bfloat16": 2}
_SPARE_PAGES = 8


class Group(NamedTuple):
    """Layers whose caches are alike: `entries` of a request, of `entry_bytes` each in every layer, in pages."""

    layers: int
    entry_bytes: int
    page_entries: int
    entries: int

    @property
    def pages(self) -> int:
        """Returns the pages of one request in one layer."""
        return -(-self.entries // self.page_entries)

    def geometry(self, slack: float) -> Geometry:
        """Returns a cache with room for `slack` requests."""
        return Geometry(
            num_layers=self.layers, total_heads=1, row_bytes=self.entry_bytes, block_tokens=self.page_entries,
            num_blocks=int(self.pages * slack) + _SPARE_PAGES, planes_per_layer=1, dtype="uint8", model="bench",
        )  # fmt: skip


class Point(NamedTuple):
    """Requests of `tokens`, of which as many as each number of `batches` move at once."""

    workload: str
    tokens: int
    page_tokens: int
    groups: tuple[Group, ...]
    batches: tuple[int, ...]
    slack: float = 1.0
    """How many requests a cache has room for, at least; a batch has room for a quarter more."""

    def geometries(self, batch: int) -> list[Geometry]:
        """Returns the cache groups for bursts of up to `batch` requests."""
        return [group.geometry(max(self.slack, 1.25 * batch)) for group in self.groups]


class Suite(NamedTuple):
    """A workload. A trial has `bursts` that count; `left_out` is what kvlink has no way for."""

    name: str
    points: tuple[Point, ...]
    trials: int
    bursts: int
    left_out: tuple[str, ...] = ()


def suite_of(files: Sequence[Path], model: str = "") -> Suite:
    """Reads a suite. `model` replaces the geometry of the files by one of models.py. Raises ConfigError."""
    given = [_read(file) for file in files]
    wanted = model_of(model) if model else None
    if len(given) == 1 and given[0].get("suite") == "kv-transfer":
        return _kv_transfer(given[0], wanted)
    models = [each for each in given if "num_layers" in each]
    configurations = [each for each in given if "strategy" in each]
    if len(configurations) != 1 or len(models) != (0 if wanted else 1) or len(given) > 2:
        raise ConfigError(
            "write the kv_sweep.json of InferenceX, or the YAML files of a model and of a configuration of kvbench "
            "(with --model only the latter)"
        )
    return _kvbench(configurations[0], wanted or _kvbench_model(models[0]))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"{file} has more than {_MOST_BYTES >> 20} MiB, so it is no workload of a suite"
            )
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else _yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not a readable file of a suite: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} does not hold an object with fields")
    return found


def _yaml(text: str) -> object:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError("the files of kvbench are YAML; run pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _number(table: Mapping[str, Any], name: str) -> int:
    return _checked(table.get(name), name)


def _numbers(table: Mapping[str, Any], name: str) -> list[int]:
    found = table.get(name)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{name} of the suite is {found!r}, not a list of numbers")
    return [_checked(each, name) for each in found]


def _checked(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise ConfigError(f"{name} of the suite is {value!r}, not a number of 1 to {_MOST}")
    return value


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    if not isinstance(found, dict):
        raise ConfigError(f"{name} of the suite is {found!r}, not an object")
    return found


def _dtype_bytes(name: Any) -> int:
    if name not in _DTYPES:
        raise ConfigError(f"a cache of {name!r} is not known; the suites have {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _kv_transfer(sweep: Mapping[str, Any], wanted: Model | None) -> Suite:
    timing, slack = _section(sweep, "timing"), sweep.get("pool_slack", 1.0)
    if not isinstance(slack, (int, float)) or not 1 <= slack <= _MOST:
        raise ConfigError(f"pool_slack of the suite is {slack!r}, not a number from 1 on")
    points = [
        Point(name, tokens, page, _groups(name, dtype, tokens, page, wanted), batches, float(slack))
        for name, dtypes in _section(sweep, "workloads").items()
        for dtype in dtypes
        for batches in [tuple(sorted(set(_numbers(sweep, "batch_sizes"))))]
        for tokens in _numbers(sweep, "isl_ladder")
        for page in _numbers(sweep, "page_tokens")
    ]
    others = [op for op in sweep.get("ops", ["pull"]) if op != "pull"]
    return Suite(
        "kv-transfer",
        tuple(point._replace(workload=f"kv-{wanted.name}") if wanted else point for point in points),
        _number(timing, "trials_per_point"),
        _number(timing, "reps_per_trial"),
        tuple(f"{op}: with kvlink the reader moves the bytes, and nobody writes to it" for op in others),
    )


def _groups(workload: str, dtype: str, tokens: int, page: int, wanted: Model | None) -> tuple[Group, ...]:
    """Returns the cache groups of a workload "kv-NAME": DeepSeek-V4-Pro (dsv4), or a model of models.py."""
    name = workload.removeprefix("kv-")
    if wanted is None and name == "dsv4":
        return _dsv4(tokens, page)
    if wanted is None and name not in MODELS:
        raise ConfigError(
            f"workload {workload!r} is not known; choose a geometry with --model: {', '.join(MODELS)}"
        )
    found = wanted or MODELS[name]
    row = found.heads * found.head_dim * _dtype_bytes(dtype)
    return (Group(found.layers * found.planes_per_layer, row, page, tokens),)


def _dsv4(tokens: int, page: int) -> tuple[Group, ...]:
    """Returns what vLLM allocates for DeepSeek-V4-Pro, as the suite describes it.

    30 layers keep an entry of 576 bytes for 4 tokens, and one of 132 bytes for their index; 31 layers one for 128
    tokens; all of them the last 128 tokens.
    """
    entries, page_entries = -(-tokens // 4), max(1, page // 4)
    return (
        Group(30, 576, page_entries, entries),
        Group(30, 132, page_entries, entries),
        Group(31, 576, max(1, page // 128), -(-tokens // 128)),
        Group(61, 576, page, min(tokens, 128)),
    )


def _kvbench(configuration: Mapping[str, Any], model: Model) -> Suite:
    """One rank's share of each request, in pages of all layers together ("block"), or layer by layer."""
    strategy, runtime, system = (_section(configuration, name) for name in ("strategy", "runtime", "system"))
    tp, stages = _number(strategy, "tp_size"), _number(strategy, "pp_size")
    tokens, page = _number(runtime, "isl"), _number(system, "page_size")
    heads = model.geometry(tp, 1).total_heads
    row = model.planes_per_layer * heads * model.head_dim * _dtype_bytes(strategy.get("kvcache_quant_mode"))
    layers = -(-model.layers // stages)
    pattern = system.get("access_pattern")
    if pattern not in ("block", "layer"):
        raise ConfigError(f"access_pattern of the suite is {pattern!r}, not block or layer")
    group = Group(1, row * layers, page, tokens) if pattern == "block" else Group(layers, row, page, tokens)
    name = f"{model.name} tp{tp} pp{stages} {pattern}"
    return Suite(
        "kvbench", (Point(name, tokens, page, (group,), (_number(runtime, "num_requests"),)),), 1, 24
    )


def _kvbench_model(table: Mapping[str, Any]) -> Model:
    name, layers = str(table.get("model_name")).lower(), _number(table, "num_layers")
    if "mla_latent_vector_dimension" in table:
        latent = _number(table, "mla_latent_vector_dimension") + _number(table, "rope_mla_dimension")
        return Model(name, layers, 1, latent, mla=True)
    if "num_kv_heads" in table:
        heads = _number(table, "num_kv_heads")
    else:
        heads = _number(table, "num_query_heads_with_mha") // _number(table, "gqa_num_queries_in_group")
    return Model(
        name, layers, _checked(heads, "the number of KV heads"), _number(table, "query_head_dimension")
    )
