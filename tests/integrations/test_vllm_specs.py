# SPDX-License-Identifier: Apache-2.0
"""Every kind of cache that vLLM has is served, or refused at start by its name."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch
import vllm_specs as vllm
from vllm_specs import Caches, Group, config, stand_in, together

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model.caches import LayerGroup, Rank, TokenUnit, caches_of
from kvlink.integrations.vllm.model.states import RING

SPARSE = vllm.MLAAttentionSpec(tokens_per_state=4, state_content_bytes=584, max_tp_shards=1)
INDEXER = vllm.MLAAttentionSpec(tokens_per_state=4, head_size=132, max_tp_shards=1)
DENSE = vllm.MLAAttentionSpec(tokens_per_state=128, state_content_bytes=584, max_tp_shards=1)
COMPRESSOR = vllm.SlidingWindowMLASpec(block_size=4, head_size=2048, dtype=torch.float32, sliding_window=8)
WINDOW = vllm.SlidingWindowMLASpec(block_size=64, state_content_bytes=584)
RING_OF_8 = vllm.CircularBufferSpec(block_size=8, head_size=128, dtype=torch.float32)
DEEPSEEK_V4 = [
    together(sparse=SPARSE, indexer=INDEXER, dense=DENSE),
    Group(["window"], WINDOW),
    Group(["compressor"], COMPRESSOR),
]


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[Any, Any]]:
    with stand_in() as modules:
        yield modules


@pytest.mark.parametrize(
    "groups",
    [
        [Group(["layer"], vllm.FullAttentionSpec())],
        [Group(["layer"], vllm.SlidingWindowSpec())],
        [Group(["layer"], vllm.ChunkedLocalAttentionSpec())],
        DEEPSEEK_V4,
        [together(key=SPARSE, main=vllm.FullAttentionSpec(num_kv_heads=2)), Group(["ring"], RING_OF_8)],
        [Group(["layer"], vllm.MLAAttentionSpec()), Group(["kda"], vllm.MambaSpec(mamba_type="KDA"))],
    ],
    ids=["full", "window", "chunked", "deepseek-v4", "compressed keys and a ring", "kda"],
)
def test_what_is_served(modules: tuple[Any, Any], groups: list[Group]) -> None:
    """Groups of older releases of vLLM say nothing of host pools."""
    modules[0].check_supported(config(), Caches(groups))
    for group in groups:
        modules[0]._check_group(
            SimpleNamespace(layer_names=group.layer_names, kv_cache_spec=group.kv_cache_spec)
        )


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (Group(["a"], vllm.RSWASpec()), "RSWASpec"),
        (Group(["a"], vllm.SinkFullAttentionSpec()), "SinkFullAttentionSpec"),
        (Group(["a"], vllm.HiddenStateCacheSpec()), "HiddenStateCacheSpec"),
        (Group(["a"], vllm.CrossAttentionSpec()), "CrossAttentionSpec"),
        (Group(["a"], vllm.EncoderOnlyAttentionSpec()), "EncoderOnlyAttentionSpec"),
        (Group(["a"], vllm.HiSparseHotSpec()), "HiSparseHotSpec"),
        (Group(["a"], vllm.HiSparseResidentSpec()), "HiSparseResidentSpec"),
        (Group(["a"], vllm.MLAAttentionSpec(), host_resident=True), "HiSparse"),
        (Group(["a"], vllm.MLAAttentionSpec(), enable_kv_transfer=False), "HiSparse"),
        (Group(["a"], vllm.FullAttentionSpec(tokens_per_state=Fraction(1, 4))), "1/4 tokens a row"),
        (Group(["a"], vllm.MLAAttentionSpec(tokens_per_state=96)), "96 tokens a row in blocks of 256"),
        (Group(["a"], vllm.SlidingWindowMLASpec(bounded_replay=True)), "--swa-bounded-replay"),
        (Group(["a"], vllm.MambaSpec(mamba_cache_mode="all")), "--mamba-cache-mode all"),
        (Group(["a"], vllm.MambaSpec(num_speculative_blocks=2)), "speculative decoding with states"),
        (together(b=vllm.FullAttentionSpec(), a=vllm.RSWASpec()), "RSWASpec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(modules: tuple[Any, Any], group: Group, why: str) -> None:
    """By the name of the kind or of the setting, with a layer."""
    with pytest.raises(ConfigError, match=why) as refused:
        modules[0].check_supported(config(), Caches([*DEEPSEEK_V4, group]))
    assert "a " in str(refused.value)


def test_a_buffer_that_would_be_ignored_is_refused(modules: tuple[Any, Any]) -> None:
    asks = config(kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu"))
    with pytest.raises(ConfigError, match='"kv_buffer_device": "cpu" on cuda'):
        modules[0].check_supported(asks, Caches(DEEPSEEK_V4))


@pytest.mark.parametrize(
    ("cache_dtype", "refused"), [("fp8", ""), ("fp8_ds_mla", ""), ("int8_per_token_head", "int8")]
)
def test_quantized_caches_on_cpus(cache_dtype: str, refused: str) -> None:
    """DeepSeek-V4 has scales in its pages, which are moved as a whole."""
    asks = config(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu"),
    )
    with stand_in("cpu") as (unsupported, _):
        if not refused:
            unsupported.check_supported(asks, Caches(DEEPSEEK_V4))
            return
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype {refused}"):
            unsupported.check_supported(asks, Caches(DEEPSEEK_V4))


MODEL = {"multimodal_config": None, "use_mla": False}


@pytest.mark.parametrize(
    ("part", "given", "why"),
    [
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ("model_config", MODEL | {"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ("aux_output_config", {"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
    ],
)
def test_settings_that_are_refused(
    modules: tuple[Any, Any], part: str, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        modules[0].check_supported(config(**{part: SimpleNamespace(**given)}), Caches(DEEPSEEK_V4))


def test_cached_blocks_are_offered_of_one_group_that_reads_all_tokens(modules: tuple[Any, Any]) -> None:
    """MLA beside an indexer is one. States and windows are refused: a step may overwrite what is offered."""
    both = config(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    glm = together(mla=vllm.MLAAttentionSpec(), indexer=vllm.MLAAttentionSpec(head_size=132))
    modules[0].check_bidirectional(both, Caches([glm]))
    for groups, kinds in (
        (DEEPSEEK_V4, "3 cache groups of MLAAttentionSpec, SlidingWindowMLASpec"),
        ([Group(["kda"], vllm.MambaSpec())], "1 cache groups of MambaSpec"),
    ):
        with pytest.raises(ConfigError, match=kinds):
            modules[0].check_bidirectional(both, Caches(groups))


def test_layers_are_described_one_by_one(modules: tuple[Any, Any]) -> None:
    described = modules[1].layer_group_of(DEEPSEEK_V4[0])
    assert described.row_tokens == {"sparse": 4, "indexer": 4, "dense": 128}
    assert described.replicated == described.paged == {"sparse", "indexer", "dense"}
    main = modules[1].layer_group_of(together(key=SPARSE, main=vllm.FullAttentionSpec(num_kv_heads=2)))
    assert (main.row_tokens, main.replicated) == ({"key": 4, "main": 1}, {"key"})
    assert main.states is None


FP8, NVFP4 = SimpleNamespace(name="FP8_PER_TENSOR"), SimpleNamespace(name="NVFP4")


@pytest.mark.parametrize(
    ("spec", "is_paged"),
    [
        (COMPRESSOR, False),
        (vllm.FullAttentionSpec(dtype=torch.bfloat16), False),
        (vllm.FullAttentionSpec(kv_quant_mode=FP8), False),
        (vllm.MLAAttentionSpec(dtype=torch.float8_e4m3fn, head_size=128), False),
        (WINDOW, True),
        (vllm.MLAAttentionSpec(head_size=132), True),
        (vllm.FullAttentionSpec(kv_quant_mode=NVFP4), True),
        (vllm.FullAttentionSpec(dtype=torch.bfloat16, state_content_bytes=512), True),
    ],
    ids=["float32", "bfloat16", "fp8", "fp8 keys", "deepseek-v4", "indexer", "nvfp4", "packed"],
)
def test_pages_with_scales_behind_them_are_moved_whole(
    modules: tuple[Any, Any], spec: Any, is_paged: bool
) -> None:
    """vLLM's view of such a page has rows, but the scales of a token are not in its row."""
    assert modules[1].layer_group_of(Group(["layer"], spec)).paged == ({"layer"} if is_paged else set())


