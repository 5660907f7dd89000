# SPDX-License-Identifier: Apache-2.0
"""The identity of an SGLang process's model, whose weights and adapters change while it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlink.integrations.sglang import weight_changes
from kvlink.layout.model_identity import model_difference

CONFIG = SimpleNamespace(
    hf_config=SimpleNamespace(architectures=["Llama"]),
    hf_text_config=SimpleNamespace(num_hidden_layers=2),
    dtype="x",
)
OPTIONS = SimpleNamespace(model_path="org/name", revision=None, load_format="auto", quantization=None)


class Process:
    """A process with SGLang's registry of hooks, a manager, and the parts that change its model."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}
        self.seen: list[str] = []
        weight_changes.register_hooks(self, "around")
        weight_changes.follow(self)

    def register(self, target: str, hook: Any, kind: str) -> None:
        assert kind == "around"
        self.hooks[target.rpartition(".")[2]] = hook

    def model_changed(self) -> None:
        self.seen.append(self.text())

    def text(self) -> str:
        return weight_changes.model_of(CONFIG, OPTIONS)

    def call(self, name: str, *args: Any, result: Any = None, raises: bool = False) -> None:
        def original(*_: Any) -> Any:
            if raises:
                raise OSError(name)
            return result

        updater = SimpleNamespace(get_model=lambda: SimpleNamespace(named_parameters=list))
        self.hooks[name](original, updater, *args)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr(weight_changes, "_weights", "")
    monkeypatch.setattr(weight_changes, "_adapters", {})
    monkeypatch.setattr(weight_changes, "live_weights", lambda parameters: "loaded:1")
    return Process()


def adapter(folder: Path, content: bytes = b"a", name: str = "one") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def from_disk(process: Process, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"new")
    process.call("update_weights_from_disk", str(folder), "auto", result=(True, ""))


WEIGHTS: dict[str, tuple[Callable[[Process, Path], None], str]] = {
    "files": (from_disk, "weights is named:org/name@ here, and [0-9a-f]{16} there"),
    "files-that-failed": (
        lambda process, folder: process.call(
            "update_weights_from_disk", str(folder), "auto", result=(False, "")
        ),
        "loaded:1 there",
    ),
    "a-trainer": (lambda process, _: process.call("load_weights_from_distributed", []), "loaded:1 there"),
    "tensors": (lambda process, _: process.call("update_weights_from_tensor", []), "loaded:1 there"),
}


@pytest.mark.parametrize(("change", "difference"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights(
    process: Process, change: Callable[[Process, Path], None], difference: str, tmp_path: Path
) -> None:
    before = process.text()
    change(process, tmp_path)
    [after] = process.seen
    assert re.search(difference, model_difference(before, after))


def test_weights_that_were_changed_in_part_match_nothing(process: Process) -> None:
    with pytest.raises(OSError, match="tensor"):
        process.call("update_weights_from_tensor", [], raises=True)
    assert "weights=unknown:" in process.seen[0]


def test_adapters_are_compared_by_name_and_content(process: Process, tmp_path: Path) -> None:
    before = process.text()
    for number, reference in enumerate((adapter(tmp_path / "a"), adapter(tmp_path / "copy"))):
        process.call("_load_lora_adapter", reference)
        assert process.seen[number] == process.seen[0] != before
    process.call("_load_lora_adapter", adapter(tmp_path / "b", b"b"))
    assert "adapters is" in model_difference(process.seen[0], process.seen[2])
    process.call("_unload_lora_adapter", adapter(tmp_path / "b"))
    assert process.seen[3] == before
    process.call("_load_lora_adapter_from_tensors", adapter(tmp_path / "a"))
    assert "unknown:" in process.seen[4]
