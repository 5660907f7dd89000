# SPDX-License-Identifier: Apache-2.0
"""Handoffs between two servers' connectors: the right bytes, or a refusal that is counted; never anything else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import eventually

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch

from vllm_server import ASK_PREFILL, BLOCK_TOKENS, Server, gone, request, same  # isort: skip
from kvlink.errors import ConfigError, StaleBlocks
from kvlink.integrations.vllm.decode import remote_leases
from kvlink.integrations.vllm.decode.loads import _Loading
from kvlink.integrations.vllm.model.caches import LayerGroup, Rank, caches_of
from kvlink.integrations.vllm.prefill.outgoing import Chunk
from kvlink.integrations.vllm.wire.handoff import KEY
from kvlink.transfer.pull import Pull

PROMPT = list(range(100, 110))  # two whole blocks and a half


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with Server("p") as prefill, Server("d") as decode:
        yield prefill, decode


def test_a_request_moves_and_its_blocks_come_back(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    stays, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    assert stays
    assert params
    assert (params["do_remote_prefill"], params["do_remote_decode"], params["remote_num_tokens"]) == (
        True,
        False,
        10,
    )
    assert decode.load(request("x", PROMPT, params | {"unknown": 1}), [5, 6, 7]) == (10, True)
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert same(decode, prefill, [(5, 3), (6, 9), (7, 1)], ("layer.0", "layer.1"))
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)
    assert decode.ranks[0].take_stats()["transports"] == {"loopback": 1}  # type: ignore[index]


def test_blocks_come_back_when_a_scrape_has_seen_their_end_first(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    decode.loads(request("x", PROMPT, params), [5, 6, 7])
    offers = prefill.ranks[0]._worker.offers
    eventually(lambda: not offers.num_pinned_blocks())
    prefill.step()
    assert prefill.sent == {"r"}
    assert gone(prefill)


def test_what_is_cached_here_is_not_pulled(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    before = decode.block("layer.0", 5).clone()
    assert decode.load(request("x", PROMPT, params), [5, 6, 7], computed=BLOCK_TOKENS) == (6, True)
    decode.step_until(lambda: "x" in decode.received)
    assert decode.block("layer.0", 5).equal(before)
    assert same(decode, prefill, [(6, 9), (7, 1)], ("layer.0", "layer.1"))


def test_all_cached_here_gives_the_blocks_back_unread(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT[:8], ASK_PREFILL), [3, 9])
    assert decode.load(request("x", PROMPT[:8], params), [5, 6], computed=8) == (0, False)
    decode.step()
    prefill.step_until(lambda: "r" in prefill.sent)
    assert not decode.received
    assert decode.scheduler.take_counts() == {"released": 1}


def test_a_second_use_is_computed(servers: tuple[Server, Server]) -> None:
    """This server knows that it has settled the lease."""
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    decode.loads(request("x", PROMPT, params), [5, 6, 7])
    prefill.step_until(lambda: "r" in prefill.sent)
    assert decode.load(request("y", PROMPT, params), [8, 9, 10]) == (0, False)
    assert not decode.failed
    assert decode.scheduler.take_counts() == {"used_already": 1}


def test_a_second_use_by_another_server_is_refused(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    decode.loads(request("x", PROMPT, params), [5, 6, 7])
    prefill.step_until(lambda: "r" in prefill.sent)
    with Server("d2") as another:
        assert not another.loads(request("y", PROMPT, params), [8, 9, 10])
        assert another.ranks[0].take_stats()["failures"] == {"stale": 1}  # type: ignore[index]


def test_an_expired_lease_is_refused() -> None:
    with Server("p", lease_s=0.05) as prefill, Server("d") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        prefill.step_until(lambda: "r" in prefill.sent)
        assert not decode.loads(request("x", PROMPT, params), [5, 6, 7])
        assert prefill.ranks[0].take_stats()["expired"] == 1  # type: ignore[index]


def test_a_swapped_handoff_is_refused_and_stays_for_its_own_reader(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    other = [*PROMPT[:-1], 1]
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    assert not decode.loads(request("x", other, params), [5, 6, 7])
    assert decode.scheduler.counts["another_prompt"] == 1
    decode.loads(request("y", PROMPT, params), [8, 9, 10])
    assert decode.failed == {"x"}
    assert same(decode, prefill, [(8, 3), (9, 9), (10, 1)], ("layer.0",))


@pytest.mark.parametrize("spoilt", [{KEY: {"ticket": "AAAA"}}, {KEY: "x"}, {KEY: [1]}])
def test_a_spoilt_handoff_is_refused(servers: tuple[Server, Server], spoilt: dict[str, object]) -> None:
    prefill, decode = servers
    params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    asks = request("x", PROMPT, params | spoilt)
    assert decode.load(asks, [5, 6, 7]) == (10, True), "it fails as a load, and so by vLLM's policy"
    decode.step_until(lambda: "x" in decode.received)
    assert decode.failed == {"x"}


def test_a_restarted_prefill_server_is_refused(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    for rank in prefill.ranks:
        rank.close()
    prefill.start()
    assert not decode.loads(request("x", PROMPT, params), [5, 6, 7])


def test_without_a_handoff_the_request_is_computed_here(servers: tuple[Server, Server]) -> None:
    _, decode = servers
    asks = request("x", PROMPT, {"do_remote_prefill": True})
    assert decode.load(asks, [5, 6, 7]) == (0, False)
    assert asks.kv_transfer_params["do_remote_prefill"] is False
    assert decode.load(request("y", PROMPT, None), [8, 9, 10]) == (0, False)
    decode.step()
    assert decode.scheduler.counts["not_offered"] == 1
    assert not decode.received


def test_an_aborted_prefill_hands_off_nothing(servers: tuple[Server, Server]) -> None:
    prefill, _ = servers
    assert prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1], complete=False) == (False, None)
    prefill.step()
    assert gone(prefill)
    assert prefill.ranks[0]._worker.lease_counts().active == 0
    assert not prefill.sent


def test_a_decode_request_that_ends_early_gives_the_blocks_back(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    rejected = request("x", PROMPT, params)
    decode.scheduler.incoming.arrived(rejected)
    assert decode.scheduler.finished(rejected, ([],), False) == (False, None)
    prefill.step_until(lambda: "r" in prefill.sent)


@pytest.mark.verify
def test_a_waiting_request_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "_TICK_S", 0.05)  # or a renewal comes up to a second late
    with Server("p", lease_s=4.0) as prefill, Server("d") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        waiting = request("x", PROMPT, params)
        decode.scheduler.incoming.arrived(waiting)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            prefill.step()
            time.sleep(0.05)
        assert not prefill.sent
        count, _ = decode.scheduler.incoming.num_matched(waiting, 0)
        decode.scheduler.allocated(waiting, ([5, 6, 7],), count)
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
def test_other_tensor_parallel_degrees(theirs: int, ours: int) -> None:
    with Server("p", theirs) as prefill, Server("d", ours) as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        assert decode.loads(request("x", PROMPT, params), [5, 6, 7])
        assert same(decode, prefill, [(5, 3), (6, 9), (7, 1)], ("layer.0", "layer.1"))
        prefill.step_until(lambda: "r" in prefill.sent)
        assert gone(prefill)


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2)])
def test_replicated_heads(theirs: int, ours: int) -> None:
    """MLA: every rank holds the same; ranks that nobody reads from wait for nobody."""
    with Server("p", theirs, heads=1) as prefill, Server("d", ours, heads=1) as decode:
        prefill.caches = [prefill.caches[0]] * theirs
        for rank in prefill.ranks:
            rank.close()
        prefill.start()
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        assert decode.loads(request("x", PROMPT, params), [5, 6, 7])
        for tensors in decode.caches:
            assert tensors["layer.1"][6].equal(prefill.caches[0]["layer.1"][9])
        prefill.step_until(lambda: "r" in prefill.sent)


def test_sliding_windows_have_their_own_blocks() -> None:
    """Group 1 keeps only the last blocks: 0 stands for what either side's window has left behind."""
    groups = (("full.0", "full.1"), ("window.0",))
    with Server("p", groups=groups) as prefill, Server("d", groups=groups) as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1], [0, 4, 2])
        prefill.step()
        assert prefill.ranks[0]._worker.stats().pinned_blocks == 5, "0 is no block"
        untouched = decode.block("window.0", 0).clone()
        assert decode.loads(request("x", PROMPT, params), [5, 6, 7], [0, 0, 8])
        assert same(decode, prefill, [(5, 3), (6, 9), (7, 1)], ("full.0", "full.1"))
        assert same(decode, prefill, [(8, 2)], ("window.0",))
        assert decode.block("window.0", 0).equal(untouched)
        prefill.step_until(lambda: "r" in prefill.sent)
        assert gone(prefill)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_rows_have_the_bytes_of_their_numbers(dtype: torch.dtype) -> None:
    """A row of the layout is a block of one head."""
    tensor = torch.zeros(4, 2, BLOCK_TOKENS, 8, dtype=dtype)
    caches = caches_of({"a": tensor}, [LayerGroup(("a",))], 4, Rank(0, 1, 2), "tiny")
    layout = caches.pool.groups[0]
    assert layout.row_bytes == BLOCK_TOKENS * 8 * dtype.itemsize
    assert layout.num_blocks * layout.block_stride == tensor.nbytes