def test_a_whole_page_is_one_piece() -> None:
    """Two heads of 4 tokens and 3 bytes. Servers that order heads and tokens otherwise have other pages."""
    memory = torch.zeros(6 * 30, dtype=torch.uint8)
    found = {}
    for name, strides in (("around", (30, 12, 3, 1)), ("in", (30, 3, 6, 1))):
        tensors = {"a": memory.as_strided((6, 2, 4, 3), strides)}
        group = LayerGroup(("a",), row_tokens={"a": 4}, paged=frozenset("a"))
        caches = caches_of(tensors, [group], 6, Rank(1, 2, 8), "m")
        [layout] = caches.pool.groups
        assert caches.groups[0].units == (TokenUnit(16, is_block=True),)
        assert (layout.row_bytes, layout.num_heads, layout.total_heads, layout.block_stride) == (24, 1, 2, 30)
        found[name] = layout.dtype
    assert found == {name: f"uint8 4 tokens a row 2 heads {name} each token" for name in found}
    with pytest.raises(ConfigError, match="layer a: a page's bytes must adjoin"):
        caches_of({"a": memory.as_strided((6, 2, 4, 3), (30, 13, 3, 1))}, [group], 6, Rank(1, 2, 8), "m")


@pytest.mark.parametrize(("replicated", "total"), [({"a"}, [1, 1]), (set(), [2, 4])])
def test_only_caches_that_every_rank_is_known_to_have_are_read_at_other_degrees(
    replicated: set[str], total: list[int]
) -> None:
    """MiniMax-M3's indexer has one head on each rank, and vLLM does not say whether it is the same. Totals differ."""
    tensors = {"a": torch.zeros(6, 1, 4, 3)}
    found = [
        caches_of(tensors, [LayerGroup(("a",), replicated=frozenset(replicated))], 6, Rank(0, tp, 4), "m")
        for tp in (2, 4)
    ]
    assert [caches.pool.groups[0].total_heads for caches in found] == total


