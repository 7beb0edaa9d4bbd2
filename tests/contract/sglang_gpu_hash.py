"""SGLang's own kernels of its GPU hash, run by Triton's interpreter; under SGLang's Python.

Reads lengths as JSON from the command line; for each it hashes bytes that a generator gives.
"""

import importlib.util
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton

PLACE = "lib/python3.11/site-packages/sglang/kernels/ops/memory/gpu_tensor_hash.py"


def gpu_hash(kernels, content):
    """What `gpu_tensor_hash` does, without asking for a GPU."""
    missing = -len(content) % 4
    words = torch.cat([content, content.new_zeros(missing)]).view(torch.uint32)
    sums = torch.empty(triton.cdiv(len(words), 8192), dtype=torch.uint64)
    seed = 0x243F6A88
    kernels.hash_tiles32_kernel_blocked[(len(sums),)](
        words,
        sums,
        len(words),
        seed1=seed & 0xFFFFFFFF,
        seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernels.FMIX32_C1,
        FM_C2=kernels.FMIX32_C2,
        POS_A=kernels.POS_C1,
        POS_B=kernels.POS_C2,
        TILE=8192,
        BLOCK=256,
        USE_CG=True,
    )
    while len(sums) > 1:
        reduced = torch.empty(triton.cdiv(len(sums), 1024), dtype=torch.uint64)
        kernels.add_tree_reduce_u64_kernel[(len(reduced),)](sums, reduced, len(sums), CHUNK=1024)
        sums = reduced
    return f"{kernels._final_splitmix64(int(sums.item())):016x}"


def main():
    """Print the hashes, by length."""
    spec = importlib.util.spec_from_file_location("kernels", os.path.join(sys.prefix, PLACE))
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    found = {}
    for length in json.loads(sys.argv[1]):
        generator = torch.Generator().manual_seed(length)
        content = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        found[length] = gpu_hash(kernels, content)
    print(json.dumps(found))


main()
