# SPDX-License-Identifier: Apache-2.0
"""The codecs of the core write the bytes that Python writes, and take nothing that Python or protobuf does not take."""

from __future__ import annotations

import hmac
import subprocess
import zlib
from functools import partial
from pathlib import Path

import pytest
from capi import probe
from capi.built import built
from control.codec_values import NAMES, cards
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from unit.example_tickets import tickets

from kvlink.control.codec import CARD, AgentCalls
from kvlink.control.security.tickets import TicketKeys
from kvlink.control.values import ConnectReply, ConnectRequest
from kvlink.errors import AccessDenied, ConfigError
from kvlink.layout.groups import MAX_GROUPS
from kvlink.ticket import Ticket
from kvlink.v1 import agent_pb2 as agent
from kvlink.v1 import card_pb2 as pb

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), max_size=20)
BLOB = st.binary(max_size=40)
KEYS = st.lists(BLOB, max_size=3)

PLANES = st.builds(pb.Plane, region=U32, layer=U32, offset=U64)
PIPELINES = st.builds(pb.Pipeline, rank=U32, bounds=st.lists(U32, max_size=4))
CONTEXTS = st.builds(pb.Context, rank=U32, size=U32, interleave=U32, tp_ranks=U32)
LAYOUTS = st.builds(
    pb.KVLayout, model=TEXT, dtype=TEXT, block_tokens=U32, total_heads=U32, first_head=U32, num_heads=U32,
    row_bytes=U32, block_stride=U64, token_stride=U64, head_stride=U64, num_blocks=U32,
    planes=st.lists(PLANES, max_size=4), tp_rank=U32, tp_size=U32, is_state=st.booleans(), pipeline=PIPELINES,
    context=CONTEXTS,
)  # fmt: skip
HOSTS = st.builds(pb.HostIdentity, boot_id=TEXT, pid_namespace=U64, net_namespace=U64, pid=U32, uid=U32)
TRANSPORTS = st.builds(
    pb.TransportCard, name=TEXT, address=BLOB, pool_keys=KEYS, lease_keys=st.lists(BLOB, max_size=2),
    refused=TEXT, bounces=st.booleans(),
)  # fmt: skip
CHANNELS = st.none() | st.builds(
    pb.NativeChannel, addresses=st.lists(TEXT, max_size=4), instance=st.binary(min_size=16, max_size=16),
    secret=st.binary(min_size=32, max_size=32), flags=U32,
)  # fmt: skip
CARDS = st.builds(
    pb.WorkerCard, worker_id=TEXT, epoch=U64, incarnation=st.just(b"") | st.binary(min_size=16, max_size=16),
    agent=TEXT, host=HOSTS, layouts=st.lists(LAYOUTS, max_size=3), region_bytes=st.lists(U64, max_size=4),
    transports=st.lists(TRANSPORTS, max_size=3), protocol_version=U32, draining=st.booleans(),
    channel=CHANNELS,
)  # fmt: skip
REQUESTS = st.builds(ConnectRequest, NAMES, U64, NAMES, st.lists(BLOB, min_size=1, max_size=5), st.booleans())
REPLIES = st.builds(
    ConnectReply,
    st.integers(0, 2**31 - 1),
    st.lists(BLOB, min_size=1, max_size=5),
    KEYS,
    st.lists(BLOB, max_size=2),
)


@given(CARDS)
def test_cards_are_the_bytes_of_protobuf(card: pb.WorkerCard) -> None:
    blob = card.SerializeToString()
    assert probe.again("card", blob) == blob


@given(cards())
def test_sealed_cards_are_those_of_python(card: object) -> None:
    blob = CARD.encode(card)
    assert probe.again("sealed", blob) == blob


@given(REQUESTS)
def test_connect_requests_are_those_of_python(request: ConnectRequest) -> None:
    blob = AgentCalls.CONNECT.request.encode(request)
    assert probe.again("request", blob) == blob


@given(REPLIES)
def test_connect_replies_are_those_of_python(reply: ConnectReply) -> None:
    blob = AgentCalls.CONNECT.reply.encode(reply)
    assert probe.again("reply", blob) == blob


@given(tickets)
def test_tickets_are_those_of_python(ticket: Ticket) -> None:
    blob = ticket.to_bytes()
    assert probe.again("ticket", blob) == blob


@st.composite
def damaged(draw: st.DrawFn, blobs: st.SearchStrategy[bytes]) -> bytes:
    """Bytes, some of which were replaced, removed or repeated."""
    blob = draw(blobs)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(blob)))
        end = draw(st.integers(at, min(at + 8, len(blob))))
        blob = blob[:at] + draw(st.binary(max_size=8) | st.just(blob[at:end] * 2)) + blob[end:]
    return blob


def _known(message: type[Message], blob: bytes) -> Message:
    """Parses bytes, without what this release does not know."""
    parsed = message.FromString(blob)
    parsed.DiscardUnknownFields()  # type: ignore[attr-defined]
    if isinstance(parsed, pb.WorkerCard):  # the core does not tell an empty part from none
        parsed.host.SetInParent()
        for layout in parsed.layouts:
            layout.pipeline.SetInParent()
            layout.context.SetInParent()
    return parsed


