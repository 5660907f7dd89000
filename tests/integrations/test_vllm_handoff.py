# SPDX-License-Identifier: Apache-2.0
"""Handoffs of vLLM as parameters of a request, and the seeds of its hashes."""

from __future__ import annotations

import dataclasses
import json
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import ConfigError, StaleBlocks
from kvlink.integrations.router import continuation
from kvlink.integrations.vllm.model import seeds
from kvlink.integrations.vllm.model.caches import CacheGroup, TokenUnit
from kvlink.integrations.vllm.model.seeds import DRAWN, advance, continue_seeds
from kvlink.integrations.vllm.prefill.lease_slots import SlotGroups
from kvlink.integrations.vllm.wire import handoff
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff, Owner, expanded, prompt_digest
from kvlink.integrations.vllm.wire.handoff_parts import Part
from kvlink.ticket import MAX_SLOTS, SMALLEST_NONCE, LeaseSeat
from kvlink.tracing import TraceParent
from kvlink.types import ReadyUnit

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SEATS = st.builds(LeaseSeat, st.integers(1, MAX_SLOTS), *[st.integers(SMALLEST_NONCE, 2**64 - 1)] * 2)
NAMES = st.text(min_size=1, max_size=20)
PRINTABLE = NAMES.filter(str.isprintable)
AGENTS = st.builds(
    "{}:{}".format, st.sampled_from(["10.0.0.1", "host-1.x", "[fe80::1]"]), st.integers(1, 65535)
)
BLOCKS = st.lists(U32, max_size=9).map(lambda ids: array("I", ids))
SIZES = st.integers(1, 4096)
HANDOFFS = st.builds(
    Handoff,
    request_id=PRINTABLE,
    owners=st.lists(st.builds(Owner, PRINTABLE, U64, AGENTS), min_size=1, max_size=4).map(tuple),
    seats=st.lists(SEATS, min_size=1, max_size=4).map(tuple),
    block_ids=st.shared(st.lists(BLOCKS, min_size=1, max_size=4).map(tuple), key="groups"),
    block_tokens=st.shared(st.lists(BLOCKS, min_size=1, max_size=4).map(tuple), key="groups").flatmap(
        lambda groups: st.tuples(*(SIZES if len(group) > 1 else SIZES | st.just(0) for group in groups))
    ),
    num_tokens=st.integers(1, 2**31 - 1),
    prompt=st.binary(min_size=16, max_size=16).map(bytes.hex),
    ttl_s=st.integers(1, 86400).map(float),
    trace=st.none()
    | st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255)),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
PAGE = (TokenUnit(16, is_block=True),)
SAMPLE = Handoff(
    "r", (Owner("w", 2**63, "127.0.0.1:1"),), (LeaseSeat(1, 2**64 - 1, 2**63),), (array("I", [4, 0, 7]),), (16,), 33,
    prompt_digest([1, 2]), 30.0,
)  # fmt: skip


@given(HANDOFFS)
def test_it_survives_a_router(handoff: Handoff) -> None:
    passed_on = json.loads(json.dumps({KEY: handoff.to_params(), "other": None}))
    assert Handoff.from_params(passed_on) == handoff


def test_nothing_in_it_is_a_number() -> None:
    """Routers in other languages read every number as a double."""

    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [number for item in value.values() for number in numbers(item)]
        if isinstance(value, list):
            return [number for item in value for number in numbers(item)]
        return [] if isinstance(value, str) else [value]

    assert numbers(SAMPLE.to_params()) == []


@pytest.mark.usefixtures("unsigned")
@given(JSON)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="no handoff of kvlink"):
        Handoff.from_params({KEY: value})


@pytest.mark.usefixtures("unsigned")
@given(st.sampled_from(sorted(SAMPLE.to_params())), JSON)
def test_a_field_that_is_not_ours_is_refused_or_harmless(field: str, value: Any) -> None:
    params = SAMPLE.to_params() | {field: value}
    try:
        handoff = Handoff.from_params({KEY: params})
    except ConfigError:
        return
    assert handoff.to_params().keys() == params.keys() - {"signature"}
    assert handoff.owners
    assert len(handoff.prompt) == 32


