# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.messages import CHUNK, WANT, Chunk, Failed, Malformed, Want
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
FAILURE = Failed(7, 1 << 62, 3, "no memory – sorry")
WRITTEN = Chunk(7, 1 << 62, 3, 16, 2, True, 3, ((0, TICKET), (2, TICKET)), (b"first", b"", b"row" * 99))


@pytest.mark.parametrize(
    ("message", "kind"),
    [(WANTED, Want), (WRITTEN, Chunk), (FAILURE, Failed), (Chunk(1, 2, 3, 0, 0, False, 1), Chunk)],
)
def test_a_message_survives_the_wire(
    message: Want | Chunk | Failed, kind: type[Want] | type[Chunk] | type[Failed]
) -> None:
    assert kind.from_frames(message.to_frames()) == message


@given(st.data())
def test_bytes_that_changed_are_refused_or_parsed_but_never_crash(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([WANTED, WRITTEN, FAILURE]))
    frames = message.to_frames()
    place = data.draw(st.integers(1, len(frames) - 1))
    frames[place] = data.draw(st.one_of(st.binary(max_size=64), st.just(frames[place][:-1])))
    try:
        parsed = type(message).from_frames(frames)
    except ConfigError:
        return
    assert type(message).from_frames(parsed.to_frames()) == parsed


@pytest.mark.parametrize("message", [WANTED, WRITTEN, FAILURE])
def test_a_message_with_more_or_fewer_frames_is_refused(message: Want | Chunk | Failed) -> None:
    frames = message.to_frames()
    for wrong in (frames[:-1], [*frames, b""], frames[:1], []):
        with pytest.raises(ConfigError, match=r"malformed|kvlink"):
            type(message).from_frames(wrong)


@pytest.mark.parametrize("message", [WANTED, WRITTEN, FAILURE])
def test_another_version_is_refused_by_its_number(message: Want | Chunk | Failed) -> None:
    tag, header, *rest = message.to_frames()
    with pytest.raises(ConfigError, match="uses version 9"):
        type(message).from_frames([tag, b"\x09\x00" + header[2:], *rest])


def test_rows_beyond_the_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds its bound"):
        Chunk.from_frames(Chunk(1, 2, 3, 0, 0, True, 1, (), (bytes(17 << 20),)).to_frames())


def test_the_tags_differ() -> None:
    assert WANTED.to_frames()[0] == WANT != CHUNK == WRITTEN.to_frames()[0]


def test_a_message_that_cannot_be_read_says_which_attempt_it_is_about() -> None:
    for message in (WANTED, WRITTEN, FAILURE):
        tag, header, *rest = message.to_frames()
        for bad in ([tag, header], [tag, b"\x09\x00" + header[2:], *rest], [tag, header + b"x", *rest]):
            with pytest.raises(Malformed) as raised:
                type(message).from_frames(bad)
            assert (raised.value.room, raised.value.generation) == (7, 1 << 62)
    tag, header, host = WANTED.to_frames()
    with pytest.raises(Malformed) as raised:
        Want.from_frames([tag, b"\x01\x00" + header[2:], host])
    assert raised.value.asker == ("127.0.0.1", 4000)
    with pytest.raises(Malformed) as raised:
        Want.from_frames([tag])
    assert raised.value.asker is None