@pytest.mark.parametrize(
    ("kind", "message", "blobs"),
    [
        ("card", pb.WorkerCard, CARDS.map(pb.WorkerCard.SerializeToString)),
        ("request", agent.ConnectRequest, REQUESTS.map(AgentCalls.CONNECT.request.encode)),
        ("reply", agent.ConnectReply, REPLIES.map(AgentCalls.CONNECT.reply.encode)),
    ],
)
def test_what_the_core_takes_protobuf_takes_alike(
    kind: str, message: type[Message], blobs: st.SearchStrategy[bytes]
) -> None:
    taken = 0

    @given(damaged(blobs))
    def check(blob: bytes) -> None:
        nonlocal taken
        try:
            written = probe.again(kind, blob)
        except probe.Refused as refused:
            assert "malformed" in str(refused)
            return
        taken += 1
        expected = _known(message, blob)
        if kind == "request":  # the core always says that it takes keys as the request says
            expected.protocol_version = 5  # type: ignore[attr-defined]
        assert _known(message, written) == expected

    check()
    assert taken > 3


@given(damaged(tickets.map(Ticket.to_bytes)), st.booleans())
def test_the_core_takes_the_tickets_that_python_takes(blob: bytes, mended: bool) -> None:
    if mended and len(blob) >= 12:
        blob = blob[:8] + zlib.crc32(blob[12:]).to_bytes(4, "little") + blob[12:]
    try:
        expected = Ticket.from_bytes(blob).to_bytes()
    except ConfigError:
        with pytest.raises(probe.Refused, match="not a ticket of kvlink"):
            probe.again("ticket", blob)
        return
    assert probe.again("ticket", blob) == expected


@given(st.binary(max_size=300), st.binary(max_size=200))
def test_digests_are_those_of_the_libraries(message: bytes, key: bytes) -> None:
    assert probe.hmac(key, message) == hmac.digest(key, message, "sha256")
    assert probe.crc(message) == zlib.crc32(message)


@given(tickets)
def test_signatures_are_those_of_python(tmp_path_factory: pytest.TempPathFactory, ticket: Ticket) -> None:
    keys = _keys(tmp_path_factory)
    signed = probe.again("sign", ticket.to_bytes(), _KEY)
    assert signed == keys.sign(ticket).to_bytes()
    assert probe.again("check", signed, _KEY) == b""
    keys.checked(Ticket.from_bytes(signed))
    with pytest.raises(probe.Refused, match="not signed"):
        probe.again("check", signed, b"another key")
    changed = bytearray(signed)
    changed[12] ^= 1  # of the epoch
    changed[8:12] = zlib.crc32(changed[12:]).to_bytes(4, "little")
    with pytest.raises(probe.Refused, match="not signed"):
        probe.again("check", bytes(changed), _KEY)
    with pytest.raises(AccessDenied):
        keys.checked(Ticket.from_bytes(bytes(changed)))


_KEY = b"k" * 40


def _keys(folders: pytest.TempPathFactory, kept: list[TicketKeys] = []) -> TicketKeys:  # noqa: B006
    if not kept:
        path = folders.mktemp("keys") / "keys"
        path.write_bytes(_KEY + b"\n")
        path.chmod(0o600)
        kept.append(TicketKeys.of_file(Path(path)))
    return kept[0]


def _message(field: int, content: bytes) -> bytes:
    """A field of protobuf with these bytes."""
    return b"".join(_varint(number) for number in (field << 3 | 2, len(content))) + content


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


LAYOUT = partial(_message, 6)
TRANSPORT = partial(_message, 8)
CARD_PREFIX = _message(1, b"one")


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (LAYOUT(b"") * (MAX_GROUPS + 1), "layouts"),
        (LAYOUT(_message(12, b"") * 1200) * 2, "planes"),
        (_message(7, b"\1" * 4097), "regions"),
        (TRANSPORT(b"") * 33, "transports"),
        (TRANSPORT(_message(3, b"") * 2100) * 2, "pool keys"),
        (TRANSPORT(_message(4, b"") * 3), "lease keys"),
        (LAYOUT(_message(16, _message(2, b"\1" * 2049))), "bounds"),
        (_message(3, b"short"), "incarnation"),
        (_message(11, _message(1, b"a") * 5), "addresses"),
        (_message(11, _message(3, b"short")), "secret"),
        (_message(1, b"\x1b[31m"), "cannot be printed"),
        (_message(1, b"\xff"), "cannot be printed"),
        (b"\x0b", "truncated, or no message"),
        (b"\x0a\xff\xff\xff\xff\x0f", "truncated"),
        (bytes(5 << 20), "4194304"),
    ],
)
def test_bounds_of_cards(blob: bytes, why: str) -> None:
    with pytest.raises(probe.Refused, match=why):
        probe.again("card", CARD_PREFIX + blob)


def test_malformed_bytes_do_no_harm() -> None:
    """100,000 of them; `make test-capi` gives more."""
    ran = subprocess.run([built("kvlink_fuzz"), "100000"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
