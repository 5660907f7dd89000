# SPDX-License-Identifier: Apache-2.0
"""Which transport a reader takes when better ones are refused, and what is raised when none is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlink.control.refusal import Overloaded
from kvlink.errors import (
    AccessDenied,
    ConfigError,
    CoordinatorError,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    TransferTimeout,
    TransportUnavailable,
    UnknownRequest,
)
from kvlink.layout import Geometry, dense
from kvlink.layout.model_identity import PoolModel
from kvlink.transfer.engine import Engine
from kvlink.transfer.path_stats import AllPathStats
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.types import PROTOCOL_VERSION, HostIdentity, TransportCard, WorkerCard

LAYOUT = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
NAMES = ("shm", "cma", "verbs", "tcp")
CARD = WorkerCard(
    worker_id="owner",
    epoch=7,
    incarnation=b"0",
    layouts=(LAYOUT,),
    region_bytes=LAYOUT.region_bytes,
    transports=tuple(TransportCard(name, b"there", (b"key",), (b"slots", b"words")) for name in NAMES),
    agent="127.0.0.1:1",
    protocol_version=PROTOCOL_VERSION,
    host=HostIdentity("boot", 1, 1, 1, 0),
)


class Path:
    """A connection that fails at one step, or at none."""

    def __init__(self, engine: Script, name: str) -> None:
        self.broken = False
        self.closed = False
        self.given_s = 0.0
        self.num_missing = 0
        self.lost_large = False
        self._engine, self._name = engine, name

    def hellos(self) -> list[bytes]:
        return [b"hello"]

    def establish(self, *arguments: Any) -> list[int]:
        self.given_s = arguments[-1]
        self._engine.fail("establish", self._name)
        return [0]

    def close(self) -> None:
        self.closed = True


class Script:
    """An engine, and the agent of its owner, that fail as told: {"step transport": error}."""

    nics_left_out: Sequence[object] = ()
    bounces = frozenset[str]()
    pool = type("Pool", (), {"groups": (LAYOUT,), "model": PoolModel()})()

    def __init__(self, **errors: KVLinkError) -> None:
        self._errors = {key.replace("_", " "): error for key, error in errors.items()}
        self.paths: dict[str, Path] = {}
        self.path_stats = AllPathStats()

    def fail(self, step: str, name: str) -> None:
        if error := self._errors.get(f"{step} {name}"):
            raise error

    def cards(self) -> tuple[TransportCard, ...]:
        return CARD.transports

    def ports(self) -> list[object]:
        return []

    def planners(self, *_: object) -> tuple[SimpleNamespace]:
        self.fail("plan", "any")
        return (SimpleNamespace(num_layers=1),)

    def open(self, name: str, *_: object) -> Path:
        self.fail("open", name)
        self.paths[name] = Path(self, name)
        return self.paths[name]

    async def card(self, *_: object, fresh: bool) -> WorkerCard:
        return CARD

    async def connect(
        self, card: WorkerCard, transport: str, hellos: Sequence[bytes]
    ) -> tuple[int, list[bytes], Sequence[bytes], bytes]:
        self.fail("connect", transport)
        return 1, [b"reply"], [], b""


def connect(script: Script, timeout_s: float = 60.0) -> Peer:
    peers = Peers(cast(Engine, script), script)
    peer = asyncio.run(peers.connect("owner", 7, "", time.monotonic() + timeout_s))
    assert peer is not None
    return peer


def refused(peer: Peer) -> dict[str, str]:
    return {row.transport: row.reason for row in peer.refused}


@pytest.mark.parametrize("step", ["open", "connect", "establish"])
@pytest.mark.parametrize(
    "kind",
    [TransportUnavailable, AccessDenied, ConfigError, CoordinatorError],
    ids=lambda kind: kind.__name__,
)
def test_a_refusal_at_any_step_leaves_the_other_transports(step: str, kind: type[KVLinkError]) -> None:
    peer = connect(Script(**{f"{step}_shm": kind("not you"), f"{step}_cma": kind("nor you")}))
    assert peer.transport == "verbs"
    assert refused(peer) == {"shm": "not you", "cma": "nor you"}


@pytest.mark.parametrize("kind", [PeerUnreachable, TransferTimeout])
def test_a_path_that_breaks_is_not_an_owner_that_is_gone(kind: type[KVLinkError]) -> None:
    script = Script(**{f"establish_{name}": kind(f"no {name}") for name in NAMES[:3]})
    peer = connect(script)
    assert peer.transport == "tcp"
    assert refused(peer) == {name: f"no {name}" for name in NAMES[:3]}
    assert all(script.paths[name].closed for name in NAMES[:3])


def test_a_network_that_drops_everything_leaves_time_for_another() -> None:
    others = {"open_shm": TransportUnavailable("x"), "open_cma": TransportUnavailable("x")}
    script = Script(**others, establish_verbs=PeerUnreachable("dropped", silent=True))
    assert connect(script).transport == "tcp"
    assert script.paths["verbs"].given_s <= 2.5 < script.paths["tcp"].given_s


def test_with_no_path_left_all_reasons_are_told() -> None:
    steps = {"open_shm": AccessDenied("a"), "connect_cma": TransportUnavailable("b", "mend it")}
    script = Script(**steps, establish_verbs=ConfigError("c"), establish_tcp=AccessDenied("d"))
    with pytest.raises(TransportUnavailable, match=r"shm: a; cma: b\. mend it; verbs: c; tcp: d") as caught:
        connect(script)
    assert not caught.value.retryable


def test_what_may_work_later_is_tried_again_and_then_raised_as_such() -> None:
    script = Script(**{f"establish_{name}": AccessDenied(f"no {name}") for name in NAMES[:3]})
    script._errors["establish tcp"] = PeerUnreachable("hung up")
    with pytest.raises(PeerUnreachable, match="shm: no shm; cma: no cma; verbs: no verbs; tcp: hung up"):
        connect(script)


def test_a_denial_by_every_transport_is_a_denial() -> None:
    with pytest.raises(AccessDenied, match="shm: you; cma: you; verbs: you; tcp: you"):
        connect(Script(**{f"connect_{name}": AccessDenied("you") for name in NAMES}))


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("connect_shm", UnknownRequest("restarted")),
        ("establish_shm", StaleBlocks("restarted")),
        ("plan_any", ConfigError("heads")),
    ],
)
def test_what_is_said_of_the_owner_ends_the_search(step: str, error: KVLinkError) -> None:
    script = Script(**{step: error})
    with pytest.raises(type(error), match=str(error)):
        connect(script)
    assert list(script.paths) == ["shm"]
    assert script.paths["shm"].closed


@pytest.mark.parametrize("error", [PeerUnreachable("agent away"), Overloaded("busy")])
def test_an_agent_that_is_away_or_busy_is_asked_again_for_the_same_transport(error: KVLinkError) -> None:
    script = Script(connect_shm=error)
    with pytest.raises(type(error)):
        connect(script)
    assert list(script.paths) == ["shm"]


def test_what_the_agent_takes_is_not_left_for_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: at[0])
    at = [1000.0]
    monkeypatch.setattr("kvlink.transfer.peers.time", clock)

    class Slow(Script):
        async def connect(self, *request: Any) -> Any:
            at[0] += 3.0
            return await super().connect(*request)

    script = Slow()
    assert connect(script).transport == "shm"
    assert script.paths["shm"].given_s == 2.0  # of the five seconds of an attempt
