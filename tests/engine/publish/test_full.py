"""No room: on disk, in shared memory, and what is left behind then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
import torch
from fakes.local_tensors import LocalTensors
from pathlib import Path
from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.transports.disk import Disk
from outloop.engine.publish.buckets.plan import ALIGNMENT
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.sending.ranks import OwnRank
from outloop.engine.publish.sending.sending_rank import Packing, SendingRank

tensors = {f"t{index}": torch.zeros(50_000) for index in range(4)}
# The kernel refuses to let any file grow beyond this, as a full disk would.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    if sys.argv[1] == "disk":
        packing = Packing(bucket_bytes=300_000, dtype=torch.float32, alignment=ALIGNMENT)
        staging = Staging(DeviceBuffer(torch.device("cpu")))
        own = OwnRank(lambda reader: SendingRank(reader, packing, staging))
        Disk(Path(sys.argv[3]), packing, own).prepare(LocalTensors(tensors), None, [])
    else:
        SharedBuffer().reserve(800_000)
except PublishFailed as error:
    print(error)
"""


@pytest.mark.medium
@pytest.mark.parametrize("where", ["disk", "shared_memory"])
def test_a_full_disk_is_an_error_that_says_so(where: str, tmp_path: Path) -> None:
    """PublishFailed with the place and what to do; no half-written file, no kill."""
    folder = tmp_path / "publish"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, where, "150000", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0, result.stderr
    if where == "disk":
        assert f"weights cannot be written to folder='{folder}" in result.stdout
        assert not list(folder.glob("**/*.safetensors"))
    else:
        assert "has no room for a bucket of 800000 bytes" in result.stdout
        assert "lower publish.bucket_mb" in result.stdout
