# SPDX-License-Identifier: Apache-2.0
"""Pools take memory that kvlink allocates and memory that a caller registers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.layout import Geometry, KVLayout, Order, Regions, dense
from kvlink.transfer.pool import BlockPool, Region

GEOMETRY = Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=8, block_tokens=4)
ONE = dense(GEOMETRY)
PER_LAYER = dense(GEOMETRY, Order.NHD, Regions.PER_LAYER)


def test_allocated_pool_is_zeroed_mappable_and_as_large_as_the_layout() -> None:
    pool = BlockPool.allocate(PER_LAYER)
    assert pool.mappable
    assert tuple(pool.numpy(i).nbytes for i in range(2)) == PER_LAYER.region_bytes
    assert not pool.numpy(1).any()


def test_views_write_through_and_keep_the_memory_alive() -> None:
    pool = BlockPool.allocate(ONE)
    view = pool.numpy()
    view[5] = 7
    assert np.from_dlpack(pool)[5] == 7
    del pool
    assert view[5] == 7


def test_torch_view_shares_memory() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    pool = BlockPool.allocate(ONE)
    pool.torch().view(torch.float32)[3] = 1.5
    assert pool.numpy().view(np.float32)[3] == 1.5


def test_exported_torch_tensors_keep_their_address() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    tensors = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in PER_LAYER.region_bytes]
    pool = BlockPool.from_tensors(tensors, PER_LAYER)
    assert [region.address for region in pool.regions] == [tensor.data_ptr() for tensor in tensors]
    assert not pool.mappable


def test_torch_view_of_a_exported_tensor_counts_from_its_first_element() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    whole = torch.zeros(ONE.region_bytes[0] // 4 + 16, dtype=torch.float32)
    pool = BlockPool.from_tensors([whole[16:]], dense(replace(GEOMETRY, dtype="float32")))
    view = pool.torch()
    assert (view.dtype, view.shape) == (torch.uint8, (ONE.region_bytes[0],))
    view.view(torch.float32)[0] = 2.5
    assert whole[16] == 2.5
    assert pool.numpy().view(np.float32)[0] == 2.5


def on_gpu(gpu: int | None, layout: KVLayout = PER_LAYER) -> list[Region]:
    """Addresses that are nobody's."""
    return [Region(1 << 47, size, None, None, gpu) for size in layout.region_bytes]


def test_a_pool_is_on_one_device() -> None:
    pool = BlockPool(on_gpu(3), PER_LAYER)
    assert pool.gpu == 3
    assert not pool.mappable
    assert "2 cuda:3 region(s)" in repr(pool)
    assert BlockPool.allocate(ONE).gpu is None
    for other in (None, 2):
        with pytest.raises(ConfigError, match="on several devices"):
            BlockPool([on_gpu(3)[0], on_gpu(other)[1]], PER_LAYER)


def test_a_gpu_pool_is_not_viewed_by_numpy() -> None:
    with pytest.raises(ConfigError, match=r"numpy cannot view cuda:0; use pool\.torch"):
        BlockPool(on_gpu(0), PER_LAYER).numpy()


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU; tests/gpu allocates on it")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    with pytest.raises(TransportUnavailable, match=r"libcuda.so.1.*install the NVIDIA driver"):
        BlockPool.allocate(ONE, gpu=0)


def test_tensors_elsewhere_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    with pytest.raises(ConfigError, match="this one is on meta"):
        BlockPool.from_tensors([torch.zeros(ONE.region_bytes[0], device="meta")], ONE)

    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)

    with pytest.raises(ConfigError, match="DLPack device type 8"):
        BlockPool.from_tensors([OnDevice()], ONE)


def test_gpu_memory_comes_over_dlpack_by_way_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    tensor = torch.zeros(ONE.region_bytes[0], dtype=torch.uint8)

    class SaysGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    array = SaysGpu()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.utils.dlpack, "from_dlpack", lambda given: tensor if given is array else None)
        assert BlockPool.from_tensors([array], ONE).regions[0].address == tensor.data_ptr()


def test_gpu_memory_over_dlpack_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class SaysGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    monkeypatch.setitem(sys.modules, "torch.utils", None)
    with pytest.raises(ConfigError, match=r"needs torch: pip install 'kvlink\[torch\]'"):
        BlockPool.from_tensors([SaysGpu()], ONE)


def test_exported_view_counts_from_its_first_element() -> None:
    whole = np.zeros(ONE.region_bytes[0] + 64, np.uint8)
    pool = BlockPool.from_tensors([whole[64:]], ONE)
    pool.numpy()[0] = 9
    assert whole[64] == 9


def test_a_tensor_that_is_too_small_is_refused_by_region() -> None:
    first, second = PER_LAYER.region_bytes
    with pytest.raises(ConfigError, match="region 1"):
        BlockPool.from_tensors([np.zeros(first, np.uint8), np.zeros(second - 1, np.uint8)], PER_LAYER)
    with pytest.raises(ConfigError, match="region 1"):
        BlockPool.from_tensors([np.zeros(first, np.uint8)], PER_LAYER)


def test_read_only_and_empty_memory_is_refused() -> None:
    frozen = np.zeros(ONE.region_bytes[0], np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        BlockPool.from_tensors([frozen], ONE)
    with pytest.raises(ConfigError, match="non-empty"):
        BlockPool.from_tensors([np.zeros(0, np.uint8)], ONE)
    with pytest.raises(ConfigError, match="negative strides"):
        BlockPool.from_tensors([np.zeros(ONE.region_bytes[0], np.uint8)[::-1]], ONE)


def test_repr_says_whose_memory_it_is() -> None:
    assert "kvlink's" in repr(BlockPool.allocate(ONE))
    assert "registered" in repr(BlockPool.from_tensors([np.zeros(ONE.region_bytes[0], np.uint8)], ONE))
