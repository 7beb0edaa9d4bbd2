"""Releases of torch, CUDA and NCCL that an interpreter loads, printed as JSON; no GPU is touched.

Any environment with torch can run this file: it imports nothing of outloop.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

MARK = "OUTLOOP-LIBRARIES "
"""Before the answer on its line."""


def release_in(library: Any) -> str:
    """The release of a loaded libnccl, "2.30.7"."""
    code = ctypes.pointer(ctypes.c_int())
    if library.ncclGetVersion(code) != 0:
        return ""
    # NCCL_VERSION of nccl.h, since 2.9.
    return f"{code[0] // 10000}.{code[0] // 100 % 100}.{code[0] % 100}"


def loaded_nccl() -> str:
    """The release that torch has loaded: not always `torch.cuda.nccl.version()`, which is the one
    torch was compiled with and stays so when another package takes its place."""
    import torch

    if torch.version.cuda is None:
        return ""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        # Part of libtorch itself, so that the two are the same.
        return ".".join(str(number) for number in torch.cuda.nccl.version())
    return release_in(library)


def releases() -> dict[str, str]:
    """By library; empty where there is none."""
    import torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "nccl": loaded_nccl(),
    }


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps(releases()) + "\n")
