# SPDX-License-Identifier: Apache-2.0
"""Pulls from an owner in another process that has a native channel, and neither agent nor control thread."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from smoke.native_owner import BLOCKS, LAYOUT, content
from waiting import eventually

from kvlink import BlockPool, Ticket, Worker, WorkerConfig, _core
from kvlink.control.codec import CARD
from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks, StaleReason, TransportUnavailable
from kvlink.types import NEEDS_TLS, WorkerCard

_INTO = [4, 5, 6]
_LONG_S = 60.0


class Owner:
    """The process, its card, a ticket, and one of blocks that are never written."""

    def __init__(self, transport: str, port: int = 0) -> None:
        script = str(Path(__file__).with_name("native_owner.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, transport, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.sealed = bytes.fromhex(said["card"])
        self.card: WorkerCard = CARD.decode(self.sealed)
        self.ticket, self.unwritten = map(Ticket.from_text, said["tickets"])

    @property
    def port(self) -> int:
        assert self.card.channel is not None
        return int(self.card.channel.addresses[0].rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _owner(opened: ExitStack, transport: str, port: int = 0) -> Owner:
    owner = Owner(transport, port)
    opened.callback(owner.kill)
    return owner


def _reader(opened: ExitStack, transport: str) -> Worker:
    config = WorkerConfig(ticket_keys="none")  # a program without Python has no keys yet
    return opened.enter_context(
        Worker(BlockPool.allocate(LAYOUT), "reader", transports=transport, config=config)
    )


def _blocks(pool: np.ndarray) -> np.ndarray:
    return pool.view(np.uint8).reshape(len(LAYOUT.planes), LAYOUT.num_blocks, LAYOUT.block_stride)


def _same_host() -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why_not}. {fix}")] if why_not else [])
        for name, _, _, why_not, fix in _core.transports()
        if name in ("shm", "cma", "tcp")
    ]


@pytest.mark.parametrize("transport", _same_host())
def test_a_pull_brings_the_owners_bytes(opened: ExitStack, transport: str) -> None:
    owner, reader = _owner(opened, transport), _reader(opened, transport)
    assert reader.add_card(owner.sealed) == owner.card
    pull = reader.pull(owner.ticket, _INTO, timeout_s=_LONG_S)
    pull.wait()
    assert pull.explain()[0].transport == transport
    assert pull.stats.settled
    assert (_blocks(reader.pool.numpy())[:, _INTO] == _blocks(content())[:, BLOCKS]).all()
    owner.close()


@pytest.mark.parametrize("transport", _same_host())
def test_a_pull_ends_with_the_process_of_its_owner(opened: ExitStack, transport: str) -> None:
    owner, reader = _owner(opened, transport), _reader(opened, transport)
    reader.add_card(owner.sealed)
    reader.connect(owner.ticket, _LONG_S)
    pull = reader.pull(owner.unwritten, _INTO, timeout_s=3600.0)
    owner.kill()
    with pytest.raises(PeerUnreachable):
        pull.wait()
    with pytest.raises(PeerUnreachable):
        reader.pull(owner.ticket, _INTO, timeout_s=2.0).wait()


def test_an_owner_that_restarted_at_the_same_address_is_refused(opened: ExitStack) -> None:
    owner, reader = _owner(opened, "tcp"), _reader(opened, "tcp")
    reader.add_card(owner.sealed)
    owner.kill()
    again = _owner(opened, "tcp", owner.port)
    assert again.port == owner.port
    with pytest.raises(StaleBlocks, match="restarted or ended"):
        reader.pull(owner.ticket, _INTO, timeout_s=_LONG_S).wait()
    with pytest.raises(StaleBlocks) as refused:
        reader.connect(owner.ticket, _LONG_S)
    assert refused.value.why is StaleReason.RESTARTED
    reader.add_card(again.sealed)
    reader.pull(again.ticket, _INTO, timeout_s=_LONG_S).wait()


@pytest.mark.parametrize(
    ("flags", "why"), [(NEEDS_TLS, "asks for TLS"), (6, "flags 6 for its native channel")]
)
def test_a_channel_that_forbids_itself_is_refused_by_name(opened: ExitStack, flags: int, why: str) -> None:
    owner, reader = _owner(opened, "tcp"), _reader(opened, "tcp")
    assert owner.card.channel is not None
    reader.add_card(CARD.encode(replace(owner.card, channel=replace(owner.card.channel, flags=flags))))
    with pytest.raises(TransportUnavailable, match=why):
        reader.pull(owner.ticket, _INTO, timeout_s=_LONG_S).wait()


def test_a_wrong_secret_opens_nothing_and_shows_in_no_text(
    opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    owner, reader = _owner(opened, "tcp"), _reader(opened, "tcp")
    channel = owner.card.channel
    assert channel is not None
    wrong = replace(channel, secret=bytes(32))
    reader.add_card(CARD.encode(replace(owner.card, channel=wrong)))
    refused = reader.pull(owner.ticket, _INTO, timeout_s=_LONG_S)
    with pytest.raises(KVLinkError, match="is not that of this worker's card") as error:
        refused.wait()
    reader.add_card(owner.sealed)
    pull = reader.pull(owner.ticket, _INTO, timeout_s=_LONG_S)
    pull.wait()
    owner.kill()
    eventually(lambda: all(peer.connection.broken for peer in reader.peers()))
    with pytest.raises(KVLinkError) as gone:
        reader.pull(owner.unwritten, _INTO, timeout_s=2.0).wait()
    texts = [
        error.value,
        gone.value,
        owner.card,
        channel,
        reader,
        pull,
        refused,
        pull.explain(),
        reader.peers(),
    ]
    shown = "\n".join([*map(repr, texts), *map(str, texts), caplog.text])
    assert "native" in shown
    for secret in (channel.secret, channel.instance):
        assert secret.hex() not in shown.lower()
        assert repr(secret)[2:-1] not in shown
