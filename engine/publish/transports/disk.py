"""A Hugging Face folder that every server reads; for servers that share a file system.

The folder holds the whole model before any server loads it, and is removed when the publish is
over. Every trainer rank writes its share, one bucket at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.sending.orders import Begin, End, Fill, Release, Write
from outloop.engine.publish.sending.ranks import OrderedRanks, OwnRank
from outloop.engine.publish.sending.sending_rank import Packing, bucket_file
from outloop.engine.publish.sending.sent import Sent
from outloop.engine.publish.server_fanout import Fanout
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.publish.transports.base import ranks_of


class Disk:
    """Has one safetensors file written per bucket and lets servers load the folder."""

    is_joint = False

    def __init__(self, folder: Path, packing: Packing, own: OwnRank) -> None:
        """`folder` is where a folder is made for every publish; trainer ranks and servers see the
        same path."""
        self._root = folder
        self._packing = packing
        self._own = own
        self._ranks: OrderedRanks | None = None
        self._folder: Path | None = None
        self._sent = Sent()

    def prepare(self, source: TensorSource, fanout: Fanout, kinds: Sequence[str]) -> None:
        """Write the folder, before anything is paused.

        Raises:
            PublishFailed: it cannot be written.
        """
        self.end()
        self._sent = Sent()
        self._ranks = ranks = ranks_of(source, self._own, "disk")
        plans = self._packing.plan(ranks.shares)
        self._folder = folder = self._root / "incoming"
        weight_map = {
            place.spec.name: bucket_file(rank, index)
            for rank, plan in enumerate(plans)
            for index, places in enumerate(plan)
            for place in places
        }
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            ranks.all(Begin(tuple(kinds)))
            for index in range(max(map(len, plans))):
                ranks.all(Fill(index))
                ranks.all(Write(index, str(folder)))
            content = json.dumps({"metadata": {}, "weight_map": weight_map})
            (folder / "model.safetensors.index.json").write_text(content)
        except OSError as error:
            self.end()
            raise PublishFailed(
                f"weights cannot be written to folder={str(folder)!r}: {error}"
            ) from error
        except PublishFailed:
            self.end()
            raise
        self._sent.complete(ranks, plans)

    def stage(self, fanout: Fanout) -> None:
        """Nothing: a server makes a folder live as it reads it."""

    def send(self, fanout: Fanout) -> Sent:
        """Let every server load the folder."""
        folder = str(self._folder)
        fanout.run("disk", lambda client, deadline: client.update_from_disk(folder, deadline))
        return self._sent

    def end(self) -> None:
        """Remove the folder and give the memory back."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.tell(End())
            ranks.tell(Release())
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """No memory is held between publishes."""

    def close(self) -> None:
        """Remove the folder and give the memory back."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        self._own.close()
