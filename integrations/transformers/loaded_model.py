# SPDX-License-Identifier: Apache-2.0
"""Identifies the model that a manager runs by its loaded parameters, and notices when the program changes them."""

from __future__ import annotations

import threading
from typing import Any

from ..models import live_weights, model_text


class LoadedModel:
    """The identity of a model. `text` is that of the parameters when they were last read. Safe from any thread."""

    def __init__(self, model: Any, shared: str, same: str) -> None:
        self._model, self._shared, self._same = model, shared, same
        self._lock = threading.Lock()
        self._seen = self._state()
        self.text = self._read()

    def changed(self) -> bool:
        """Returns whether a parameter was written or replaced since the last call, and reads the new ones."""
        with self._lock:
            state = self._state()
            if state == self._seen:
                return False
            before, self.text, self._seen = self.text, self._read(), state
            return before != self.text

    def _state(self) -> int:
        tensors = ((each.data_ptr(), 0 if each.is_inference() else each._version) for each in self._tensors())
        return hash((*tensors, *self._adapters()))

    def _adapters(self) -> list[str]:
        """Returns the names of the adapters that are in use. Their parameters are among the model's."""
        loaded = getattr(self._model, "_hf_peft_config_loaded", False)
        return list(self._model.active_adapters()) if loaded else []

    def _tensors(self) -> Any:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _read(self) -> str:
        config = self._model.config.get_text_config()
        return model_text(
            getattr(config, "architectures", None) or [type(self._model).__name__],
            config,
            weights=live_weights(self._model.named_parameters()),
            same=self._same,
            dtype=str(self._model.dtype).removeprefix("torch."),
            shared=self._shared,
            adapters=self._adapters(),
        )
