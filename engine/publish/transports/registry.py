"""The transport that `publish.transport` names."""

from __future__ import annotations

import os

import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.transports.base import Bucketed, PayloadSender, Sender, Transport
from outloop.engine.publish.transports.broadcast import GroupSender
from outloop.engine.publish.transports.disk import Disk
from outloop.engine.publish.transports.per_device import PerDevice
from outloop.engine.publish.transports.process_group import Backend


def build_transport(run: Run, name: str) -> Transport:
    """The transport called `name` in `publish.transport`."""
    server, publish = run.settings.server, run.settings.publish
    bucket_bytes = int(publish.bucket_mb * 2**20)
    num_ranks = server.tensor_parallel_size
    dtype = torch.float32 if server.dtype == "float32" else torch.bfloat16
    if name == "disk":
        return Disk(run.dir / "publish", bucket_bytes=bucket_bytes, dtype=dtype)
    if is_per_device(run.settings, name):
        _refuse_unexportable_memory()
        return PerDevice(bucket_bytes=bucket_bytes, dtype=dtype, num_ranks=num_ranks)
    sender: Sender
    if name == "cuda_ipc":
        _refuse_unexportable_memory()
        device = torch.device("cuda", torch.cuda.current_device())
        buffers = (DeviceBuffer(device, is_exported=True) for _ in range(2))
        sender, staging = PayloadSender(), Staging(*buffers)
    elif name == "collective":
        backend: Backend = "nccl" if server.device.startswith("cuda") else "gloo"
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        sender = GroupSender(
            host=publish.host, backend=backend, num_ranks=num_ranks, key=run.server_key
        )
        staging = Staging(DeviceBuffer(device), DeviceBuffer(device))
    else:
        sender, staging = PayloadSender(num_ranks), Staging(SharedBuffer(), SharedBuffer())
    return Bucketed(sender, staging, bucket_bytes=bucket_bytes, dtype=dtype)


def is_per_device(settings: Settings, name: str) -> bool:
    """Whether each trainer rank stages for the servers on its own GPU.

    Over CUDA-IPC wherever there are several devices; in shared memory, which any process can read,
    only where GPUs are named: that is a rehearsal on a CPU.
    """
    server, trainer = settings.server, settings.trainer
    if not trainer.is_colocated:
        return False
    if name == "cuda_ipc":
        return server.tensor_parallel_size * server.num_servers * trainer.num_ranks > 1
    return name == "shared_memory" and bool(server.gpus) and bool(trainer.gpus)


def _refuse_unexportable_memory() -> None:
    """Segments that grow are handed over by file descriptors, not by what servers can open.

    Raises:
        SettingsError: torch was asked for them.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            raise SettingsError(
                f'{name}={value!r} with publish.transport="cuda_ipc": such memory cannot be handed '
                "to servers; leave expandable_segments out, or set publish.transport="
                '"shared_memory"'
            )
