# SPDX-License-Identifier: Apache-2.0
"""The classes that vLLM loads, over modules that stand in for vLLM's: what they pass on to the two halves, and back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import vllm_specs  # isort: skip
from vllm_server import ASK_PREFILL, Server, gone, request  # isort: skip

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model.windows import Window

PACKAGE = "kvlink.integrations.vllm"


class Named(type):
    """The kind of class that stands in for vLLM's: an enumeration has every name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class Anything(ModuleType):
    """Has a class of its own for each name that is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Named(name, (), {})
        setattr(self, name, made)
        return made


class Finder:
    """Finds a module of vLLM under every name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.import_module(PACKAGE), "register", lambda: None)
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [
            name for name in sys.modules if name.startswith(("vllm", PACKAGE)) and name not in before
        ]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture
def encoder(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the connector for encoder outputs, where a fingerprint of the weights is the model."""
    module = importlib.import_module(f"{PACKAGE}.encoder.connector")
    monkeypatch.setattr(module, "model_of", lambda config, same, weights="": weights)
    monkeypatch.setattr(module, "model_id", lambda text: text)
    return module


def made(kind: type, **state: Any) -> Any:
    """An object of the class without what `__init__` asks of vLLM."""
    one = kind.__new__(kind)
    vars(one).update(state)
    return one


@pytest.fixture
def configured(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a connector by its `__init__`, with what the scheduler's side was given; its last groups are `added`."""
    vars(importlib.import_module("vllm.v1.kv_cache_interface")).update(vllm_specs.interface())
    importlib.import_module("vllm.platforms").current_platform = vllm_specs.platform()  # type: ignore[attr-defined]
    module: Any = importlib.import_module(f"{PACKAGE}.connector")
    module.KVConnectorBase_V1.__init__ = lambda self, *given: None
    monkeypatch.setattr(module, "SchedulerSide", lambda *positional, **named: named)
    transfer = {"kv_buffer_device": "cuda", "kv_connector_extra_config": {}, "engine_id": "e"}
    model = {"multimodal_config": None, "use_mla": False, "get_total_num_kv_heads": lambda: 8}
    config = vllm_specs.config(
        kv_transfer_config=SimpleNamespace(**transfer, is_kv_producer=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        model_config=SimpleNamespace(**model),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=1024),
        num_prefill_lookahead_tokens=3,
    )

    def build(role: str, *added: Any) -> Any:
        groups = [vllm_specs.Group(["full"], vllm_specs.FullAttentionSpec()), *added]
        caches = vllm_specs.Caches(groups)
        caches.select_transfer_block_ids = None  # type: ignore[attr-defined]
        return module.KVLinkConnector(config, role, caches)._scheduling

    return build


def test_the_scheduler_is_told_of_windows_states_and_drafts(configured: Any) -> None:
    window = vllm_specs.Group(
        ["window"], vllm_specs.SlidingWindowSpec(block_size=64, extra_retained_tokens=2)
    )
    told = configured("SCHEDULER", window, vllm_specs.Group(["gdn"], vllm_specs.MambaSpec()))
    assert told["back_off"] == 2
    assert told["grows"] == [True, False, False]
    assert told["windows"] == [None, Window(130, 64), None]
    assert [states and states.kind for states in told["states"]] == [None, None, "GDN_ATTN"]


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_what_is_not_served_is_refused_when_either_process_starts(configured: Any, role: str) -> None:
    with pytest.raises(ConfigError, match="--mamba-cache-mode all"):
        configured(role, vllm_specs.Group(["gdn"], vllm_specs.MambaSpec(mamba_cache_mode="all")))


def test_what_ranks_report_with_a_step_is_handed_off_from_then_on(vllm: None) -> None:
    """Ranks start again after sleep, and another connector may hide their handshakes."""
    module: Any = importlib.import_module(f"{PACKAGE}.connector")
    with Server("p") as server:
        server.scheduler.set_ranks([])
        connector = made(module.KVLinkConnector, _scheduling=server.scheduler, _rank_infos={})
        reported = module.KVLinkWorkerMetadata({0: server.ranks[0].rank_info})
        for metadata in (None, reported):
            connector.update_connector_output(
                SimpleNamespace(
                    finished_recving=None,
                    failed_recving=None,
                    finished_sending=None,
                    kv_connector_worker_meta=metadata,
                )
            )
            kept, params = server.prefill(request("r", list(range(10)), ASK_PREFILL), [3, 9, 1])
            assert kept is bool(params) is (metadata is not None)
        assert server.scheduler.take_counts() == {"no_workers": 1}
        assert not gone(server)


def test_nothing_is_saved_with_other_weights_than_at_the_start(encoder: Any) -> None:
    copies = SimpleNamespace(is_outdated=False)
    state = {"_copies": copies, "_config": None, "_same": "", "_model": "as loaded"}
    connector = made(encoder.KVLinkEncoderConnector, **state)
    outdated = []
    for weights in ("as loaded", "changed", "as loaded"):
        connector.weights_changed(weights)
        outdated.append(copies.is_outdated)
    assert outdated == [False, True, False]


@pytest.mark.parametrize("offered", [{}, {"a": "ticket"}])
def test_the_answer_carries_each_ticket_beside_what_lets_a_reader_skip_the_processor(
    encoder: Any, monkeypatch: pytest.MonkeyPatch, offered: dict[str, str]
) -> None:
    """No block waits for a reader."""
    described = lambda features, metadata: {name: {"sizes": 7} for name in features}  # noqa: E731
    monkeypatch.setattr(encoder, "collect_ec_item_metadata", described)
    guard = importlib.import_module("kvlink.integrations.request_guard").RequestGuard(encoder._log)
    scheduling = SimpleNamespace(ended=lambda _: offered, guard=guard)
    connector = made(encoder.KVLinkEncoderConnector, _scheduling=scheduling, _metadata=None)
    waits, answer = connector.request_finished(SimpleNamespace(request_id="r", mm_features=["a", "b"]))
    assert waits is False
    assert answer == ({"a": {"sizes": 7, encoder.KEY: "ticket"}} if offered else None)
    monkeypatch.setattr(encoder, "collect_ec_item_metadata", None)
    ended = connector.request_finished(SimpleNamespace(request_id="r", mm_features=["a", "b"]))
    assert ended == (False, None)
    assert sum(guard.take_counts().values()) == len(offered)


@pytest.mark.parametrize(
    ("data", "has"), [({}, False), ({"grid": 3}, False), ({"pixels": None}, False), ({"pixels": 3}, True)]
)
def test_an_image_that_is_only_its_sizes_cannot_be_encoded_here(encoder: Any, data: Any, has: bool) -> None:
    metadata = SimpleNamespace(fields_for=lambda modality: {"grid"})
    connector = made(encoder.KVLinkEncoderConnector, _metadata=metadata)
    values = {name: SimpleNamespace(data=value) for name, value in data.items()}
    assert connector._has_input(SimpleNamespace(data=values, modality="image")) is has


@pytest.mark.parametrize("name", ["pipeline", "prefill_context", "decode_context"])
def test_servers_that_split_an_encoder_are_refused(vllm: None, name: str) -> None:
    module: Any = importlib.import_module(f"{PACKAGE}.encoder.model_format")

    def config(size: int) -> Any:
        parallel = SimpleNamespace(**{f"{name}_parallel_size": size})
        model = SimpleNamespace(is_encoder_decoder=False, multimodal_config=None)
        return SimpleNamespace(parallel_config=parallel, model_config=model)

    module.check_supported(config(1))
    with pytest.raises(ConfigError, match=f"{name}_parallel_size 2"):
        module.check_supported(config(2))
