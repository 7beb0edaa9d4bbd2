"""A Hugging Face folder that every server reads; for servers that share a file system.

The folder holds the whole model before any server loads it, and is removed when the publish is
over. One bucket at a time is held in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.buckets.pipeline import Filled, Filler, Sent
from outloop.engine.publish.buckets.plan import ALIGNMENT
from outloop.engine.publish.buckets.staging import DeviceBuffer, Staging
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.verification.accounts import Account


class Disk:
    """Writes one safetensors file per bucket and lets servers load the folder."""

    is_joint = False

    def __init__(self, folder: Path, *, bucket_bytes: int, dtype: torch.dtype) -> None:
        """`folder` is where a folder is made for every publish; servers see the same path."""
        self._root = folder
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._staging = Staging(DeviceBuffer(torch.device("cpu")))
        self._folder: Path | None = None
        self._sent = Sent({})

    def prepare(
        self, source: TensorSource, fanout: Fanout, accounts: Mapping[str, Account]
    ) -> None:
        """Write the folder, before anything is paused.

        Raises:
            PublishFailed: it cannot be written.
        """
        self.end()
        self._folder = self._root / "incoming"
        self._sent = Sent(accounts)
        filler = Filler(
            source,
            self._staging,
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            alignment=ALIGNMENT,
            on_filled=self._sent.account,
        )
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            weight_map: dict[str, str] = {}
            for bucket in filler.filled():
                weight_map |= self._write(self._folder, bucket)
            index = json.dumps({"metadata": {}, "weight_map": weight_map})
            (self._folder / "model.safetensors.index.json").write_text(index)
            self._sent.peak_bytes = filler.peak_bytes
            self._sent.bucket_bytes = filler.max_bytes
        except (OSError, SafetensorError) as error:
            folder = str(self._folder)
            self.end()
            raise PublishFailed(
                f"weights cannot be written to folder={folder!r}: {error}"
            ) from error

    def stage(self, fanout: Fanout) -> None:
        """Nothing: a server makes a folder live as it reads it."""

    def send(self, fanout: Fanout) -> Sent:
        """Let every server load the folder."""
        folder = str(self._folder)
        fanout.run("disk", lambda client, deadline: client.update_from_disk(folder, deadline))
        return self._sent

    def end(self) -> None:
        """Remove the folder and give the memory back."""
        self._staging.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """No memory is held between publishes."""

    def close(self) -> None:
        """Remove the folder and give the memory back."""
        self.end()

    def _write(self, folder: Path, bucket: Filled) -> dict[str, str]:
        """One file; returns which tensors are in it."""
        name = f"model-{self._sent.num_buckets:05d}.safetensors"
        tensors = {place.spec.name: place.view_of(bucket.content) for place in bucket.places}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        self._sent.count(bucket)
        return dict.fromkeys(tensors, name)
