# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.messages import CHUNK, WANT, Chunk, Want
from kvlink.ticket import LeaseSeat, Ticket

TICKET = Ticket(
    request_id="7/1",
    worker_id="prefill",
    epoch=3,
    agent="127.0.0.1:1",
    seats=(LeaseSeat(1, 1005, 1006),),
    block_ids=array("I", [4, 2]),
    num_tokens=20,
    ready=2,
)
WANTED = Want(7, 1 << 62, "127.0.0.1", 4000, 8, 1, 2, 2, 32, False)
WRITTEN = Chunk(7, 1 << 62, 3, 16, 2, True, 3, ((0, TICKET), (2, TICKET)), (b"first", b"", b"row" * 99))


@pytest.mark.parametrize(
    ("message", "kind"), [(WANTED, Want), (WRITTEN, Chunk), (Chunk(1, 2, 3, 0, 0, False, 1), Chunk)]
)
def test_a_message_survives_the_wire(message: Want | Chunk, kind: type[Want] | type[Chunk]) -> None:
    assert kind.from_frames(message.to_frames()) == message


@given(st.data())
def test_bytes_that_changed_are_refused_or_parsed_but_never_crash(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([WANTED, WRITTEN]))
    frames = message.to_frames()
    place = data.draw(st.integers(1, len(frames) - 1))
    frames[place] = data.draw(st.one_of(st.binary(max_size=64), st.just(frames[place][:-1])))
    try:
        parsed = type(message).from_frames(frames)
    except ConfigError:
        return
    assert type(message).from_frames(parsed.to_frames()) == parsed


@pytest.mark.parametrize("message", [WANTED, WRITTEN])
def test_a_message_with_more_or_fewer_frames_is_refused(message: Want | Chunk) -> None:
    frames = message.to_frames()
    for wrong in (frames[:-1], [*frames, b""], frames[:1], []):
        with pytest.raises(ConfigError, match=r"malformed|kvlink"):
            type(message).from_frames(wrong)


@pytest.mark.parametrize("message", [WANTED, WRITTEN])
def test_another_version_is_refused_by_its_number(message: Want | Chunk) -> None:
    tag, header, *rest = message.to_frames()
    with pytest.raises(ConfigError, match="uses version 9"):
        type(message).from_frames([tag, b"\x09\x00" + header[2:], *rest])


def test_rows_beyond_the_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds its bound"):
        Chunk.from_frames(Chunk(1, 2, 3, 0, 0, True, 1, (), (bytes(17 << 20),)).to_frames())


def test_the_tags_differ() -> None:
    assert WANTED.to_frames()[0] == WANT != CHUNK == WRITTEN.to_frames()[0]
