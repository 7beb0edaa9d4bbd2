"""SGLang 0.5.23's own receiving code, cut out of its files; nothing of it is rewritten.

SGLang's server needs hundreds of megabytes of kernels. What takes a bucket apart, and what hashes
a tensor, is a few functions of four files, which need torch and Triton alone.
"""

import ast
import base64
import importlib.util
import io
import os
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch

from outloop.buffer.errors import SettingsError
from outloop.engine.serve.sglang.cpu_environment import find_python

FILES = {
    "common.py": "srt/utils/common.py",
    "patch_torch.py": "srt/utils/patch_torch.py",
    "tensor_bucket.py": "srt/weight_sync/tensor_bucket.py",
    "gpu_tensor_hash.py": "kernels/ops/memory/gpu_tensor_hash.py",
}
FOLDER_VARIABLE = "OUTLOOP_SGLANG_FILES"
NEEDED = (
    f"SGLang's files: an environment from `make venv-sglang`, or {FOLDER_VARIABLE}=FOLDER with "
    + ", ".join(FILES)
)
_WANTED = {
    "MultiprocessingSerializer",
    "SafeUnpickler",
    "_safe_load_torch_storage",
    "init_custom_process_group",
}


def find(name: str) -> Path | None:
    """One of FILES, where it is; None: nowhere."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        path = Path(given) / name
        return path if path.is_file() else None
    try:
        python = find_python(None)
    except SettingsError:
        return None
    found = python.parents[1].glob(f"lib/python*/site-packages/sglang/{FILES[name]}")
    return next(iter(sorted(found)), None)


def load_file(name: str, module_name: str) -> types.ModuleType:
    """One of FILES as a module."""
    path = find(name)
    assert path is not None, NEEDED
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = made
    spec.loader.exec_module(made)
    return made


class Receiver:
    """What SGLang does with a payload, up to the model that takes the tensors."""

    def __init__(self) -> None:
        for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.weight_sync"):
            _package(name)
        self.common = _package("sglang.srt.utils.common")
        release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        vars(self.common).update(
            io=io,
            pickle=pickle,
            torch=torch,
            pybase64=base64,
            ForkingPickler=ForkingPickler,
            torch_release=release,
            is_musa=lambda: False,
            is_npu=lambda: False,
        )
        path = find("common.py")
        assert path is not None, NEEDED
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if getattr(node, "name", None) in _WANTED]
        exec(compile(tree, "common.py", "exec"), vars(self.common))
        self._patch = load_file("patch_torch.py", "sglang.srt.utils.patch_torch")
        self._bucket = load_file("tensor_bucket.py", "sglang.srt.weight_sync.tensor_bucket")

    def receive(self, payload: str) -> list[tuple[str, torch.Tensor]]:
        """deserialize_own_rank, then _update_weights_from_flattened_bucket without the model."""
        self._patch.monkey_patch_torch_reductions()
        content = self.common.MultiprocessingSerializer.deserialize(payload)
        bucket = self._bucket.FlattenedTensorBucket(
            flattened_tensor=content["flattened_tensor"], metadata=content["metadata"]
        )
        tensors: list[tuple[str, torch.Tensor]] = bucket.reconstruct_tensors()
        return tensors


def _package(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []
    sys.modules[name] = made
    return made
