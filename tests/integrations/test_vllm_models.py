# SPDX-License-Identifier: Apache-2.0
"""The models and caches that the connector serves, and the format of pages that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from answered_turns import bidirectional, next_turn, offered, pulled
from vllm_server import ASK_PREFILL, Server, request

from kvlink.integrations import models
from kvlink.integrations.vllm.model import weight_changes
from kvlink.integrations.vllm.model.caches import page_format
from kvlink.layout.model_identity import identity_text

A = identity_text("a" * 16, {"weights": "1111", "name": "llama"})
B = identity_text("b" * 16, {"weights": "2222", "name": "llama"})
PROMPT = list(range(10))


def handed_off(prefill: Server, name: str = "r", **changes: Any) -> dict[str, Any] | None:
    made = request(name, PROMPT, dict(ASK_PREFILL))
    vars(made).update(changes)
    return prefill.prefill(made, [3, 9, 1])[1]


def loaded(decode: Server, name: str, params: dict[str, Any] | None) -> bool:
    decode.loads(request(name, PROMPT, params), [5, 6, 7])
    return name not in decode.failed


def changed(server: Server, text: str = B) -> None:
    """As the workers report it with the step after the change."""
    for rank in server.ranks:
        rank.model_changed(text)
    server.scheduler.set_ranks(rank.rank_info for rank in server.ranks)


@pytest.mark.parametrize("tp", [(1, 1), (2, 1)], ids=["tp1", "tp2"])
@pytest.mark.parametrize(
    ("theirs", "is_taken"), [(A, True), (B, False), ("llama", False)], ids=["same", "other", "free text"]
)
def test_a_handoff_of(
    theirs: str, is_taken: bool, tp: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with Server("p", tp_size=tp[0], model=theirs) as prefill, Server("d", tp_size=tp[1], model=A) as decode:
        before = decode.block("layer.0", 5).clone()
        for name in ("first", "later"):
            assert loaded(decode, name, handed_off(prefill, name)) is is_taken
        if not is_taken:
            assert (decode.block("layer.0", 5) == before).all()
            assert "has the cache of another model" in caplog.text
    assert ("weights is 1111 here, and 2222 there" in caplog.text) is (theirs == B)


def test_weights_change_in_place(caplog: pytest.LogCaptureFixture) -> None:
    with Server("p", model=A) as prefill, Server("d", model=A) as decode:
        assert loaded(decode, "before", handed_off(prefill, "before"))
        old = handed_off(prefill, "old")
        changed(prefill)
        assert not loaded(decode, "old", old)
        prefill.step_until(lambda: "old" in prefill.sent)  # its blocks are free again
        assert not loaded(decode, "new", handed_off(prefill, "new"))
        changed(decode)
        assert loaded(decode, "both", handed_off(prefill, "both"))
    assert "weights were changed after it joined" in caplog.text


def test_a_step_of_tickets_that_name_the_model_before() -> None:
    """The scheduler learns of the change one step after the workers have made it."""
    with Server("p", model=A) as prefill, Server("d", model=A) as decode:
        for rank in prefill.ranks:
            rank.model_changed(B)
        assert not loaded(decode, "r", handed_off(prefill))
        prefill.step_until(lambda: "r" in prefill.sent)


def test_a_request_that_began_before_the_change_is_not_handed_off() -> None:
    with Server("p", model=A) as prefill:
        changed(prefill)
        assert handed_off(prefill, "old", arrival_time=0.0) is None
        assert handed_off(prefill, "new", arrival_time=float("inf")) is not None


def test_loads_of_the_model_before_end_with_the_change() -> None:
    with Server("p", model=A) as prefill, Server("d", model=A) as decode:
        assert loaded(decode, "before", handed_off(prefill, "before"))  # from now on, pulls begin at once
        params = handed_off(prefill)
        decode.load(request("x", PROMPT, params), [5, 6, 7])
        decode.ranks[0].carry_out(decode.scheduler.take_commands())
        decode.ranks[0].model_changed(B)
        decode.step_until(lambda: "x" in decode.received)
        assert decode.failed == {"x"}


def test_the_same_weights_again_change_nothing() -> None:
    with Server("p", model=A) as prefill, Server("d", model=A) as decode:
        params = handed_off(prefill)
        changed(prefill, A)
        assert loaded(decode, "x", params)


def test_an_answer_names_the_model_that_computed_it() -> None:
    with bidirectional(model=A) as (prefill, decode):
        assert pulled(prefill, next_turn(offered(decode, [3, 9, 1, 7], "t1")), 5, 6, 8, 10)
        params = offered(decode, [4, 10, 2, 8], "t3")
        changed(prefill)
        assert not pulled(prefill, next_turn(params, "t4"), 5, 6, 8, 10)


class Worker:
    """Has the methods of vLLM's worker that change weights."""

    def __init__(self) -> None:
        model = SimpleNamespace(model="folder", revision=None)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(named_parameters=list))

    def reload_weights(self, weights_iterator: Any = None, weights_path: str | None = None) -> None:
        if weights_path == "broken":
            raise OSError(weights_path)

    def update_weights(self, update: Any) -> None: ...

    def finish_weight_update(self) -> str:
        return "finished"


