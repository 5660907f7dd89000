# SPDX-License-Identifier: Apache-2.0
"""The connectors against the source of each vLLM that the page promises: all that they rely on. Starts no server.

Names, signatures and fields are taken from the connectors' own code, so that what they begin to use is checked, too.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from servers import ROOT
from vllm_source import ClassSource, Function, Source, trees

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

PRODUCT = ROOT / "integrations" / "vllm"
MODULES = {file.relative_to(PRODUCT): ast.parse(file.read_text()) for file in sorted(PRODUCT.rglob("*.py"))}
PROMISED = re.findall(
    r"\d+\.\d+",
    re.search(r"^\| vLLM \|([^|]*)\|", (ROOT / "docs/reference/compatibility.md").read_text(), re.M)[1],  # type: ignore[index]
)
TREES = trees()
SPECS = "vllm.v1.kv_cache_interface"
KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"


@pytest.fixture(params=sorted({*PROMISED, *(v for v in TREES if not v.startswith(tuple(PROMISED)))}))
def source(request: pytest.FixtureRequest) -> Source:
    found = next((tree for version, tree in TREES.items() if version.startswith(request.param)), None)
    if found is None:
        pytest.skip(f"no source of vLLM {request.param}: .ci/vllm-source, or KVLINK_VLLM_SOURCE=FOLDER")
    return found


def imports() -> Iterator[tuple[str, str]]:
    """Module and name of all that the connectors import from vLLM."""
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module or "", alias.name) for alias in node.names)


IMPORTS = sorted(set(imports()))


def test_what_is_imported_is_there(source: Source) -> None:
    missing = []
    for module, name in IMPORTS:
        try:
            if not source.is_module(f"{module}.{name}"):
                source.found(module, name)
        except (KeyError, FileNotFoundError):
            missing.append(f"{module}.{name}")
    assert not missing


def derived(source: Source) -> Iterator[tuple[ClassSource, ClassSource]]:
    """The connectors' classes that extend vLLM's, each with one of those."""
    for tree in MODULES.values():
        for node in tree.body:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                module = next((at for at, name in IMPORTS if ast.unparse(base) == name), None)
                if isinstance(node, ast.ClassDef) and module:
                    yield ClassSource(node.name, (node,)), source.class_of(module, ast.unparse(base))


def test_methods_take_what_vllm_gives(source: Source) -> None:
    """Each method of vLLM's that a connector has is of the same kind and has the same parameters."""
    pairs = list(derived(source))
    assert {ours.name for ours, _ in pairs} >= {"KVLinkConnector", "KVLinkEncoderConnector", "KVLinkStats"}
    wrong = [
        f"{ours.name}.{name}{signature(function)} for {signature(theirs.functions[name])}"
        for ours, theirs in pairs
        for name, function in ours.functions.items()
        if name in theirs.functions and not fits(function, theirs.functions[name])
    ]
    assert not wrong


def fits(ours: Function, theirs: Function) -> bool:
    if kind(ours) != kind(theirs):
        return False
    given, taken = theirs.args, ours.args
    names, known = ([each.arg for each in (*args.posonlyargs, *args.args)] for args in (given, taken))
    more = len(known) - len(names)
    return (
        known[: len(names)] == names
        and 0 <= more <= len(taken.defaults)
        and {each.arg for each in given.kwonlyargs} <= {each.arg for each in taken.kwonlyargs}
        and (taken.kwarg is not None or given.kwarg is None)
    )


def kind(function: Function) -> set[str]:
    """How it is called: as a property, on the class, or on an object."""
    return {ast.unparse(each) for each in function.decorator_list} - {"abstractmethod", "override"}


def signature(function: Function) -> str:
    return f"({', '.join(sorted(kind(function)))}: {ast.unparse(function.args)})"


