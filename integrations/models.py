# SPDX-License-Identifier: Apache-2.0
"""Names the model that a server runs, so that no server reads the cache of another model.

Caches are compared by 8 bytes of a digest over what their content depends on: weights, configuration with RoPE,
quantization and dtype. The text of the identity has these fields, for errors, metrics and `kvlink status`. The path of
the model is shown and not compared, as long as there are weights to read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from kvlink.errors import ConfigError
from kvlink.layout.model_identity import identity_text, model_id

_log = logging.getLogger("kvlink.models")

_MOST_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
_MOST_FILES = 10_000
_WHOLE_BYTES = 64 << 10
"""A tensor of at most so many bytes is read whole; of a larger one, windows at equal distances."""
_WINDOW_BYTES = 512
_MOST_WINDOWS, _WINDOWS = 1 << 14, 16
"""The windows of all tensors together, beyond one for each, and of one tensor."""
_FILE_WINDOWS = 4096
_LOOK_S = 1.0
_TENSORS = ("*.safetensors",)
_OTHERS = ("*.gguf", "*.bin", "*.pt", "*.pth")
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler|trainer_state).*")

_PLAIN = re.compile(r"[\w.:/@+\-]+", re.ASCII)
_MOST_VALUE = 240
_NOT_CONFIG = re.compile(
    r"_.*|name_or_path|transformers_version|auto_map|architectures|(torch_)?dtype|use_cache|initializer_range|"
    r"(bos|eos|pad|sep)_token_id|id2label|label2id|return_dict|output_.*|.*_dropout|problem_type|chunk_size_feed_forward"
)
_NOT_ADAPTER = re.compile(r"base_model_name_or_path|revision|auto_mapping|inference_mode|peft_.*|task_type")
_PAIR = re.compile(r"([0-9a-f]{16})=([0-9a-f]{16})")


def model_text(
    architectures: Sequence[str] | None,
    config: Any,
    *,
    name: str = "",
    revision: str = "",
    load_format: str = "auto",
    weights: str = "",
    same: str = "",
    **more: Any,
) -> str:
    """Returns the identity of a model as text.

    config: the configuration of Hugging Face for text, with the overrides of the server.
    name, revision: as the server was started; by default the path in the configuration.
    weights: what stands for the weights, if not their files.
    same: the setting KVLINK_SAME_MODEL.
    more: further values that the cache depends on, such as dtype and quantization.
    Raises ConfigError for a malformed `same`.
    """
    name = name or str(getattr(config, "_name_or_path", ""))
    settings = _settings(config)
    fields = {
        "architecture": "/".join(architectures or ["?"]),
        "weights": weights or weights_text(name, revision, load_format),
        "rope": _rope(settings),
        **{key.replace("_", "-"): value for key, value in more.items()},
        **settings,
    }
    words = {key: _word(value) for key, value in fields.items() if _says(value)}
    digits = hashlib.sha256(json.dumps(["kvlink model 1", sorted(words.items())]).encode()).hexdigest()[:16]
    words["name"] = _word(name + (f"@{revision}" if revision else ""))
    if (declared := _declared(same).get(digits)) is not None:
        _log.warning(
            "KVLINK_SAME_MODEL declares this server's model %s (%s) equal to %s", digits, name, declared
        )
        return identity_text(declared, words | {"declared-from": digits})
    return identity_text(digits, words)


def weights_text(name: str, revision: str = "", load_format: str = "auto") -> str:
    """Returns what identifies the weights: a fingerprint of their files, or else what stands in for it."""
    if load_format == "dummy":
        return "dummy"  # engines seed them by the shapes, which are compared
    folder = _folder(name, revision)
    try:
        if folder is not None and (digits := fingerprint(folder)):
            return digits
    except OSError as error:
        _log.warning("the weights in %s cannot be read, so their name stands for them: %s", folder, error)
    if not name:
        return unknown()
    return f"named:{name}@{revision}"


@functools.lru_cache(maxsize=64)
def named_model(name: str) -> str:
    """Returns the digits of a model by its files on this host, which has only its name. Read once."""
    folder = _folder(name, "")
    try:
        found = _json(folder / "config.json") if folder is not None else {}
        config = SimpleNamespace(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        config = SimpleNamespace()
    architectures = getattr(config, "architectures", None)
    known = architectures if isinstance(architectures, list) else None
    return f"{model_id(model_text(known, config, name=name)):016x}"


def unknown() -> str:
    """Returns a value that equals no other, for weights or an adapter that nothing identifies."""
    return f"unknown:{secrets.token_hex(8)}"


def live_weights(tensors: Any) -> str:
    """Returns a fingerprint of loaded parameters, (name, tensor) pairs of torch, for weights that changed in memory.

    It is the same for servers of one engine and tensor-parallel degree.
    """
    import torch

    rows = []
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel() > 4096:
            flat = flat[torch.linspace(0, flat.numel() - 1, 4096, dtype=torch.float64).long().to(flat.device)]
        data = flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        rows.append(_row(name, str(tensor.dtype), list(tensor.shape), [data]))
    return "loaded:" + _digits(rows) if rows else unknown()


class Adapters:
    """Names LoRA adapters by their content. An adapter whose files change under a running id becomes unknown.

    The files of an adapter are checked once a second at most, because engines ask for each request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[int, str], tuple[float, object, str]] = {}

    def text(self, number: int, path: str) -> str:
        """Returns the name of the adapter that an engine loaded from `path` under this number."""
        now = self._clock()
        looked_at, before, text = self._seen.get((number, path), (-_LOOK_S, None, ""))
        if text and now - looked_at < _LOOK_S:
            return text
        folder = _folder(path, "")
        state = folder and tuple(map(_state, _adapter_files(folder)))
        if not text:
            text = (folder and adapter_text(folder)) or (f"named:{path}" if path else unknown())
        elif before != state:
            text = unknown()
        self._seen[number, path] = now, state, text
        return text


