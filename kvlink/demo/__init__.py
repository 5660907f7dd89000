# SPDX-License-Identifier: Apache-2.0
"""Demonstrates the main job end to end: a transformer prefills in one process and decodes in another.

`run` is the router and checks the result. It starts a coordinator, a prefill and a decode process, sends prompts from
one to the other, and compares the tokens with those of the same model in a fourth process, whose cache never moved.
Prefill and decode use a small transformer in numpy, or continuous batching of Hugging Face transformers with
kvlink.integrations.transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from kvlink.errors import ConfigError

__all__ = ["run"]

ENGINES = ("numpy", "transformers")
_TRANSFORMERS = (5, 19)  # caches of older releases do not name what they hold


def run(
    transports: Sequence[str] | None = None,
    json: bool = False,
    patience: float = 1.0,
    device: str = "cpu",
    pp: str = "",
    engine: str = "",
) -> int:
    """Prints one row per transport, as a table or as JSON lines.

    `transports` None tries all that this machine has. `patience` multiplies every deadline, for slow machines. `engine`
    is one of ENGINES. `device` is the device of the models, as torch names it, and needs transformers if it is not the
    CPU. `pp`, such as "2:1", splits the layers of prefill and of decode into that many stages with a worker each.

    Returns 0, or 1 if any row's tokens differ or its transport fails. Raises ConfigError for unknown names, for
    transports that cannot work on this machine, and if torch, or a release of transformers that supports handoffs, is
    needed and not installed.
    """
    engine = engine or ("numpy" if device == "cpu" else "transformers")
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r}: write one of {', '.join(ENGINES)}")
    if engine == "numpy" and device != "cpu":
        raise ConfigError(
            f"the engine numpy computes on the CPU only, not on {device}; pass --engine transformers"
        )
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device!r}: write cpu, cuda, or cuda:N for a GPU of this machine")
    if engine == "transformers" and pp:
        raise ConfigError("only the engine numpy splits layers into stages; omit --pp, --engine and --device")
    if engine == "transformers" and (missing := _missing()):
        raise ConfigError(
            f"the engine transformers needs {' and '.join(missing)}: run pip install 'kvlink[demo]', whose torch "
            "brings 5 GB of CUDA libraries unless a CPU build is installed before it"
        )
    stages = _stages(pp) if pp else (1, 1)
    from kvlink.demo.servers import Options
    from kvlink.demo.show import show

    return show(transports, json, Options(patience, engine, device, stages))


def _stages(pp: str) -> tuple[int, int]:
    found = re.fullmatch("([1-4]):([1-4])", pp)
    if found is None:
        raise ConfigError(f"--pp {pp!r}: write the stages of prefill and of decode, 1 to 4 each, such as 2:1")
    return int(found[1]), int(found[2])


def _missing() -> list[str]:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if not missing and tuple(map(int, re.findall(r"\d+", version("transformers"))[:2])) < _TRANSFORMERS:
        missing.append("transformers {}.{}".format(*_TRANSFORMERS))
    return missing