def test_another_model_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with Server("p", model="Llama layers=2") as prefill, Server("d", model="Llama layers=4") as decode:
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        assert not decode.loads(request("x", PROMPT, params), [5, 6, 7])
        assert "model differs: 'Llama layers=4' here, 'Llama layers=2' there" in caplog.text
        prefill.step_until(lambda: "r" in prefill.sent)


def test_caches_that_no_layout_describes_are_refused_by_layer() -> None:
    with Server("p") as server:
        tensors = dict(server.caches[0])
    rank = Rank(0, 1, 4)
    tensors["layer.1"] = tensors["layer.1"][:8]
    with pytest.raises(ConfigError, match=r"layer layer\.1 has cache"):
        caches_of(tensors, [LayerGroup(("layer.0", "layer.1"))], 16, rank, "m")
    with pytest.raises(ConfigError, match=r"layer layer\.0: kvlink takes caches"):
        caches_of({"layer.0": tensors["layer.0"].flatten()}, [LayerGroup(("layer.0",))], 16, rank, "m")
    with pytest.raises(ConfigError, match="tokens must adjoin"):
        caches_of(
            {"layer.0": tensors["layer.0"].transpose(1, 2).contiguous().transpose(1, 2)},
            [LayerGroup(("layer.0",))],
            16,
            rank,
            "m",
        )


