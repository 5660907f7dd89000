# SPDX-License-Identifier: Apache-2.0
"""Once a pull has ended, for whatever reason, not one more byte of it lands. Tried hundreds of times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from transports.pairs import Pair
from transports.processes import PeerProcess

from kvlink.errors import Cancelled, PeerUnreachable, TransferError, TransferTimeout

NewPair = Callable[..., Pair]

_OVERWRITTEN = 0x77
_EACH = 128  # blocks of one pull, 2 MiB
_PLACES = 16  # pulls whose destinations are watched at the same time


class Watch:
    """Overwrites what pulls wrote or did not write, and sees later whether it stayed so."""

    def __init__(self, pair: Pair) -> None:
        self._blocks = pair.blocks()
        self._next = 0
        self._watched: list[range] = []

    def next_place(self) -> range:
        self._next = (self._next + 1) % _PLACES
        if self._next == 0:
            self.check()
        return range(self._next * _EACH, (self._next + 1) * _EACH)

    def overwrite(self, place: range) -> None:
        self._blocks[place.start : place.stop] = _OVERWRITTEN
        self._watched.append(place)

    def check(self) -> None:
        for place in self._watched:
            assert (self._blocks[place.start : place.stop] == _OVERWRITTEN).all(), "a late byte landed"
        self._watched.clear()


def wide_pair(transport: str, new_pair: NewPair, **options: object) -> Pair:
    return new_pair(transport, num_blocks=_EACH * _PLACES + 2, **options)


def test_cancelled_pulls_write_no_more(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0, fault="delay-data=300us@every:1")
    pair.works()
    pauses = random.Random(1)
    watch = Watch(pair)
    num_cancelled = 0
    for _ in range(300):
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place)
        time.sleep(pauses.uniform(0, 0.001))
        pull.cancel()
        watch.overwrite(place)
        try:
            pull.wait()
        except Cancelled:
            num_cancelled += 1
            pair.owner.do("abort", request_id=ticket.request_id)
    time.sleep(0.1)
    watch.check()
    assert num_cancelled > 20


def test_pulls_cancelled_while_they_connect_write_nothing(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0)
    pauses = random.Random(2)
    watch = Watch(pair)
    pace_s = 0.005
    num_cancelled = 0
    for _ in range(300):
        for known in pair.reader.peers():
            known.connection.close()
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place)
        time.sleep(pauses.uniform(0.3, 1.0) * pace_s)
        pull.cancel()
        watch.overwrite(place)
        try:
            pull.wait()
            pace_s *= 0.9
        except Cancelled:
            num_cancelled += 1
            pace_s *= 1.1  # about half of them are to be in time
            pair.owner.do("abort", request_id=ticket.request_id)
    time.sleep(0.1)
    watch.check()
    assert num_cancelled > 20


def test_pulls_that_time_out_write_no_more(transport: str, new_pair: NewPair) -> None:
    pair = wide_pair(transport, new_pair, inline_us=0, fault="delay=1ms@every:2")
    pair.works()
    pauses = random.Random(3)
    watch = Watch(pair)
    num_failed = 0
    for _ in range(200):
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        pull = pair.start(ticket, place, timeout_s=pauses.uniform(0.0001, 0.003))
        try:
            pull.wait(20)
        except TransferError as error:
            assert isinstance(error, (TransferTimeout, PeerUnreachable))
            num_failed += 1
            pair.owner.do("abort", request_id=ticket.request_id)
        watch.overwrite(place)
    time.sleep(0.1)
    watch.check()
    assert num_failed > 20
    pair.works()


def test_an_owner_that_was_stopped_brings_nothing_when_it_goes_on(
    new_process: Callable[..., PeerProcess], new_pair: NewPair
) -> None:
    """tcp: what was asked for before the stop is still under way when the owner wakes up."""
    process = new_process()
    pair = wide_pair("tcp", new_pair, at=process, inline_us=0)
    pauses = random.Random(4)
    watch = Watch(pair)
    num_timeouts = 0
    for count in range(100):
        pair.works()  # connected again
        ticket = pair.offer(range(100, 100 + _EACH))
        place = watch.next_place()
        if count % 2:
            process.stop()
        pull = pair.start(ticket, place, timeout_s=0.03)
        process.stop()
        try:
            pull.wait(20)
        except TransferTimeout:
            num_timeouts += 1
        watch.overwrite(place)
        process.go_on()
        time.sleep(pauses.uniform(0, 0.005))
    time.sleep(0.1)
    watch.check()
    assert num_timeouts >= 50
