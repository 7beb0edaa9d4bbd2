"""The transport that `publish.transport` names."""

from __future__ import annotations

import os

import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import Run
from outloop.buffer.settings import Settings
from outloop.engine.publish.buckets.plan import ALIGNMENT, PACKED
from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
from outloop.engine.publish.process_group import Backend
from outloop.engine.publish.sending.ranks import OwnRank
from outloop.engine.publish.sending.sending_rank import Packing, SendingRank, ShareReader
from outloop.engine.publish.transports.base import Bucketed, PayloadSender, Sender, Transport
from outloop.engine.publish.transports.broadcast import GroupSender
from outloop.engine.publish.transports.disk import Disk
from outloop.engine.publish.transports.per_device import PerDevice


def build_transport(run: Run, name: str) -> Transport:
    """The transport called `name` in `publish.transport`."""
    settings = run.settings
    server, publish = settings.server, settings.publish
    num_ranks = server.tensor_parallel_size
    packing = _packing(settings, name)
    if is_per_device(settings, name):
        _refuse_unexportable_memory()
        return PerDevice(
            bucket_bytes=packing.bucket_bytes,
            dtype=packing.dtype,
            num_ranks=num_ranks,
            is_gpu=server.device != "cpu",
        )
    own = OwnRank(lambda reader: build_sending_rank(settings, name, reader))
    if name == "disk":
        return Disk(run.dir / "publish", packing, own)
    sender: Sender = PayloadSender(1 if name == "cuda_ipc" else num_ranks)
    if name == "collective":
        sender = GroupSender(
            host=publish.host, backend=_backend(settings), num_ranks=num_ranks, key=run.server_key
        )
    return Bucketed(name, sender, packing, own)


def build_sending_rank(settings: Settings, name: str, reader: ShareReader) -> SendingRank:
    """What one trainer rank does for the transport called `name`."""
    cpu = torch.device("cpu")
    if name == "disk":
        staging = Staging(DeviceBuffer(cpu))
    elif name == "cuda_ipc":
        _refuse_unexportable_memory()
        device = torch.device("cuda", torch.cuda.current_device())
        staging = Staging(*(DeviceBuffer(device, is_exported=True) for _ in range(2)))
    elif name == "collective":
        device = torch.device("cuda") if _backend(settings) == "nccl" else cpu
        staging = Staging(DeviceBuffer(device), DeviceBuffer(device))
    else:
        staging = Staging(SharedBuffer(), SharedBuffer())
    return SendingRank(
        reader,
        _packing(settings, name),
        staging,
        num_server_ranks=settings.server.tensor_parallel_size,
        is_gpu=settings.server.device != "cpu",
        backend=_backend(settings),
    )


def _packing(settings: Settings, name: str) -> Packing:
    return Packing(
        bucket_bytes=int(settings.publish.bucket_mb * 2**20),
        dtype=torch.float32 if settings.server.dtype == "float32" else torch.bfloat16,
        alignment=PACKED if name == "collective" else ALIGNMENT,
    )


def _backend(settings: Settings) -> Backend:
    return "nccl" if settings.server.device.startswith("cuda") else "gloo"


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