def test_a_request_that_decode_refuses_gives_the_blocks_back(servers: tuple[Server, Server]) -> None:
    """vLLM's notice has a prompt of its own."""
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    notice = request("x", [0], params)
    notice.abort_immediately = True
    decode.scheduler.incoming.arrived(notice)
    assert decode.scheduler.finished(notice, ([],), False) == (False, None)
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)
    assert decode.scheduler.take_counts() == {"released": 1}
    assert prefill.ranks[0].take_stats() is None, "nothing expired"


def test_a_prompt_of_token_0_is_no_refusal(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", [0], ASK_PREFILL), [3])
    asks = request("x", [0], params)
    asks.abort_immediately = False
    assert decode.load(asks, [5]) == (1, True)
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert decode.scheduler.take_counts() == {}


@pytest.mark.parametrize("handed_off", [{KEY: {"ticket": "AAAA"}}, {}])
def test_a_refusal_without_a_handoff_is_no_error(
    servers: tuple[Server, Server], handed_off: dict[str, object]
) -> None:
    notice = request("x", [0], {"do_remote_prefill": True} | handed_off)
    notice.abort_immediately = True
    servers[1].scheduler.incoming.arrived(notice)
    servers[1].scheduler.finished(notice, ([],), False)
    assert servers[1].scheduler.take_counts() == ({"malformed": 1} if handed_off else {})


def test_a_load_fails_by_its_first_error() -> None:
    load: Any = None
    loading = _Loading(load, 0)
    errors = [StaleBlocks("first"), StaleBlocks("second")]
    for error in errors:
        loading.fail(error)
    assert loading.error is errors[0]
    assert loading.over()


def test_an_error_of_a_pull_is_that_of_its_load(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    done, errors = Pull.done, [RuntimeError("strange")]

    def fails_once(pull: Pull) -> bool:
        if errors:
            raise errors.pop()
        return done(pull)

    monkeypatch.setattr(Pull, "done", fails_once)
    assert not decode.loads(request("x", PROMPT, params), [5, 6, 7])
    assert decode.ranks[0].guard.take_counts() == {"load": 1}


def test_only_a_step_that_computes_nothing_waits_for_loads(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    loads, waits = decode.ranks[0]._loads, list[float]()
    monkeypatch.setattr(loads, "take", lambda: (set(), set()))
    monkeypatch.setattr(loads, "wait", waits.append)
    decode.load(request("x", PROMPT, params), [5, 6, 7])
    decode.step({"another": Chunk((), 1)})
    assert waits == []
    decode.step()
    assert waits == [0.001]