@given(HANDOFFS, st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_part_survives_the_coordinator(handoff: Handoff, last: bool, written: bool, more: int) -> None:
    num_tokens = min(handoff.num_tokens + (0 if last else more), 2**31 - 1)
    handoff = replace(handoff, num_tokens=min(handoff.num_tokens, num_tokens))
    part = Part(handoff, num_tokens, last, written)
    assert Part.from_bytes(part.to_bytes()) == part


@given(st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode))
def test_anything_else_is_no_part(blob: bytes) -> None:
    with pytest.raises((ConfigError, StaleBlocks)):
        Part.from_bytes(blob)


@given(st.sampled_from(["num_tokens", "last", "written", KEY]), JSON)
def test_a_part_with_a_foreign_field_is_refused_or_whole(field: str, value: Any) -> None:
    spoilt = json.loads(Part(SAMPLE, 40, False, False).to_bytes()) | {field: value}
    try:
        part = Part.from_bytes(json.dumps(spoilt).encode())
    except ConfigError:
        return
    assert part.handoff.num_tokens <= part.num_tokens
    assert {type(part.last), type(part.written), type(part.num_tokens)} == {bool, int}


def test_who_gives_up_says_why() -> None:
    with pytest.raises(StaleBlocks, match="preempted"):
        Part.from_bytes(Part.refusal("preempted"))


def test_parts_of_two_leases_do_not_mix() -> None:
    first = Part(SAMPLE, 40, False, False)
    assert Part(replace(SAMPLE, num_tokens=40), 40, True, False).continues(first)
    for other in (
        replace(SAMPLE, seats=(LeaseSeat(1, 300, 300),)),
        replace(SAMPLE, owners=(Owner("w", 2**63 + 1, "127.0.0.1:1"),)),
        replace(SAMPLE, prompt=prompt_digest([2, 1])),
        replace(SAMPLE, block_ids=(*SAMPLE.block_ids, array("I"))),
    ):
        assert not Part(other, 40, False, False).continues(first)


def test_nobody_on_the_way_says_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("k" * 32)
    (tmp_path / "keys").chmod(0o600)
    keys = TicketKeys.of_file(tmp_path / "keys")
    monkeypatch.setattr(handoff, "_keys", lambda: keys)
    blob = Part(SAMPLE, 40, False, False).to_bytes()
    assert Part.from_bytes(blob).num_tokens == 40
    with pytest.raises(ConfigError, match="not signed"):
        Part.from_bytes(json.dumps(json.loads(blob) | {"written": True}).encode())


def test_tickets_of_what_is_not_written_follow_the_owner() -> None:
    assert SAMPLE.tickets([CacheGroup(16, 1)], written=False)[0].ready == 0


def test_tickets_cover_whole_blocks() -> None:
    [ticket] = SAMPLE.tickets([CacheGroup(16, 1)])
    assert (ticket.num_tokens, ticket.block_ids.tolist(), ticket.ready) == (48, [4, 0, 7], 3)
    assert SAMPLE.tickets([CacheGroup(16, 1, PAGE)])[0].num_tokens == 3


def test_a_ticket_has_the_blocks_of_each_layout() -> None:
    hybrid = dataclasses.replace(SAMPLE, block_ids=(*SAMPLE.block_ids, array("I", [9])), block_tokens=(16, 0))
    [ticket] = hybrid.tickets([CacheGroup(16, 1), CacheGroup(0, 1, (TokenUnit(),) * 3)])
    assert [list(ids) for ids in ticket.groups()] == [[4, 0, 7], [9], [9], [9]]
    assert (ticket.num_tokens, ticket.ready, ticket.ready_unit) == (48, 48, ReadyUnit.TOKENS)
    [ticket] = hybrid.tickets([CacheGroup(16, 1), CacheGroup(0, 1, (TokenUnit(),) * 3)], written=False)
    assert ticket.ready == 0