NOTHING_TO_DO: Mapping[str, str] = {
    # KVConnectorBase_V1
    "bind_kv_cache_manager": "calls bind_gpu_block_pool",
    "finish_forward": "loads do not depend on what a step reads",
    "get_block_ids_with_load_errors": "get_transfer_results names the requests, for any number of groups",
    "get_external_cache_hit_sources": "all hits are of _cache_hit_source",
    "get_finished_count": "every worker reports",
    "get_kv_connector_kv_cache_events": "nothing is stored",
    "get_mem_pool_context": "caches are read wherever vLLM allocates them",
    "get_required_kvcache_layout": "None: any strides are read",
    "has_pending_block_frees": "False: readers need the blocks",
    "register_finished_partial_tail": "False: blocks are handed off, not stored by hash",
    "requires_kv_delivery": "True for producers",
    "requires_piecewise_for_cudagraph": "False: nothing is done in layers",
    "reset_capture_state": "a capture carries no commands",
    "set_host_xfer_buffer_ops": "kv_buffer_device is refused",
    "set_xfer_handshake_metadata_pp_aware": "pipeline parallelism is refused",
    "supports_divergent_local_hybrid_hits": "False: decode uses the length that all groups have",
    "supports_sleep_mode": "True where restore_kv_caches is called",
    "take_events": "nothing is stored",
    # ECConnectorBase
    "build_connector_worker_meta": "the workers write into shared memory",
    "has_pending_push_work": "False: outputs are pulled",
    "register_caches": "caches are copied as steps begin and end",
    "start_worker_services": "workers have none",
    "update_connector_output": "the workers write into shared memory",
    "update_state_after_free": "the copy is kvlink's own",
    # both, and statistics
    "to_dict": "`data` can be serialized",
    "bind_connector_metadata": "keeps it",
    "clear_connector_metadata": "forgets it",
    "has_connector_metadata": "",
    "is_consumer": "",
    "is_producer": "",
    "role": "",
}
"""Methods of vLLM's classes that the connectors leave as they are, and why. Others are read first."""


def test_every_method_of_vllms_is_known(source: Source) -> None:
    """A method that a later vLLM adds is read by a person before that vLLM is promised."""
    left = set()
    for ours, theirs in derived(source):
        names = {name for name in theirs.functions if not name.startswith("_")} - ours.functions.keys()
        left |= {f"{theirs.name}.{name}" for name in names - NOTHING_TO_DO.keys()}
    assert not left


def test_what_the_page_says_of_hooks_that_are_left(source: Source) -> None:
    """docs/servers/vllm-models.md, "Settings of other connectors"; the connector answers what vLLM's class does."""
    base = source.class_of(f"{KV_CONNECTOR}.v1.base", "KVConnectorBase_V1")
    answers = {"supports_divergent_local_hybrid_hits": "False", "get_required_kvcache_layout": "None"}
    assert answers.keys() <= NOTHING_TO_DO.keys()
    for name, answer in answers.items():
        assert ast.unparse(base.functions[name].body[-1]) == f"return {answer}"


def test_functions_of_vllm_take_what_they_get(source: Source) -> None:
    """By the number of arguments."""
    checked, wrong = set(), []
    for node in (node for tree in MODULES.values() for node in ast.walk(tree)):
        if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        for module, name in IMPORTS:
            if ast.unparse(node.func) != name or source.is_module(f"{module}.{name}"):
                continue
            found = source.found(module, name)[1]
            if isinstance(found, Function):
                checked.add(name)
                arguments = found.args.posonlyargs + found.args.args
                given = len(node.args) + len(node.keywords)
                if not len(arguments) - len(found.args.defaults) <= given <= len(arguments):
                    wrong.append(f"{ast.unparse(node)} for {signature(found)}")
    assert not wrong
    assert {"get_encoder_output_width", "_get_attn_isa", "iter_layer_specs"} <= checked


