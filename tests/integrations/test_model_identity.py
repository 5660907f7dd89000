# SPDX-License-Identifier: Apache-2.0
"""Models are the same only where their weights, adapters and layouts are, at vLLM and at SGLang."""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlink.errors import ConfigError
from kvlink.integrations import models
from kvlink.integrations.models import Adapters, adapter_text, fingerprint, model_text, weights_text
from kvlink.integrations.sglang import weight_changes
from kvlink.layout.model_identity import model_difference, model_id

Weights = dict[str, bytes]
WEIGHTS: Weights = {
    **{f"layers.{layer}.weight": bytes([layer + 1]) * (200 << 10) for layer in range(4)},
    "norm.weight": bytes(range(64)),
}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def written(path: Path, weights: Weights, dtype: str = "U8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table, start = {"__metadata__": {"format": "pt"}}, 0
    for name, data in weights.items():
        table[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [start, start + len(data)]}  # type: ignore[dict-item]
        start += len(data)
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(weights.values()))
    return path


def whole(folder: Path, weights: Weights = WEIGHTS) -> Path:
    return written(folder / "model.safetensors", weights).parent


def sharded(folder: Path) -> Path:
    names, index = list(WEIGHTS), {}
    for number, half in enumerate((names[::2], names[1::2])):
        written(folder / f"model-{number}.safetensors", {name: WEIGHTS[name] for name in half})
        index |= dict.fromkeys(half, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def with_another_format(folder: Path) -> Path:
    written(folder / "consolidated.safetensors", {"other": b"x"})
    written(folder / "adapter_model.safetensors", {"other": b"y"})
    (folder / "training_args.bin").write_bytes(b"z")
    return whole(folder)


def changed(name: str, at: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        data = bytearray(WEIGHTS[name])
        data[at] ^= 1
        return whole(folder, WEIGHTS | {name: bytes(data)})

    return make


def renamed(folder: Path) -> Path:
    return whole(folder, {name.replace("norm", "other_norm"): data for name, data in WEIGHTS.items()})


SAME = {"a-copy": whole, "sharded": sharded, "files-that-no-engine-loads": with_another_format}
OTHER = {
    "first-byte": changed("layers.2.weight", 0),
    "last-byte": changed("layers.3.weight", -1),
    "any-byte-of-a-small-tensor": changed("norm.weight", 33),
    "another-name": renamed,
    "fewer-tensors": lambda folder: whole(folder, {name: WEIGHTS[name] for name in list(WEIGHTS)[1:]}),
    "another-dtype": lambda folder: written(folder / "model.safetensors", WEIGHTS, "I8").parent,
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_equal_weights_have_one_fingerprint(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert fingerprint(make(tmp_path / "b")) == fingerprint(whole(tmp_path / "a")) != ""


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_other_weights_have_another(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert fingerprint(make(tmp_path / "b")) not in ("", fingerprint(whole(tmp_path / "a")))


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = whole(tmp_path), []
    real = models._rows
    monkeypatch.setattr(models, "_rows", lambda file, *more: read.append(file) or real(file, *more))
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    assert len(read) == 1
    changed("norm.weight", 0)(folder)
    assert fingerprint(folder) != before


MALFORMED = {
    "no-header": b"",
    "header-beyond-the-file": struct.pack("<Q", 1 << 62) + b"{}",
    "header-of-100-GB": struct.pack("<Q", 100 << 30) + b"{}",
    "not-json": struct.pack("<Q", 4) + b"nope",
    "a-list": struct.pack("<Q", 2) + b"[]",
    "tensor-beyond-the-file": struct.pack("<Q", 54)
    + b'{"a": {"dtype":"U8","shape":[9],"data_offsets":[0,9]}} ',
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_compared_as_bytes(data: bytes, tmp_path: Path) -> None:
    found = set()
    for number, more in enumerate((b"", b"", b"x")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(data + more)
        found.add(fingerprint(folder))
    assert len(found) == 2
    assert "" not in found


def test_every_tensor_has_a_sample_whatever_their_number(tmp_path: Path) -> None:
    weights = {f"expert.{number}": bytes([number % 251]) * (models._WHOLE_BYTES + 1) for number in range(300)}
    before = fingerprint(whole(tmp_path / "a", weights))
    for name in ("expert.0", "expert.299"):
        assert (
            fingerprint(whole(tmp_path / name, weights | {name: b"z" * (models._WHOLE_BYTES + 1)})) != before
        )


def config(**changes: Any) -> Any:
    values = {
        "hidden_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "_name_or_path": "llama",
    } | changes
    return SimpleNamespace(**values)


def text(folder: Path | str = "", changes: dict[str, Any] | None = None, **more: Any) -> str:
    return model_text(["LlamaForCausalLM"], config(**(changes or {})), name=str(folder), **more)


NOT_THE_SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("rope", {"rope_parameters": ROPE | {"rope_theta": 5e5}}, {}),
    "scaling": ("rope", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}, {}),
    "norm": ("rms_norm_eps", {"rms_norm_eps": 1e-5}, {}),
    "an-unknown-field": ("query_scale", {"query_scale": 2}, {}),
    "a-long-field": ("layer_types", {"layer_types": ["full", "sliding"] * 99}, {}),
    "quantization": ("quantization", {}, {"quantization": "fp8"}),
    "quantization-scales": ("quantization_config", {"quantization_config": {"scale": 0.5}}, {}),
    "dtype": ("dtype", {}, {"dtype": "float16"}),
    "adapters": ("adapters", {}, {"adapters": {"a": "1"}}),
    "weights-in-memory": ("weights", {}, {"weights": "loaded:1"}),
    "dummy-weights": ("weights", {}, {"load_format": "dummy"}),
}


@pytest.mark.parametrize(("field", "changes", "more"), NOT_THE_SAME.values(), ids=NOT_THE_SAME)
def test_another_model_and_the_field_that_says_so(
    field: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = text(whole(tmp_path)), text(whole(tmp_path), changes, **more)
    assert 0 != model_id(ours) != model_id(theirs) != 0
    assert f"{field} is " in model_difference(ours, theirs)
    assert " here, and " in model_difference(ours, theirs)
    assert ours.isprintable()


ALIKE: dict[str, dict[str, Any]] = {
    "another-place": {"_name_or_path": "elsewhere"},
    "another-release-of-transformers": {"transformers_version": "4.0", "new_option": None, "new_flag": False},
    "no-field-of-the-cache": {
        "use_cache": True,
        "bos_token_id": 3,
        "attention_dropout": 0.1,
        "id2label": {0: "a"},
    },
    "an-integer-written-as-a-float": {"hidden_size": 64.0},
    "rope-as-transformers-4-has-it": {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},
}


@pytest.mark.parametrize("changes", ALIKE.values(), ids=ALIKE)
def test_the_same_model_in_other_words(changes: dict[str, Any], tmp_path: Path) -> None:
    assert model_id(text(whole(tmp_path / "a"))) == model_id(text(sharded(tmp_path / "b"), changes))


def test_what_stands_in_where_no_weights_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_text("s3://bucket/model", "v1") == "named:s3://bucket/model@v1"
    assert weights_text("somewhere/else") != weights_text("somewhere")
    assert weights_text(str(tmp_path), load_format="dummy") == "dummy"
    assert weights_text("") != weights_text(""), "a model without a name matches nothing, not even its like"
    (tmp_path / "model.gguf").write_bytes(b"g" * 100)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(models, "_rows", lambda *_: (tmp_path / "none").read_bytes())
        assert weights_text(str(tmp_path)) == f"named:{tmp_path}@"
    assert len({weights_text(str(tmp_path)), weights_text(str(tmp_path / "model.gguf"))}) == 1


def test_an_operator_declares_two_models_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = text(whole(tmp_path / "a")), text(changed("norm.weight", 0)(tmp_path / "b"))
    a, b = (f"{model_id(each):016x}" for each in (ours, theirs))
    declared = text(tmp_path / "a", same=f"0123456789abcdef={b}, {a}={b}")
    assert model_id(declared) == model_id(theirs)
    assert f"declared-from={a}" in declared
    assert b in caplog.text
    assert model_id(text(tmp_path / "a", same=f"{b}={a}")) == model_id(ours), "it names the other's direction"
    with pytest.raises(ConfigError, match="KVLINK_SAME_MODEL"):
        text(tmp_path / "a", same="a=b")


def adapter(folder: Path, data: bytes = b"lora" * 10, **changes: Any) -> Path:
    written(folder / "adapter_model.safetensors", {"lora_A": data})
    about = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": str(folder), "peft_version": "1"}
    (folder / "adapter_config.json").write_text(json.dumps(about | changes))
    return folder


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    ours = adapter_text(adapter(tmp_path / "a"))
    assert adapter_text(adapter(tmp_path / "b")) == ours != ""
    assert adapter_text(adapter(tmp_path / "c", b"lore" * 10)) != ours
    assert adapter_text(adapter(tmp_path / "d", lora_alpha=32)) != ours


def test_an_adapter_whose_files_change_under_its_number_is_unknown(tmp_path: Path) -> None:
    now = itertools.count()
    adapters, folder = Adapters(lambda: float(next(now))), adapter(tmp_path / "a")
    loaded = adapters.text(1, str(folder))
    assert adapters.text(1, str(folder)) == loaded == adapter_text(folder)
    adapter(folder, b"another")
    assert adapters.text(1, str(folder)).startswith("unknown:")
    assert adapters.text(1, str(folder)) == adapters.text(1, str(folder))
    assert adapters.text(2, str(folder)) == adapter_text(folder)
    assert adapters.text(3, "repository/name") == "named:repository/name"
    assert adapters.text(4, "").startswith("unknown:")


def test_an_adapter_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines ask for each request, and some of them for each block."""
    now, looked = [0.0], []
    real = models._folder
    monkeypatch.setattr(models, "_folder", lambda *asked: looked.append(asked) or real(*asked))
    adapters, folder = Adapters(lambda: now[0]), adapter(tmp_path / "a")
    for seconds, times in ((0.0, 1), (0.9, 1), (1.1, 2), (1.2, 2)):
        now[0] = seconds
        adapters.text(1, str(folder))
        assert len(looked) == times


def test_loaded_parameters() -> None:
    torch = pytest.importorskip("torch")
    base = torch.nn.Linear(100, 100)
    before = models.live_weights(base.named_parameters())
    assert models.live_weights(base.named_parameters()) == before
    with torch.no_grad():
        base.bias[3] += 1
    assert models.live_weights(base.named_parameters()) != before
    assert models.live_weights([]).startswith("unknown:")


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


def sglang_adapter(folder: Path, content: bytes = b"a", name: str = "one") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def from_disk(process: Process, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"new")
    process.call("update_weights_from_disk", str(folder), "auto", result=(True, ""))


SGLANG_WEIGHTS: dict[str, tuple[Callable[[Process, Path], None], str]] = {
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


@pytest.mark.parametrize(("change", "difference"), SGLANG_WEIGHTS.values(), ids=SGLANG_WEIGHTS)
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
    for number, reference in enumerate((sglang_adapter(tmp_path / "a"), sglang_adapter(tmp_path / "copy"))):
        process.call("_load_lora_adapter", reference)
        assert process.seen[number] == process.seen[0] != before
    process.call("_load_lora_adapter", sglang_adapter(tmp_path / "b", b"b"))
    assert "adapters is" in model_difference(process.seen[0], process.seen[2])
    process.call("_unload_lora_adapter", sglang_adapter(tmp_path / "b"))
    assert process.seen[3] == before
    process.call("_load_lora_adapter_from_tensors", sglang_adapter(tmp_path / "a"))
    assert "unknown:" in process.seen[4]