class Connector:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def weights_changed(self, weights: str) -> None:
        self.seen.append(weights)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "reloaded": (lambda worker: worker.reload_weights(), "folder's"),
    "from-another-folder": (lambda worker: worker.reload_weights(weights_path="other"), "other's"),
    "from-a-trainer": (lambda worker: worker.reload_weights([("name", 1)]), "read"),
    "first-part": (lambda worker: worker.update_weights({}), "unknown"),
    "last-part": (lambda worker: worker.finish_weight_update(), "read"),
}


@pytest.mark.parametrize(("change", "seen"), CHANGES.values(), ids=CHANGES)
def test_what_stands_for_weights_after(
    change: Callable[[Any], Any], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, hooked = Connector(), type("Hooked", (Worker,), {})
    monkeypatch.setattr(weight_changes, "weights_text", lambda name, revision="": f"{name}'s")
    monkeypatch.setattr(weight_changes, "live_weights", lambda parameters: "read")
    weight_changes._connectors.add(connector)
    weight_changes.hook(hooked)
    weight_changes.hook(hooked)
    change(hooked())
    assert connector.seen[0].partition(":")[0] == seen
    assert len(connector.seen) == 1


def test_weights_that_were_changed_in_part_are_unknown() -> None:
    connector, hooked = Connector(), type("Hooked", (Worker,), {})
    weight_changes._connectors.add(connector)
    weight_changes.hook(hooked)
    with pytest.raises(OSError, match="broken"):
        hooked().reload_weights(weights_path="broken")
    weight_changes.weights_changed(SimpleNamespace(named_parameters=lambda: [("a", object())]))
    assert [one.partition(":")[0] for one in connector.seen] == ["unknown", "unknown"]
    assert models.unknown() != models.unknown()


_E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("cache_dtype", "fp8", "kernels", "words"),
    [
        ("auto", "", (), []),
        ("bfloat16", "", (), []),
        ("fp8", _E4M3, (), ["cache=float8_e4m3fn"]),
        ("fp8_e4m3", "float8_e4m3fnuz", (), ["cache=float8_e4m3fnuz"]),
        ("fp8_e5m2", _E4M3, ("vec",), ["cache=fp8_e5m2", "pages=vec"]),
        ("int8_per_token_head", _E4M3, (), ["cache=int8_per_token_head"]),
        ("auto", "", ("vec16", "vec", "vec"), ["pages=vec+vec16"]),
    ],
)
def test_words_say_what_dtype_and_shape_do_not(
    cache_dtype: str, fp8: str, kernels: Sequence[str], words: list[str]
) -> None:
    assert page_format(cache_dtype, fp8, kernels) == words


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (page_format("fp8", _E4M3, ["vec"]), page_format("fp8_e5m2", _E4M3, ["vec"])),
        (page_format("auto", "", ["amx"]), page_format("auto", "", ["vec"])),
    ],
    ids=["two kinds of fp8", "two kinds of CPU"],
)
def test_servers_that_differ_are_refused_by_name(
    theirs: list[str], ours: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Server("p", model=" ".join(["tiny", *theirs])) as prefill,
        Server("d", model=" ".join(["tiny", *ours])) as decode,
    ):
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
        assert not decode.loads(request("x", PROMPT, params), [5, 6, 7])
    assert f"model differs: '{' '.join(['tiny', *ours])}' here" in caplog.text
