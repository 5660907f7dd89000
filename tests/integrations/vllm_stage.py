# SPDX-License-Identifier: Apache-2.0
"""Plays stories at two vLLM servers, which stay for the next one, and checks what is left of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from hypothesis import HealthCheck, settings
from vllm_engine import Engine, pattern
from vllm_hostile import Mutation, Params, Story, honest, mutated_part, passed_on
from vllm_server import ASK_PREFILL, NUM_BLOCKS, Server, request
from waiting import eventually

from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.wire.handoff_parts import STREAM
from kvlink.runtime.background import ControlThread

ONE, TWO = (("layer.0", "layer.1"),), (("layer.0",), ("window.1",))
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"decode_tp": 2},
    {"prefill_tp": 2},
    {"prefill_tp": 2, "decode_tp": 2},
    {"decode_groups": TWO},
    {"prefill_groups": TWO},
    {"prefill_groups": TWO, "decode_groups": TWO},
    {"decode_model": "another"},
    {"bidirectional": True},
    {"streaming": True},
    {"streaming": True, "decode_groups": TWO},
    {"streaming": True, "prefill_tp": 2, "decode_tp": 2},
]
SETTINGS = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class Pair:
    """Two servers that examples share, as long as nothing goes wrong in one."""

    def __init__(self, stack: ExitStack, layout: dict[str, Any]) -> None:
        def server(name: str, role: str, **more: Any) -> Server:
            groups, tp_size = layout.get(f"{role}_groups", ONE), layout.get(f"{role}_tp", 1)
            more |= {"answer_s": 600.0} if "bidirectional" in layout else {}
            more |= {"coordinator": coordinator} if "streaming" in layout else {}
            return stack.enter_context(
                Server(name, tp_size, groups, model=layout.get(f"{role}_model", "tiny"), **more)
            )

        coordinator = stack.enter_context(coordinating()) if "streaming" in layout else ""
        self.prefill, self.decode = server("p", "prefill", lease_s=600.0), server("d", "decode")
        self.fits = layout.get("prefill_groups", ONE) == layout.get("decode_groups", ONE)
        self.fits &= "decode_model" not in layout
        self.number = 0
        self.mutation: Mutation = honest
        if coordinator:
            self._change_parts(self.prefill.scheduler._announcements)
        self.slots = {"p": len(self.prefill.scheduler._slots), "d": len(self.decode.scheduler._slots)}

    def _change_parts(self, announcements: Any) -> None:
        """Lets parts of handoffs be changed on their way."""
        announce = announcements.announce

        def changed(name: str, number: int, owner: Any, ttl_s: float, part: bytes, trace: Any) -> Any:
            return announce(name, number, owner, ttl_s, mutated_part(part, self.mutation), trace)

        announcements.announce = changed


@contextmanager
def coordinating() -> Iterator[str]:
    control, coordinator = ControlThread.shared(), Coordinator()
    control.run(coordinator.start())
    yield coordinator.address
    control.run(coordinator.close())


class Pairs:
    def __init__(self) -> None:
        self._opened: dict[int, tuple[ExitStack, Pair]] = {}

    def of(self, layout: int) -> Pair:
        if layout not in self._opened:
            stack = ExitStack()
            self._opened[layout] = stack, Pair(stack, LAYOUTS[layout])
        return self._opened[layout][1]

    def drop(self, layout: int) -> None:
        self._opened.pop(layout)[0].close()

    def close(self) -> None:
        for layout in list(self._opened):
            self.drop(layout)


class Scene:
    """One example: stories and events at a pair. Requests have other prompts than all before."""

    def __init__(self, pair: Pair, stories: list[Story]) -> None:
        pair.number += 1
        self.pair, self.stories = pair, stories
        self.engines = {"p": Engine(pair.prefill), "d": Engine(pair.decode)}
        self.prompts = [[pair.number * 4 + index, *range(9)] for index in range(len(stories) + 1)]
        self.honest: dict[str, int] = {}
        self.tries = 0
        pair.mutation = stories[0].mutation
        self.reasons: Counter[str] = Counter()

    def name(self, index: int, kind: str) -> str:
        return f"{self.stories[index].id}{self.pair.number}-{index}{kind}"

    def asked(self, index: int) -> Params:
        """Returns what the router adds. It chooses a new name for each request."""
        return {
            key: f"{value}{self.pair.number}-{index}"
            if key == STREAM and isinstance(value, str) and value
            else value
            for key, value in self.stories[index].prefill.items()
        }

    @property
    def guarded(self) -> Counter[str]:
        """Exceptions that were kept inside a request, by what it was doing."""
        return self.engines["p"].guarded + self.engines["d"].guarded

    def happens(self, what: str, side: str, index: int) -> None:
        index %= len(self.stories)
        engine = self.engines[side]
        if what == "prefill":
            self.prefills(index)
        elif what == "handoff":
            self.prefills(index)
            self.step("p", 4)
        elif what == "turn":
            self.turns(index)
        elif what == "decode":
            self.decodes(index)
        elif what == "abort":
            for name in [name for name in engine.live if name.startswith(self.name(index, ""))][:1]:
                engine.abort(name)
        elif what == "preempt":
            for name in [name for name in engine.live if name.startswith(self.name(index, ""))][:1]:
                engine.preempt(name)
        elif what == "reset":
            engine.server.scheduler.reset()
        elif what == "late":
            engine.late = index
        elif what == "pause":  # the other one steps alone
            self.step("d" if side == "p" else "p", 3)
        else:
            self.step(side, index + 1)

    def step(self, side: str, times: int) -> None:
        for _ in range(times):
            self.engines[side].step()
            self.compare()

    def prefills(self, index: int) -> None:
        name, engine = self.name(index, "p"), self.engines["p"]
        if name not in engine.live and name not in engine.answers:
            asks = request(name, list(self.prompts[index]), ASK_PREFILL | self.asked(index))
            engine.add(asks, ask=True)

    def decodes(self, index: int) -> None:
        answer = self.engines["p"].answers.get(self.name(index, "p"))
        params = {"do_remote_prefill": True, **self.asked(index)} if answer is None else answer
        try:
            sent = passed_on(self.stories[index].mutation(params))
        except (KeyError, TypeError):  # there is nothing to change
            sent = params
        self.tries += 1
        name = self.name(index, f"d{self.tries}")
        asks = request(name, list(self.prompts[index]), None)
        asks.kv_transfer_params = dict(sent) if isinstance(sent, dict) else sent
        if sent == params and (answer is not None or self.pair.mutation is honest):
            self.honest[name] = index
        self.engines["d"].add(asks)

    def turns(self, index: int) -> None:
        """The next turn of a chat: the ticket of its last answer comes back to prefill."""
        answers = self.engines["d"].answers
        given = [
            answers[name] for name in answers if name.startswith(self.name(index, "d")) and answers[name]
        ]
        if not given:
            return
        self.tries += 1
        try:
            sent = passed_on(self.stories[index].mutation(given[-1]))
        except (KeyError, TypeError):
            sent = given[-1]
        asks = request(self.name(index, f"t{self.tries}"), [*self.prompts[index], 7], None)
        asks.kv_transfer_params = dict(sent) if isinstance(sent, dict) else sent
        self.engines["p"].add(asks, ask=True)

    def compare(self) -> None:
        """Compares what was loaded by an honest handoff with what was computed."""
        engine = self.engines["d"]
        for name in engine.loaded:
            live = engine.live.get(name)
            if live is None or name not in self.honest or not live.loaded:
                continue
            for blocks in live.blocks:
                for index, block in enumerate(blocks):
                    byte = pattern(self.prompts[self.honest[name]], index)
                    for tensors in engine.server.caches:
                        assert all(bool((tensor[block] == byte).all()) for tensor in tensors.values()), name
        engine.loaded.clear()

    def ends(self) -> None:
        """Lets all end that can, and checks what is left."""
        for engine in self.engines.values():
            engine.late = 0
        eventually(self._steps_decode)
        eventually(self._steps_prefill)
        for side, engine in self.engines.items():
            eventually(lambda engine=engine: settled(engine))
            assert left(engine, self.pair.slots[side]) == {}, side
        for server in (self.pair.prefill, self.pair.decode):
            self.reasons.update(server.scheduler.take_counts())

    def honest_again(self) -> bool:
        """Another request is handed off as if nothing had happened. Returns whether it was loaded, and not computed."""
        name, prompt, self.pair.mutation = f"honest-{self.pair.number}", self.prompts[-1], honest
        self.engines["p"].add(request(name, list(prompt), ASK_PREFILL), ask=True)
        eventually(lambda: self.step("p", 1) or name in self.engines["p"].answers)
        asks = request(name, list(prompt), self.engines["p"].answers[name])
        self.engines["d"].add(asks)
        self.stories.append(Story(name, {}, honest))
        self.honest[name] = len(self.stories) - 1
        before = len(self.engines["d"].failed)
        self.ends()
        return len(self.engines["d"].failed) == before

    def _steps_decode(self) -> bool:
        scheduler, engine = self.pair.decode.scheduler, self.engines["d"]
        # It may have been asked to hand off. A whole reset would also release what waits to be loaded.
        scheduler._commands.retired += scheduler._sent.all()
        scheduler.turns.reset()
        for name in [name for name, one in scheduler.incoming._requests.items() if one.is_pending]:
            engine.abort(name)  # its prefill is never announced
        self.step("d", 1)
        self.engines["p"].step()
        return self.engines["d"].quiet()

    def _steps_prefill(self) -> bool:
        self.pair.prefill.scheduler.reset()  # nobody reads the rest
        self.engines["p"].step()
        return self.engines["p"].quiet()


def settled(engine: Engine) -> bool:
    """Steps once. Whether the events of all leases are in."""
    engine.step()
    return all(not rank._leases._ids for rank in engine.server.ranks)


def left(engine: Engine, slots: int) -> dict[str, Any]:
    """Returns what a server still holds of requests that are over."""
    scheduler = engine.server.scheduler
    incoming, tables = scheduler.incoming, [rank._leases for rank in engine.server.ranks]
    held = {
        "blocks": sorted(set(range(1, NUM_BLOCKS)) - set(engine.free)),
        "slots": slots - len(scheduler._slots),
        "seats": scheduler._seats,
        "traces": scheduler._traces._offers,
        "tickets": scheduler._sent.all(),
        "announced": len(scheduler._outgoing),
        "awaited": incoming._requests,
        "shared": incoming._shared_leases._shared,
        "turns": scheduler.turns.earlier
        and (scheduler.turns.earlier._turns or scheduler.turns.earlier._asked),
        "renewed": incoming._remote,
        "offers": [len(rank._worker.offers) for rank in engine.server.ranks if len(rank._worker.offers)],
        "leases": [table for table in tables if len(table) or table._ended or table._ending or table._ids],
        "loads": [len(rank._loads) for rank in engine.server.ranks if len(rank._loads)],
        "counted": {what: count for what, counts in engine._counts.items() if (count := dict(counts))},
    }
    return {what: value for what, value in held.items() if value}


def plays(
    pairs: Pairs,
    layout: int,
    stories: list[Story],
    events: list[tuple[str, str, int]],
    breaking: Callable[[Pair], AbstractContextManager[object]] = nullcontext,
) -> Scene:
    """Plays one example, and then an honest request. `breaking` breaks something until the example has ended."""
    pair = pairs.of(layout)
    try:
        scene = Scene(pair, stories)
        with breaking(pair):
            for event in events:
                scene.happens(*event)
            scene.ends()
        well = scene.honest_again()
    except BaseException:
        pairs.drop(layout)
        raise
    assert well is pair.fits
    return scene