CONFIG = "vllm.config"
OBJECTS: Mapping[str, tuple[str, str]] = {
    "vllm_config": (CONFIG, "VllmConfig"),
    "_vllm_config": (CONFIG, "VllmConfig"),
    "cache_config": (CONFIG, "CacheConfig"),
    "load_config": (CONFIG, "LoadConfig"),
    "model_config": (CONFIG, "ModelConfig"),
    "multimodal_config": (CONFIG, "MultiModalConfig"),
    "parallel_config": (CONFIG, "ParallelConfig"),
    "parallel": (CONFIG, "ParallelConfig"),
    "scheduler_config": (CONFIG, "SchedulerConfig"),
    "speculative_config": (CONFIG, "SpeculativeConfig"),
    "draft_model_config": (CONFIG, "ModelConfig"),
    "kv_transfer_config": (CONFIG, "KVTransferConfig"),
    "ec_transfer_config": (CONFIG, "ECTransferConfig"),
    "aux_output_config": ("vllm.config.aux_output", "AuxOutputConfig"),
    "current_platform": ("vllm.platforms.interface", "Platform"),
    "kv_cache_config": (SPECS, "KVCacheConfig"),
    "_kv_cache_config": (SPECS, "KVCacheConfig"),
    "request": ("vllm.v1.request", "Request"),
    "lora_request": ("vllm.lora.request", "LoRARequest"),
    "feature": ("vllm.multimodal.inputs", "MultiModalFeatureSpec"),
    "mm_position": ("vllm.multimodal.inputs", "PlaceholderRange"),
    "scheduler_output": ("vllm.v1.core.sched.output", "SchedulerOutput"),
    "scheduled_cached_reqs": ("vllm.v1.core.sched.output", "CachedRequestData"),
    "connector_output": ("vllm.v1.outputs", "KVConnectorOutput"),
    "_pool": ("vllm.v1.core.block_pool", "BlockPool"),
}
"""Names that the connectors' code has for objects of vLLM, with the class. Aliases of them are followed."""


def reads() -> Iterator[tuple[tuple[str, str], str, str]]:
    """Class, name and place of what is read from such an object, by a dot or by getattr."""
    for file, tree in MODULES.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            aliases = dict(_aliases(function))
            for node in ast.walk(function):
                value, name = _read(node)
                last = _last(value)
                at = OBJECTS.get(aliases.get(last, last))
                if at is not None and name:
                    yield at, name, f"{file}: {ast.unparse(node)}"