def adapter_text(folder: Path) -> str:
    """Returns a fingerprint of an adapter's weights and configuration, or "" if there are no weights."""
    digits = fingerprint(folder)
    try:
        found = _json(folder / "adapter_config.json")
        config = {key: value for key, value in found.items() if not _NOT_ADAPTER.fullmatch(key)}
    except (OSError, ValueError, AttributeError, RecursionError):
        config = {}
    text = json.dumps(_plain(config), sort_keys=True)
    return digits and digits + hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(folder: Path) -> str:
    """Returns 16 digits that are equal for equal weights, whole or sharded, whatever their place. "" without weights.

    It reads the header of each safetensors file, and of every tensor all bytes or some at equal distances. Other files
    are read at equal distances. A file is read again when its inode, size or times have changed.
    """
    files = [folder] if folder.is_file() else _weight_files(folder)
    states = {file: _state(file) for file in files}
    for file, state in states.items():
        if state not in _counts:
            _counts[state] = len((_table(file) or (0, {}))[1])
    num_tensors = sum(_counts[state] for state in states.values())
    windows = max(1, min(_WINDOWS, _MOST_WINDOWS // max(num_tensors, 1)))
    rows: set[bytes] = set()
    for file, state in states.items():
        if (state, windows) not in _read:
            _read[state, windows] = _rows(file, _table(file), windows)
        rows.update(_read[state, windows])
    return _digits(rows) if rows else ""


_Table = tuple[int, dict[str, tuple[str, list[int], int, int]]]
"""Where the data of a safetensors file begins, and of each tensor its dtype, shape, first byte and end."""

_counts: dict[object, int] = {}
_read: dict[tuple[object, int], list[bytes]] = {}
"""The number of tensors of a file in this state, and the rows of what was read of them."""


def _rows(file: Path, table: _Table | None, windows: int) -> list[bytes]:
    with file.open("rb") as opened:
        if table is None:
            size = file.stat().st_size
            return [_row("", "file", [size], _samples(opened, 0, size, _FILE_WINDOWS, _WINDOW_BYTES))]
        start, tensors = table
        return [
            _row(name, dtype, shape, _samples(opened, start + first, end - first, windows, _WINDOW_BYTES))
            for name, (dtype, shape, first, end) in tensors.items()
        ]


def _samples(opened: BinaryIO, start: int, size: int, windows: int, each: int) -> list[bytes]:
    if size <= max(_WHOLE_BYTES, windows * each):
        return [os.pread(opened.fileno(), size, start)]
    step = (size - each) / max(windows - 1, 1)
    return [os.pread(opened.fileno(), each, start + round(index * step)) for index in range(windows)]


def _table(file: Path) -> _Table | None:
    """Returns the table of a safetensors file, or None for any other file. Nothing of it is believed."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if file.suffix != ".safetensors" or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                return None
            header = json.loads(opened.read(length))
        tensors = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            (first, end), shape = about["data_offsets"], about["shape"]
            if type(first) is not int or type(end) is not int or not 0 <= first <= end <= size - 8 - length:
                return None
            tensors[name] = (str(about["dtype"]), [int(each) for each in shape], first, end)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return 8 + length, tensors


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files that engines load: those of the index, else whole ones, else those of other formats."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            listed = _json(index)["weight_map"].values()
            files = sorted({folder / Path(name).name for name in listed})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        if files and all(file.is_file() for file in files):
            return files[:_MOST_FILES]
    for patterns in (_TENSORS, _OTHERS):
        found = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]
        found = [file for file in found if not _NO_WEIGHTS.fullmatch(file.name)][:_MOST_FILES]
        for extra in ("consolidated", "adapter_"):
            found = [file for file in found if not file.name.startswith(extra)] or found
        if found:
            return found
    return []


def _json(file: Path) -> Any:
    """Parses a file of bounded size. Raises OSError, ValueError, RecursionError."""
    with file.open("rb") as opened:
        data = opened.read(_MOST_HEADER_BYTES + 1)
    if len(data) > _MOST_HEADER_BYTES:
        raise ValueError(f"{file} has more than {_MOST_HEADER_BYTES} bytes")
    return json.loads(data)


def _adapter_files(folder: Path) -> list[Path]:
    return [*_weight_files(folder), folder / "adapter_config.json"]


def _folder(name: str, revision: str) -> Path | None:
    """Returns where a model is on this host: a path, or a snapshot in Hugging Face's cache. Downloads nothing."""
    if not name:
        return None
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except Exception:  # it is not installed, or the name is none, or nothing of it is here
        return None


def _state(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _row(name: str, dtype: str, shape: list[int], data: list[bytes]) -> bytes:
    digest = hashlib.sha256(json.dumps([name, dtype, shape]).encode())
    for each in data:
        digest.update(each)
    return digest.digest()


def _digits(rows: Any) -> str:
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16]


def _settings(config: Any) -> dict[str, Any]:
    """Returns what a configuration says about the computation, without its place and the versions of libraries."""
    found = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return {key: found[key] for key in sorted(found) if not _NOT_CONFIG.fullmatch(str(key))}


def _rope(settings: dict[str, Any]) -> Any:
    """Takes RoPE out of the settings. transformers 5 has it in one value, and earlier versions in two."""
    theta, scaling = settings.pop("rope_theta", None), settings.pop("rope_scaling", None)
    found = settings.pop("rope_parameters", None)
    return found if found is not None else {"rope_theta": theta, "rope_type": "default", **(scaling or {})}


def _says(value: Any) -> bool:
    """Returns whether a value is no default that a library may have added."""
    return value not in (None, False, "") and value != [] and value != {}


def _plain(value: Any) -> Any:
    """Returns the value in the form in which equal values have equal text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if _says(each)}
    if isinstance(value, (list, tuple, set, frozenset)):
        each = [_plain(one) for one in value]
        return sorted(each, key=str) if isinstance(value, (set, frozenset)) else each
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def _word(value: Any) -> str:
    """Returns a value as a word without blanks, or its digest if it is long."""
    plain = _plain(value)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).replace(" ", "\\u0020")
    if isinstance(plain, str) and _PLAIN.fullmatch(plain):
        text = plain
    return text if len(text) <= _MOST_VALUE else "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _declared(same: str) -> dict[str, str]:
    pairs = [part.strip() for part in same.split(",") if part.strip()]
    found = [_PAIR.fullmatch(pair) for pair in pairs]
    if not all(found):
        raise ConfigError(
            f"KVLINK_SAME_MODEL must have pairs of 16 hexadecimal digits such as 0123456789abcdef=fedcba9876543210, "
            f"separated by commas, and not {same!r:.80}; `kvlink status` shows the digits"
        )
    return {one[1]: one[2] for one in found if one}
