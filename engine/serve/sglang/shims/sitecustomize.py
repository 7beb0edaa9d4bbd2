"""Makes torchvision importable beside a CPU build of PyTorch, in every process of SGLang."""

import importlib.abc
import sys
from types import ModuleType


class _Before(importlib.abc.MetaPathFinder):
    """Prepares torch when torchvision, or SGLang's look at the CPU, is about to be imported, and
    memory for the experts of tokens before SGLang asks CUDA for it."""

    _operators: object = None

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and self._operators is None:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            self._operators = library
        elif name == "sglang.srt.utils.common":
            import torch

            torch.cpu._is_amx_tile_supported = lambda: False
        elif name == "sglang.srt.state_capturer.base":
            import torch
            from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

            def allocate(size: tuple[int, ...], *, dtype: torch.dtype, **unused: object) -> object:
                return torch.empty(size, dtype=dtype)

            ALLOC_MEMORY_FUNCS["cpu"] = allocate


sys.meta_path.insert(0, _Before())