def _read(node: ast.AST) -> tuple[ast.AST | None, str]:
    """Returns the object whose attribute an expression reads, and the attribute."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        name = node.args[1]
        return (node.args[0], str(name.value)) if isinstance(name, ast.Constant) else (None, "")
    return None, ""


def _last(value: ast.AST | None) -> str:
    """The last name of an expression: `c` of `a.b.c`."""
    return value.id if isinstance(value, ast.Name) else _read(value)[1] if value is not None else ""


def _aliases(function: Function) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            yield from ((to.id, _last(of)) for to, of in pairs if isinstance(to, ast.Name))
        elif isinstance(node, ast.NamedExpr):
            yield node.target.id, _last(node.value)


ELSEWHERE = {
    "KV_CONNECTOR_PROTOCOLS": "of Dynamo",
    "architectures": "of transformers",
    "current_device": "of torch",
    "encode": "of text",
    "name": "of enums",
    "sub_connectors": "of MultiConnector",
    "unregister_kv_caches": "of vLLM 0.33 and later",
    "value": "of enums",
}
"""Names that are read and that no class above has in each version."""

READS = sorted(set(reads()))


def test_what_is_read_is_there(source: Source) -> None:
    missing = [
        place for at, name, place in READS if name not in ELSEWHERE and not source.class_of(*at).has(name)
    ]
    assert not missing
    assert len(READS) > 100


def test_no_default_stands_in_for_a_name_that_is_gone(source: Source) -> None:
    """`getattr` with a default says nothing when vLLM renames a field, and would serve what it should refuse."""
    nodes = (node for tree in MODULES.values() for node in ast.walk(tree))
    names = {_read(node)[1] for node in nodes if isinstance(node, ast.Call)} - {""}
    specs = {each.name: each for each in source.classes_in(SPECS)}
    unknown = names - ELSEWHERE.keys() - {name for _, name, _ in READS}
    assert {name for name in unknown if not any(each.has(name) for each in specs.values())} == set()
    assert {"bounded_replay", "enable_kv_transfer", "max_tp_shards", "state_content_bytes"} <= unknown


def test_the_stand_ins_of_specs_are_as_vllms(source: Source) -> None:
    """Those of tests/integrations/vllm_specs.py: fields, defaults that a check reads, and what extends what."""
    pytest.importorskip("torch", reason="needs torch (pip install torch)")
    import vllm_specs

    specs = {each.name: each for each in source.classes_in(SPECS)}
    others = {"Group": "KVCacheGroupSpec", "Caches": "KVCacheConfig"}
    wrong, checked = [], 0
    for name, stand_in in vars(vllm_specs).items():
        if not isinstance(stand_in, type) or not dataclasses.is_dataclass(stand_in):
            continue
        checked += 1
        real = specs.get(others.get(name, name))
        if real is None:
            wrong.append(name)
            continue
        wrong += [f"{name}.{each.name}" for each in dataclasses.fields(stand_in) if not real.has(each.name)]
        wrong += [
            f"{name}({base.__name__})" for base in stand_in.__mro__[1:-1] if not real.extends(base.__name__)
        ]
    assert not wrong
    assert checked > 12


def test_every_kind_of_cache_is_in_the_table(source: Source) -> None:
    """Served, or refused by its name. A kind that a later vLLM adds is refused, and is said here."""
    kinds = {each.name for each in source.classes_in(SPECS) if each.extends("KVCacheSpec")}
    served = {
        "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec", "CircularBufferSpec", "MambaSpec",
    }  # fmt: skip
    refused = {
        "RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec",
        "HiSparseHotSpec", "HiSparseResidentSpec",
    }  # fmt: skip
    bases = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    assert kinds == served | refused | bases
    words = ast.unparse(MODULES[Path("model/unsupported.py")])
    assert all(re.search(rf"\b{name}\b", words) for name in served)
    page = (ROOT / "docs/servers/vllm-models.md").read_text()
    assert {name for name in refused if f"`{name}`" not in page} == set()


def test_every_kind_of_state_is_in_the_table(source: Source) -> None:
    """All but the first three can be shared by ranks of one degree only."""
    kinds = source.class_of("vllm.v1.attention.backends.registry", "MambaAttentionBackendEnum").fields
    assert sorted(kinds) == ["CUSTOM", "GDN_ATTN", "LINEAR", "MAMBA1", "MAMBA2", "SHORT_CONV"]


def test_the_names_that_are_given_by_place_or_hooked(source: Source) -> None:
    """Neither an import nor a base class says them."""
    results = source.class_of(f"{KV_CONNECTOR}.v1.base", "KVConnectorTransferResults").fields
    assert results[:3] == ["finished_sending", "finished_recving", "failed_recving"]
    assert source.class_of(f"{KV_CONNECTOR}.v1.multi_connector", "MultiConnector").has("sub_connectors")
    assert source.class_of("vllm.v1.worker.gpu_worker", "Worker").has("reload_weights")
    runner = source.class_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    assert all(runner.has(name) for name in ("_update_states", "requests", "input_batch"))
    block = source.class_of("vllm.v1.core.kv_cache_utils", "KVCacheBlock")
    assert all(block.has(name) for name in ("block_id", "block_hash", "is_null"))
    assert source.class_of("vllm.v1.core.kv_cache_manager", "KVCacheBlocks").has("get_block_ids")


def test_which_vllm_tells_connectors_that_it_sleeps(source: Source) -> None:
    """0.32 does not, and is refused with --enable-sleep-mode."""
    base = source.class_of(f"{KV_CONNECTOR}.v1.base", "KVConnectorBase_V1")
    told = {name for name in ("unregister_kv_caches", "restore_kv_caches") if base.has(name)}
    assert len(told) == (0 if source.version.startswith("0.32") else 2)
