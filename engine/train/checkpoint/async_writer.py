"""Writing checkpoints while training goes on.

Each rank copies its shards to the host and writes them in a thread; rank 0 completes the folder. A
folder appears under its name only when the shards of every rank are on disk. After a save that
fails, the checkpoint before it stays in use.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from outloop.buffer.errors import CheckpointFailed
from outloop.buffer.records import CheckpointMark
from outloop.engine.machine.memory_shortage import is_memory_shortage
from outloop.engine.train.checkpoint import checkpoint_format
from outloop.engine.train.megatron.model_and_optimizer import (
    Policy,
    PolicyModel,
    rendezvous_store,
)
from outloop.engine.train.megatron.optimizer_state import state_to_save
from outloop.engine.train.megatron.value_head import ValueHead
from outloop.engine.train.ranks.collectives import agree

_POLL_S = 0.05


class Source(Protocol):
    """Where `Shards.write` takes its data from."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO: ...


class _Held:
    """Gives what was copied, once."""

    def __init__(self, copies: dict[MetadataIndex, Tensor | io.BytesIO]) -> None:
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The copy; it is freed when it is written."""
        return self._copies.pop(write_item.index)


class Shards(FileSystemWriter):
    """Megatron's torch_dist format, planned by all ranks together and written by each alone.

    Where torch would write, this copies to the host; `write` writes, in any thread.
    """

    def __init__(self, folder: Path, *, is_copied: bool = True) -> None:
        """`is_copied=False`: `write` reads live tensors; call it before the next update."""
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._is_copied = is_copied
        self._plan: SavePlan | None = None
        self._source: Source | None = None
        self._metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what would be written."""
        self._plan, self._source = plan, planner
        if self._is_copied:
            self._source = _Held({i.index: _copy(planner.resolve_data(i)) for i in plan.items})
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep what `complete` writes; rank 0 only."""
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write this rank's shards; they are on disk when it returns."""
        assert self._plan is not None
        assert self._source is not None
        written = super().write_data(self._plan, cast(SavePlanner, self._source))
        written.wait()
        self._source = None
        return written.value()

    def complete(self, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' shards; rank 0 only."""
        assert self._metadata is not None
        super().finish(self._metadata, results)


class ShardStrategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Hands Megatron's sharded tensors to `Shards`.

    Megatron's own writer starts processes that import the main module again, which costs seconds
    and hangs where that import fails; its asynchronous one forks beside gloo's threads.
    """

    def __init__(self, shards: Shards) -> None:
        super().__init__("torch_dist", 1)
        self._shards = shards

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects travel with the tensors."""
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Plan with the other ranks what each writes."""
        flat, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, True
        )
        save_distributed(
            torch_strategies.mcore_to_pyt_state_dict(flat, False),
            storage_writer=self._shards,
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """A torch WriteResult without its classes."""

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    num_bytes: int
    file: str
    start: int
    length: int


class _Answer(msgspec.Struct, frozen=True):
    """What a rank reports to rank 0 of its shards."""

    written: list[_Written] = []
    error: str = ""


class Saving:
    """One checkpoint on its way to disk; see `begin_save`."""

    def __init__(
        self,
        shards: Shards,
        final: Path,
        facts: dict[str, Any],
        *,
        keep: int | None,
        timeout_s: float,
    ) -> None:
        """`keep` None: no other folder is touched."""
        self.step: int = facts["step"]
        self._shards = shards
        self._final = final
        self._facts = facts
        self._keep = keep
        self._timeout_s = timeout_s
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the training thread may wait on its one.
        self._store = rendezvous_store().clone() if self._num_ranks > 1 else None
        self._failure: Exception | None = None
        self._done = threading.Event()
        self._has_lost_rank = threading.Event()

    def start(self) -> None:
        """Write in a thread, which ends with the process.

        Raises:
            RuntimeError: the system gives no thread; nothing is written.
        """
        try:
            threading.Thread(target=self.run, name="checkpoint", daemon=True).start()
        except RuntimeError as error:
            self._failure = error
            self._done.set()
            raise

    def run(self) -> None:
        """Write this rank's shards; on rank 0, when all ranks have, complete the folder.

        Raises:
            Exception: the system gave no memory to report to rank 0, which would wait in vain.
        """
        try:
            answer = _Answer([_without_classes(result) for result in self._shards.write()])
        except Exception as error:  # noqa: BLE001 - raised by `result` here and by rank 0 elsewhere
            self._failure, answer = error, _Answer(error=repr(error))
        try:
            if self._rank:
                self._report(answer)
            else:
                self._complete(answer)
        except Exception as error:  # raised by `result`
            self._failure = self._failure or error
            if self._rank and is_memory_shortage(error):
                raise
        finally:
            self._done.set()

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Whether it is over, well or not, after at most `timeout_s`."""
        return self._done.wait(timeout_s)

    def give_up_missing(self) -> None:
        """A rank is gone: what it has not reported by now will not come."""
        self._has_lost_rank.set()

    def result(self) -> Path:
        """The complete folder; on other ranks than 0 its name, once their shards are on disk.

        Raises:
            CheckpointFailed: it could not be written; the one before it is in use.
        """
        if self._failure is not None:
            raise CheckpointFailed(
                f"checkpoint {self._final} was not written: {self._failure}. Nothing was "
                "acknowledged by it, and the one before it stays in use; look at the disk"
            ) from self._failure
        return self._final

    def _report(self, answer: _Answer) -> None:
        assert self._store is not None
        self._store.set(self._key(self._rank), msgspec.json.encode(answer).decode())

    def _complete(self, mine: _Answer) -> None:
        """Collect every rank's answer, then make the folder appear under its name."""
        answers = [mine, *(self._answer(rank) for rank in range(1, self._num_ranks))]
        failed = [(rank, a.error) for rank, a in enumerate(answers) if a.error]
        if failed:
            raise CheckpointFailed(
                "; ".join(
                    f"trainer rank {rank} could not write its shards: {e}" for rank, e in failed
                )
            )
        self._shards.complete([[_with_classes(w) for w in a.written] for a in answers])
        temporary = writing_folder(self._final)
        (temporary / checkpoint_format.STATE).write_text(json.dumps(self._facts, indent=1))
        sizes = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        (temporary / checkpoint_format.COMPLETE).write_text(json.dumps(sizes, indent=1))
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        shutil.rmtree(self._final, ignore_errors=True)
        os.replace(temporary, self._final)
        sync_to_disk(self._final.parent)
        if self._keep is not None:
            checkpoint_format.remove_old(self._final.parent, newest=self.step, keep=self._keep)

    def _answer(self, rank: int) -> _Answer:
        """What another rank reported.

        Raises:
            CheckpointFailed: it reported nothing before the deadline, or before a rank was lost.
        """
        assert self._store is not None
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([self._key(rank)]):
            if self._has_lost_rank.is_set():
                raise CheckpointFailed(f"the shards of trainer rank {rank} are missing")
            if time.monotonic() > deadline:
                raise CheckpointFailed(
                    f"trainer rank 0 waited {self._timeout_s:g} s for the shards of rank {rank}"
                )
            self._has_lost_rank.wait(_POLL_S)
        answer = msgspec.json.decode(self._store.get(self._key(rank)), type=_Answer)
        self._store.delete_key(self._key(rank))
        return answer

    def _key(self, rank: int) -> str:
        return f"outloop/save/{self._final}/{rank}"


def begin_save(
    policy: Policy,
    folder: Path,
    *,
    step: int,
    mark: CheckpointMark,
    keep: int,
    critic: Policy | ValueHead | None = None,
    kl_coefficient: float | None = None,
    entropy_coefficient: float | None = None,
    reference: PolicyModel | None = None,
    reference_hash: str = "",
    timeout_s: float = 600.0,
    is_copied: bool = True,
    make_shards: Callable[..., Shards] = Shards,
) -> Saving:
    """Copy what `folder/step_{step}` will hold; all ranks together. Then each calls run or start.

    When it returns, training may go on: what is written is what was there now.

    Args:
        critic: written beside the policy, with its own moments.
        kl_coefficient: as trainer.kl_target has moved it.
        entropy_coefficient: as trainer.entropy_target has moved it.
        reference: that follows the policy; None: it is the folder that the run began with.
        is_copied: false: nothing is copied, and training must wait for `run`.
        keep: older checkpoints than the newest `keep` are removed when this one is complete.
        timeout_s: how long rank 0 waits for another rank's shards.
        make_shards: called with what `Shards` takes.
    """
    final = folder / f"step_{step}"
    temporary = writing_folder(final)
    agree("save", lambda: _make_room(temporary))
    num_updates = policy.scheduler.num_steps
    shards = make_shards(temporary / "shards", is_copied=is_copied)
    state = state_to_save(policy, has_moments=num_updates > 0)
    num_critic_updates = 0
    if critic is not None:
        num_critic_updates = checkpoint_format.num_updates_of(critic)
        state["critic"] = (
            critic.sharded_state(has_moments=num_critic_updates > 0)
            if isinstance(critic, ValueHead)
            else checkpoint_format.critic_state(
                state_to_save(critic, has_moments=num_critic_updates > 0)
            )
        )
    if reference is not None:
        state["reference"] = checkpoint_format.reference_state(reference)
    dist_checkpointing.save(
        state | {"random": checkpoint_format.random_states()},
        str(temporary / "shards"),
        sharded_strategy=ShardStrategy(shards),
    )
    facts = {
        "schema": checkpoint_format.SCHEMA,
        "step": step,
        "num_updates": num_updates,
        "mark": dataclasses.asdict(mark),
        "model": policy.config.described,
        "reference_hash": reference_hash,
        "layout": dataclasses.asdict(policy.config.sizes),
        "critic": None if critic is None else checkpoint_format.described_critic(critic),
        "num_critic_updates": num_critic_updates,
        "kl_coefficient": kl_coefficient,
        "entropy_coefficient": entropy_coefficient,
        "has_reference": reference is not None,
        "optimizer": policy.optimizer_name,
    }
    return Saving(shards, final, facts, keep=keep, timeout_s=timeout_s)


def save_checkpoint(
    policy: Policy,
    folder: Path,
    *,
    step: int,
    mark: CheckpointMark,
    keep: int,
    critic: Policy | ValueHead | None = None,
    reference_hash: str = "",
) -> Path:
    """`begin_save`, and wait until it is complete.

    Raises:
        CheckpointFailed: it could not be written.
    """
    saving = begin_save(
        policy,
        folder,
        step=step,
        mark=mark,
        keep=keep,
        critic=critic,
        reference_hash=reference_hash,
        is_copied=False,
    )
    saving.run()
    return agree("save", saving.result)


def writing_folder(final: Path) -> Path:
    """Where a checkpoint lies until it is complete."""
    return final.with_name(f".{final.name}.writing")


def _make_room(temporary: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "shards").mkdir(parents=True)


def _copy(data: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    if isinstance(data, Tensor):
        return data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return data


def _without_classes(result: WriteResult) -> _Written:
    where = result.storage_data
    offset = None if result.index.offset is None else tuple(result.index.offset)
    return _Written(
        name=result.index.fqn,
        offset=offset,
        index=result.index.index,
        num_bytes=result.size_in_bytes,
        file=where.relative_path,
        start=where.offset,
        length=where.length,
    )


def _with_classes(written: _Written) -> WriteResult:
    offset = None if written.offset is None else torch.Size(written.offset)
    return WriteResult(
        index=MetadataIndex(written.name, offset, written.index),
        size_in_bytes=written.num_bytes,
        storage_data=_StorageInfo(written.file, written.start, written.length),
    )


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
