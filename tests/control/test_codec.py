# SPDX-License-Identifier: Apache-2.0
"""The codec: values survive the wire, and what is out of bounds is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from control.cards import make_card, make_offer
from control.codec_values import EXAMPLES, METHODS, cards
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control import limits
from kvlink.control.codec import (
    CARD,
    AgentCalls,
    BatchWriter,
    Codec,
    CoordinatorCalls,
    Method,
    StoredRecords,
    _bounds,
)
from kvlink.control.codec._wire import codec
from kvlink.control.limits import (
    MAX_BATCH_OPS,
    MAX_HELLOS,
    MAX_NAME_BYTES,
    MAX_OPAQUE_BYTES,
)
from kvlink.control.overview import (
    MAX_LINKS,
    Beat,
    FailureCount,
    LinkReport,
    WorkerReport,
)
from kvlink.control.values import (
    Claim,
    ConnectRequest,
    HandoffBatch,
    JoinRequest,
    SettleOrder,
    WorkerEpoch,
)
from kvlink.errors import ConfigError
from kvlink.layout import Plane
from kvlink.types import NativeChannel
from kvlink.v1 import agent_pb2, card_pb2, coordinator_pb2, overview_pb2, prefixes_pb2, record_pb2


@pytest.mark.parametrize(("codec", "values"), EXAMPLES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_value_comes_back_equal(
    codec: Codec[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert codec.decode(codec.encode(value)) == value


def decoded(codec: Codec[Any], blob: bytes) -> Any:
    """None if refused; anything but ConfigError escapes."""
    try:
        return codec.decode(blob)
    except ConfigError:
        return None


def _mutate(data: st.DataObject, blob: bytes) -> bytes:
    if data.draw(st.booleans(), "truncate"):
        return blob[: data.draw(st.integers(0, max(0, len(blob) - 1)))]
    damaged = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
    return bytes(damaged)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_within_bounds(data: st.DataObject) -> None:
    codec, values = data.draw(st.sampled_from(EXAMPLES))
    damaged = _mutate(data, codec.encode(data.draw(values)))
    value = decoded(codec, damaged)
    assert value is None or codec.decode(codec.encode(value)) == value


@given(st.data())
def test_a_damaged_card_is_refused(data: st.DataObject) -> None:
    card = data.draw(cards())
    damaged = _mutate(data, CARD.encode(card))
    assert decoded(CARD, damaged) in (None, card)  # equal: for instance a longer form of the same number


@given(blob=st.binary(max_size=300), method=st.sampled_from(METHODS))
def test_noise_raises_nothing_but_config_error(blob: bytes, method: Method[Any, Any]) -> None:
    decoded(method.request, blob)
    decoded(method.reply, blob)


OFFER, CLAIM = make_offer("r"), Claim("r", 1.0)
NATIVE = dataclasses.replace(make_card(), agent="", channel=NativeChannel(("a:1",), bytes(16), bytes(32)))
REPORT, LINK = WorkerReport(), LinkReport("w", "tcp")


@pytest.mark.parametrize(
    ("codec", "value", "names"),
    [
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id=""), "request_id"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id="é" * 257), "request_id has 514 bytes"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=float("nan")), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=0.0), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(rank=1), "rank 1 of 1"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(num_seats=0), "num_seats"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ticket=b""), "ticket"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(epoch=-1), "Offer"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(timeout_s=float("inf")), "timeout_s"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(reader=1), "reader 1 of 1"),
        (CoordinatorCalls.LEAVE.request, WorkerEpoch("w" * (MAX_NAME_BYTES + 1), 1), "worker_id"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(links=(LINK,) * (MAX_LINKS + 1))),
            "number of links is 33",
        ),
        (CoordinatorCalls.KEEP_ALIVE.request, Beat("w", 1, REPORT._replace(oldest_lease_s=-1.0)), "oldest"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(failures=(FailureCount("é" * 33, 1),))),
            "bytes of a reason",
        ),
        (CARD, dataclasses.replace(make_card(), agent=""), "agent"),
        (
            CARD,
            dataclasses.replace(make_card(), channel=NativeChannel((), bytes(16), bytes(32))),
            "addresses",
        ),
        (
            CARD,
            dataclasses.replace(make_card(), channel=NativeChannel(("",), bytes(16), bytes(32))),
            "address",
        ),
        (CARD, dataclasses.replace(NATIVE, channel=NativeChannel(("a:1",), bytes(16), bytes(31))), "secret"),
        (CoordinatorCalls.JOIN.request, JoinRequest(NATIVE), "agent"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", []), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [b""] * (MAX_HELLOS + 1)), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [bytes(MAX_OPAQUE_BYTES + 1)]), "a hello"),
    ],
)
def test_what_exceeds_a_bound_is_not_sent(codec: Codec[Any], value: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        codec.encode(value)


def test_a_batch_of_too_many_operations_is_not_taken() -> None:
    batch = HandoffBatch([], [], [CLAIM] * (MAX_BATCH_OPS + 1))
    blob = CoordinatorCalls.HANDOFFS.request.encode(batch)
    with pytest.raises(ConfigError, match=r"operations in a batch is (over 1024|1025)"):
        CoordinatorCalls.HANDOFFS.request.decode(blob)


def test_a_card_of_another_protocol_version_says_what_to_do() -> None:
    blob = CARD.encode(dataclasses.replace(make_card(), protocol_version=9))
    with pytest.raises(
        ConfigError,
        match=r"worker 'prefill' speaks protocol version 9 and this process speaks 5; run releases",
    ):
        CARD.decode(blob)


def test_a_card_with_an_impossible_layout_is_refused() -> None:
    card = make_card()
    layout = dataclasses.replace(card.layouts[0])
    object.__setattr__(layout, "planes", (Plane(0, 0, 2**63),))
    with pytest.raises(ConfigError, match=r"malformed SealedCard: layout: planes\[0\]"):
        CARD.decode(CARD.encode(dataclasses.replace(card, layouts=(layout,))))


@pytest.mark.parametrize("worker", ["", "w" * (MAX_NAME_BYTES + 1)])
def test_seats_of_no_worker_are_not_renewed(worker: str) -> None:
    blob = agent_pb2.RenewSeatsRequest(worker_id=worker, epoch=1).SerializeToString()
    with pytest.raises(ConfigError, match="worker_id"):
        AgentCalls.RENEW_SEATS.request.decode(blob)


HOSTILE_BYTES = 8 << 20
EVERY_CODEC: dict[str, Codec[Any]] = {}


def _note(codecs: Callable[[Method[Any, Any]], tuple[str, Codec[Any]]]) -> None:
    for calls in (AgentCalls, CoordinatorCalls):
        for method in vars(calls).values():
            if isinstance(method, Method):
                name, found = codecs(method)
                EVERY_CODEC[name] = found


def _service(method: Method[Any, Any]) -> Any:
    service = descriptor_pool.Default().FindServiceByName(method.service)
    return service.FindMethodByName(method.name)


_note(lambda method: (_service(method).input_type.full_name, method.request))
_note(lambda method: (_service(method).output_type.full_name, method.reply))
EVERY_CODEC["kvlink.v1.ClaimRecord"] = StoredRecords.CLAIMED


def _varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def _framed(field: FieldDescriptor, content: bytes) -> bytes:
    return _varint(field.number << 3 | 2) + _varint(len(content)) + content


def repeats(field: Any) -> bool:
    """Whichever release of protobuf says it."""
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


Bomb = tuple[str, Callable[[], bytes]]
_TEXT, _MESSAGE = FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE


def bombs(kind: Descriptor, depth: int = 0) -> list[Bomb]:
    """For each field below `kind` that repeats, a message with very many of its smallest entries."""
    found: list[Bomb] = []
    for field in kind.fields:
        if repeats(field):
            one = _framed(field, b"" if field.cpp_type in (_TEXT, _MESSAGE) else b"\x01" * 4096)
            found.append((field.full_name, partial(bytes.__mul__, one, HOSTILE_BYTES // 2 // len(one))))
        if field.message_type is not None and depth < 3:
            inside = bombs(field.message_type, depth + 1)
            found += [(name, partial(_wrapped, field, blob)) for name, blob in inside]
    return found


def _wrapped(field: FieldDescriptor, blob: Callable[[], bytes]) -> bytes:
    return _framed(field, blob())


BOMBS = [
    (name, where, blob)
    for name in EVERY_CODEC
    for where, blob in bombs(descriptor_pool.Default().FindMessageTypeByName(name))
]


def test_every_field_that_repeats_is_there() -> None:
    seen = {where for _, where, _ in BOMBS} | {where for where, _ in bombs(card_pb2.WorkerCard.DESCRIPTOR)}
    modules = (agent_pb2, coordinator_pb2, overview_pb2, prefixes_pb2, record_pb2, card_pb2)
    kinds = [kind for module in modules for kind in module.DESCRIPTOR.message_types_by_name.values()]
    assert {field.full_name for kind in kinds for field in kind.fields if repeats(field)} <= seen


@pytest.mark.parametrize(
    ("name", "where", "blob"), BOMBS, ids=[f"{name}:{where}" for name, where, _ in BOMBS]
)
def test_too_many_entries_are_refused(name: str, where: str, blob: Callable[[], bytes]) -> None:
    with pytest.raises(ConfigError, match=f"malformed {name.rpartition('.')[2]}: the number of .* exceeds"):
        EVERY_CODEC[name].decode(blob())


@pytest.mark.parametrize(("where", "blob"), bombs(card_pb2.WorkerCard.DESCRIPTOR))
def test_a_card_is_looked_through_before_it_is_read(where: str, blob: Callable[[], bytes]) -> None:
    card = blob()[: limits.MAX_CARD_BYTES]
    sealed = card_pb2.SealedCard(card=card, crc32=zlib.crc32(card))
    with pytest.raises(
        ConfigError, match=r"malformed SealedCard: (the number of .* exceeds|it is truncated)"
    ):
        CARD.decode(sealed.SerializeToString())


def test_parts_of_a_message_that_is_given_twice_add_up() -> None:
    report = overview_pb2.WorkerReport(links=[overview_pb2.LinkReport(worker_id="w" * 500)] * 32)
    beat = coordinator_pb2.Beat(worker_id="w", report=report).SerializeToString()
    with pytest.raises(ConfigError, match="number of links exceeds 32"):
        CoordinatorCalls.KEEP_ALIVE.request.decode(beat * 5)


def test_what_is_refused_was_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Message:
        @staticmethod
        def FromString(blob: bytes) -> None:  # noqa: N802
            raise AssertionError("it was built")

    looked = codec(Message, lambda _: None, lambda _: None, {1: _bounds.Repeated("entries", 4)})  # type: ignore[type-var,arg-type]
    with pytest.raises(ConfigError, match="number of entries exceeds 4, the maximum"):
        looked.decode(b"\x0a\x00" * _bounds.HARMLESS_BYTES)


@pytest.mark.parametrize(
    "blob", [b"\x80", b"\x0a\x05ab", b"\x09\x00", b"\x0b", b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f"]
)
def test_what_is_no_message_is_refused(blob: bytes) -> None:
    with pytest.raises(ConfigError, match=r"truncated|wire type 3|more than 64 bits"):
        _bounds.count(blob, {})


def test_numbers_count_packed_or_not() -> None:
    bounds = {3: _bounds.Repeated("slots", 8, packed=True)}
    assert _bounds.count(b"\x18\x05" * 3 + b"\x1a\x03\x01\x80\x01", bounds) == 5


def test_a_batch_that_takes_what_it_may_is_read() -> None:
    writer = BatchWriter()
    while writer.takes(claim := Claim("c" * 100, 1.0, 0, 1, bytes(64))):
        writer.add_claim(claim)
    assert writer.num_ops == limits.MAX_BATCH_OPS
    blob = writer.to_bytes()
    assert len(CoordinatorCalls.HANDOFFS.request.decode(blob).claims) == limits.MAX_BATCH_OPS
    with pytest.raises(ConfigError, match="number of operations in a batch exceeds 1024"):
        CoordinatorCalls.HANDOFFS.request.decode(blob + blob[: len(blob) // limits.MAX_BATCH_OPS])


def test_a_batch_stays_within_its_bytes_and_what_is_larger_goes_alone() -> None:
    decode = CoordinatorCalls.HANDOFFS.request.decode
    small, large = (
        make_offer("s")._replace(ticket=bytes(500_000)),
        make_offer("l")._replace(ticket=bytes(4 << 20)),
    )
    writer = BatchWriter()
    while writer.takes(small):
        writer.add_offer(small)
    assert not writer.takes(large)
    assert writer.num_ops == 4
    assert len(writer.to_bytes()) <= limits.MAX_BATCH_BYTES
    alone = BatchWriter()
    assert alone.takes(large)
    alone.add_offer(large)
    assert not alone.takes(SettleOrder("w", 1, 1, 1))
    assert decode(alone.to_bytes()) == HandoffBatch([large], [], [])
    two = coordinator_pb2.HandoffBatch.FromString(alone.to_bytes())
    two.settles.add(worker_id="w")
    with pytest.raises(ConfigError, match=r"its 2 entries have \d+ bytes, and at most 2097152 are accepted"):
        decode(two.SerializeToString())


def test_cards_of_any_size_are_read() -> None:
    assert CARD.decode(CARD.encode(make_card())) == make_card()


_EIGHT = """
from kvlink.control.codec import CoordinatorCalls
from kvlink.errors import ConfigError
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
def highest():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
blobs = [bytes([10 + 8 * (number % 3), 0]) * (4 << 20) for number in range(8)]
before = resident()
for blob in blobs:
    try:
        CoordinatorCalls.HANDOFFS.request.decode(blob)
    except ConfigError as error:
        assert "operations in a batch exceeds 1024" in str(error), error
    else:
        raise AssertionError("it was read")
print(max(resident(), highest()) - before)
"""


def test_eight_hostile_batches_take_no_memory() -> None:
    """In a process of its own: what others took and freed does not count."""
    grown = int(
        subprocess.run([sys.executable, "-c", _EIGHT], check=True, capture_output=True, text=True).stdout
    )
    assert grown < 100 << 20
