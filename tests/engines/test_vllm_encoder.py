# SPDX-License-Identifier: Apache-2.0
"""An encoder server and servers that pull its outputs: greedy tokens of one server that does everything itself.

The plain server has no connector. Nothing is left in prefix caches, so that every image needs its embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from encoders import asked, encode, items, launch
from images import Parts
from pair import eventually, prompt
from servers import ENGINES, Server, running

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("variants"),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

SETTLE_S = 30.0
_POOL_MIB = 1
_ITEMS_OF_POOL = 16
"""An image's 16 embeddings of 256 float32 numbers take 16 KiB, and so one block of 64 KiB."""


@dataclass
class Encoding:
    """The three servers. A test that kills one replaces it here."""

    encoder: Server
    reader: Server
    plain: Server

    def encode(self, parts: Parts) -> dict[str, Any]:
        """Asks the encoder server for the message's images, and returns what the reader needs."""
        return encode(self.encoder, parts)

    def continued(self, parts: Parts, params: object, expected: Sequence[int] | None) -> None:
        assert asked(self.reader, parts, ec_transfer_params=params).tokens == expected


@contextmanager
def encoding() -> Iterator[Encoding]:
    launches = [
        launch("ec_producer", pool_mib=_POOL_MIB),
        launch("ec_consumer", pool_mib=_POOL_MIB),
        launch(""),
    ]
    with running(launches) as (encoder, reader, plain):
        yield Encoding(encoder, reader, plain)


@pytest.fixture(scope="module")
def servers() -> Iterator[Encoding]:
    with encoding() as started:
        yield started


def text(num_tokens: int) -> list[int]:
    return prompt("about encoded images", num_tokens)


def test_images_anywhere(servers: Encoding) -> None:
    """First, last, across the end of a chunk, several, and one twice. The reader's encoder never runs."""
    messages: list[Parts] = [
        ["a", text(40)],
        [text(300), "b"],
        [text(1015), "c", text(60)],
        [text(60), "d", text(70), "e", text(20)],
        ["f", "f", text(10)],
    ]
    for parts in messages:
        expected = asked(servers.plain, parts).tokens
        servers.continued(parts, servers.encode(parts), expected)
    assert eventually(lambda: items(servers.reader, "pulled") == 6, SETTLE_S)
    assert items(servers.encoder, "offered") == 6
    assert items(servers.reader, "encoded_here") == 0


def test_tokens_depend_on_the_embeddings(servers: Encoding) -> None:
    """So that equal tokens prove that the right ones arrived."""
    first, second = ([text(30), name, text(30)] for name in "ga")
    assert asked(servers.plain, first).tokens != asked(servers.plain, second).tokens


def test_evicted_outputs_are_encoded_by_the_reader(servers: Encoding) -> None:
    parts: Parts = [text(30), "evicted", text(30)]
    expected = asked(servers.plain, parts).tokens
    params = servers.encode(parts)
    for number in range(_ITEMS_OF_POOL):
        servers.encode([text(5), f"evicting {number}"])
    before = items(servers.reader, "stale"), items(servers.reader, "encoded_here")
    servers.continued(parts, params, expected)
    assert eventually(
        lambda: (
            (items(servers.reader, "stale"), items(servers.reader, "encoded_here"))
            == (before[0] + 1, before[1] + 1)
        ),
        SETTLE_S,
    )


def test_another_images_ticket_is_refused(servers: Encoding) -> None:
    first, second = ([text(30), name, text(30)] for name in ("one", "other"))
    expected = asked(servers.plain, first).tokens
    (name, _), (_, other) = (*servers.encode(first).items(), *servers.encode(second).items())
    before = items(servers.reader, "mismatch")
    servers.continued(first, {name: other}, expected)
    assert eventually(lambda: items(servers.reader, "mismatch") == before + 1, SETTLE_S)


def test_a_reader_of_two_ranks(servers: Encoding) -> None:
    """Its ranks are processes beside the scheduler's, whose memory they map."""
    messages: list[Parts] = [[text(50), "h", text(20), "i"], ["h", text(900)]]
    expected = [asked(servers.plain, parts).tokens for parts in messages]
    with running([launch("ec_consumer", "--tensor-parallel-size", "2", pool_mib=_POOL_MIB)]) as (reader,):
        for parts, tokens in zip(messages, expected, strict=True):
            answer = asked(reader, parts, ec_transfer_params=servers.encode(parts))
            assert answer.tokens == tokens
        assert eventually(lambda: items(reader, "pulled") == 2, SETTLE_S)
        assert items(reader, "encoded_here") == 0


def test_the_encoder_server_is_killed(servers: Encoding) -> None:
    parts: Parts = [text(30), "killed", text(30)]
    expected = asked(servers.plain, parts).tokens
    params = servers.encode(parts)
    servers.encoder.kill()
    servers.continued(parts, params, expected)
    assert eventually(lambda: items(servers.reader, "unreachable") == 1, SETTLE_S)
