"""A rank of torchrun that has the one GPU to itself, as far as NCCL knows; argv: PROGRAM ARGS."""

import os
import runpy
import sys
from pathlib import Path

os.environ |= {
    "LOCAL_RANK": "0",
    "NCCL_HOSTID": f"rank{os.environ.get('RANK', '0')}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