def test_the_digest_tells_prompts_apart() -> None:
    digests = {
        prompt_digest([1, 2]),
        prompt_digest([2, 1]),
        prompt_digest([1, 2, 0]),
        prompt_digest([1, 2], ["image"]),
        prompt_digest([1, 2], ["ima", "ge"]),
    }
    assert len(digests) == 5


def test_no_block_stays_no_block() -> None:
    assert expanded([0, 3], 2).tolist() == [0, 0, 6, 7]
    assert expanded([0, 3], 1).tolist() == [0, 3]


def test_slots_are_used_in_turn_and_never_twice() -> None:
    groups = SlotGroups(num_slots=10, seats=3)
    taken = [groups.take() for _ in range(4)]
    assert taken[3] is None
    first, second, third = taken[0], taken[1], taken[2]
    assert first
    assert second
    assert third
    assert sorted(seat.slot for seats in (first, second, third) for seat in seats) == list(range(1, 10))
    groups.release(second)
    groups.release(first)
    again = groups.take()
    assert again
    assert [seat.slot for seat in again] == [seat.slot for seat in second]
    assert {seat.nonce for seat in again}.isdisjoint(seat.nonce for seat in second)
    assert min(min(seat.nonce, seat.settle_nonce) for seat in again) > 255


PROMPT = [1, 2, 3, 4, 5, 6]


def draws(generator: torch.Generator, number: int) -> list[int]:
    """As vLLM's sampler for CPUs draws, once for each token."""
    return [
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item() for _ in range(number)
    ]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Runner:
    """Makes generators as vLLM's runner does."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(vocab_size=32)

    def _update_states(self, scheduler_output: Any) -> str:
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(generator=seeded() if new.seeded else None)
        return "corrections"


def step(extra_args: Any, *, is_seeded: bool = True, has_params: bool = True) -> Any:
    params = SimpleNamespace(extra_args=extra_args) if has_params else None
    new = SimpleNamespace(req_id="r", seeded=is_seeded, sampling_params=params, prompt_token_ids=PROMPT)
    return SimpleNamespace(scheduled_new_reqs=[new])


@pytest.fixture
def runner() -> Any:
    class OfThisTest(Runner):
        pass

    OfThisTest._update_states = lambda self, output: Runner._update_states(self, output)  # type: ignore[method-assign]
    continue_seeds(OfThisTest)
    continue_seeds(OfThisTest)
    return OfThisTest()


def test_the_numbers_go_on(runner: Any) -> None:
    assert runner._update_states(step({DRAWN: 3})) == "corrections"
    assert draws(runner.requests["r"].generator, 4) == draws(seeded(), 7)[3:]


@pytest.mark.parametrize(
    "given", [None, {}, {DRAWN: 0}, {DRAWN: -1}, {DRAWN: "3"}, {DRAWN: True}, {DRAWN: 6}]
)
def test_other_requests_begin_at_the_seed(runner: Any, given: Any) -> None:
    """Also one that tells more tokens than its prompt can contain."""
    runner._update_states(step(given))
    assert draws(runner.requests["r"].generator, 4) == draws(seeded(), 4)


def test_requests_without_a_seed_or_parameters(runner: Any) -> None:
    runner._update_states(step({DRAWN: 3}, is_seeded=False))
    runner._update_states(step(None, has_params=False))
    assert draws(runner.requests["r"].generator, 1) == draws(seeded(), 1)


def test_a_gpus_generator_advances_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_offset_a_token", lambda device, size: size // 8)
    offsets = [8]
    generator = SimpleNamespace(
        device=torch.device("cuda"), get_offset=lambda: offsets[-1], set_offset=offsets.append
    )
    advance(generator, 3, 32)  # type: ignore[arg-type]
    assert offsets == [8, 20]


def test_other_devices_are_left_alone() -> None:
    advance(SimpleNamespace(device=torch.device("xpu")), 3, 32)  # type: ignore[arg-type]


def test_the_router_names_the_same_parameter() -> None:
    assert continuation.DRAWN == DRAWN
