# SPDX-License-Identifier: Apache-2.0
"""Starts a real SGLang server on a machine without a GPU: `python sglang_server.py FLAGS…`, as sglang.launch_server.

SGLang imports two packages that are built for CUDA only. Stand-ins take their places: no text model calls them.
Servers start their processes by spawning, which imports this file first there too.
"""

from __future__ import annotations

import sys
import types

import torch

_vision_operators = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _vision_operators.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _KernelStandIn(types.ModuleType):
    """Has every name that is asked for; calling one fails."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def not_here(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} needs SGLang's kernels")

        return not_here


for _module in ("sgl_kernel", "sgl_kernel.kvcacheio"):
    _stand_in = _KernelStandIn(_module)
    _stand_in.__path__ = []
    sys.modules.setdefault(_module, _stand_in)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