def test_a_circular_buffer_is_a_state_that_every_rank_has(modules: tuple[Any, Any]) -> None:
    states = modules[1].states_of(Group(["ring"], RING_OF_8))
    assert (states.kind, states.replicated, states.num_bytes()) == (RING, True, 8 * 128 * 4)
    tensor = torch.zeros(6, 1, 8, 128)
    caches = caches_of({"ring": tensor}, [LayerGroup(("ring",), states)], 6, Rank(1, 2, 8), "m")
    [layout] = caches.pool.groups
    assert (layout.is_state, layout.total_heads, layout.row_bytes) == (True, 1, 8 * 128 * 4)


@pytest.mark.parametrize(("lookahead", "count"), [(0, 0), (1, 0), (3, 2)])
def test_drafts_of_several_modules_back_off(modules: tuple[Any, Any], lookahead: int, count: int) -> None:
    assert modules[1].back_off_of(SimpleNamespace(num_prefill_lookahead_tokens=lookahead)) == count
    assert modules[1].back_off_of(SimpleNamespace()) == 0


def _packed(*widths: int, blocks: int = 6) -> list[Any]:
    """Pages of several layers in each block: rows and bytes of a row."""
    memory = torch.zeros(blocks * sum(widths), dtype=torch.uint8)
    return [
        memory.as_strided((blocks, 1, 1, width), (sum(widths), width, width, 1), sum(widths[:index]))
        for index, width in enumerate(widths)
    ]


def test_rows_of_a_group_may_stand_for_different_tokens() -> None:
    """On a CPU a block is one unit, because its kernels interleave tokens."""
    memory = torch.zeros(6, 64 * 584 + 64 * 132 + 2 * 584, dtype=torch.uint8)
    stride, offset, tensors = memory.shape[1], 0, {}
    for name, rows, width in (("sparse", 64, 584), ("indexer", 64, 132), ("dense", 2, 584)):
        tensors[name] = memory.as_strided((6, 1, rows, width), (stride, rows * width, width, 1), offset)
        offset += rows * width
    names = {"sparse": 4, "indexer": 4, "dense": 128}
    group = LayerGroup(tuple(names), row_tokens=names, replicated=frozenset(names))
    caches = caches_of(tensors, [group], 6, Rank(0, 1, 8), "m")
    [described] = caches.groups
    assert (described.block_tokens, described.units) == (256, (TokenUnit(256, is_block=True),) * 3)
    assert [layout.dtype for layout in caches.pool.groups] == [
        "uint8 4 tokens a row", "uint8 4 tokens a row", "uint8 128 tokens a row"
    ]  # fmt: skip
    names["dense"] = 64
    with pytest.raises(ConfigError, match=r"layer dense has cache .* they share a block table"):
        caches_of(tensors, [group], 6, Rank(0, 1, 8), "m")


def test_no_cache_is_left_behind() -> None:
    """A layer that shares another's cache is none, and neither is a cache that no group has."""
    first, second = _packed(64, 32)
    carried = [LayerGroup(("layer",))]
    caches_of({"layer": first, "shares it": first}, carried, 6, Rank(0, 1, 1), "m")
    with pytest.raises(ConfigError, match="layer indexer has a cache of its own that is in no cache group"):
        caches_of({"layer": first, "indexer": second}, carried, 6, Rank(0, 1, 1), "m")
