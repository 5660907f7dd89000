# SPDX-License-Identifier: Apache-2.0
"""Describes one option of kvlink, and parses and checks its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeVar

from kvlink.errors import ConfigError
from kvlink.runtime.names import check_kind

_T = TypeVar("_T", str, int, float, bool)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NUMBERS: dict[type, type] = {int: Integral, float: Real}
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "one of " + ", ".join(_TRUE + _FALSE)}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the catalogue. `least` and `most` bound numbers, and `choices` lists the allowed strings."""

    name: str
    env: str
    meaning: str
    """Says in sentences what the option does. Errors about a value and `kvlink config` show it."""
    default: str | int | float | bool
    advice: str = ""
    """Says why the default is what it is, and when to change it. The reference shows it after `meaning`."""
    unit: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def parse(self, text: str) -> str | int | float | bool:
        """Parses the text of the environment variable. Raises ConfigError if it has the wrong type."""
        text = text.strip()
        try:
            if isinstance(self.default, bool):
                return _parse_bool(text)
            return type(self.default)(text)
        except ValueError:
            if text.startswith(("tcp://", "udp://")):
                raise ConfigError(
                    f"{self.env}={text!r} comes from a Kubernetes Service that is called {_service(self.env)}; set "
                    "enableServiceLinks: false in the pod's spec, or give the Service another name"
                ) from None
            kind = _KINDS[type(self.default)]
            raise ConfigError(f"{self.env}={text!r} is not {kind}. {self._explained()}") from None

    def check(self, value: str | int | float | bool) -> None:
        """Raises ConfigError if `value` has another type, is out of bounds or not one of the choices."""
        kind = type(self.default)
        check_kind(value, _NUMBERS.get(kind, kind), f"{self.name} ({self.env})", _KINDS[kind])
        if isinstance(value, (int, float)) and not self._within(value):
            bounds = f"at least {self.least:g}"
            if self.most is not None:
                bounds = f"between {self.least:g} and {self.most:g}"
            unit = f" {self.unit}" if self.unit else ""
            raise ConfigError(f"{self.env}={value} must be {bounds}{unit}. {self._explained()}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.env}={value!r} must be one of {', '.join(filter(None, self.choices))}")

    def _explained(self) -> str:
        return f"The option {self.meaning[0].lower()}{self.meaning[1:].removesuffix('.')}"

    def _within(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def _service(env: str) -> str:
    return env.removesuffix("_PORT").lower().replace("_", "-")


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def setting(env: str, default: _T, meaning: str, advice: str = "", **rest: Any) -> _T:
    """Declares a field of a dataclass as an option. `rest` are other fields of Setting."""
    return field(default=default, metadata={"env": env, "meaning": meaning, "advice": advice, **rest})
