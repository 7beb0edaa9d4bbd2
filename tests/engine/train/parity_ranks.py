"""What every rank of a parity job runs: each case in turn, in its own layout.

Started by torchrun with a folder that holds cases.json; rank 0 leaves CASE.json with the numbers
of each update, and CASE.safetensors with the weights after the last.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    from outloop.buffer.records import CheckpointMark
    from outloop.buffer.routed_experts import RoutingShape
    from outloop.buffer.settings.trainer import CriticSettings, TrainerSettings
    from outloop.engine.models.safetensors_folder import HuggingFaceFolder
    from outloop.engine.train.algorithms.credit import ScoredEpisode, ScoredGroup, ScoredTurn
    from outloop.engine.train.checkpoint.async_writer import begin_save
    from outloop.engine.train.checkpoint.checkpoint_format import latest_checkpoint, load_checkpoint
    from outloop.engine.train.data.batch_builder import Credit
    from outloop.engine.train.data.samples import Sample
    from outloop.engine.train.data.train_batch import TrainBatch
    from outloop.engine.train.megatron import import_weights, model_and_optimizer
    from outloop.engine.train.megatron.export_weights import Exports
    from outloop.engine.train.megatron.value_head import ValueHead
    from outloop.engine.train.step.critic_update import (
        critic_update,
        cut_rows,
        values_of,
        with_value_targets,
        with_values,
    )
    from outloop.engine.train.step.head_update import HeadUpdate
    from outloop.engine.train.step.policy_update import rl_update
    from outloop.engine.train.step.recompute_logprobs import score

NUM_UPDATES = 3


def samples_of(
    seed: int, *, vocab_size: int, routing: RoutingShape | None = None, count: int = 11
) -> list[Sample]:
    """Multi-turn rows of unequal length: turns of context and of trained tokens in alternation.

    With experts two tokens of three are replayed to some, whatever the router says.
    """
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        mask: list[bool] = []
        for _ in range(int(generator.integers(1, 4))):
            mask += [False] * int(generator.integers(1, 9)) + [True] * int(
                generator.integers(1, 17)
            )
        size = len(mask)
        samples.append(
            Sample(
                episode_id=f"e{index // 2}",
                group_id=f"g{index // 4}",
                branch=index % 2,
                token_ids=generator.integers(0, vocab_size, size).astype(np.int32),
                loss_mask=np.array(mask),
                behavior_logprobs=generator.normal(-6.0, 0.1, size).astype(np.float32),
                policy_versions=np.zeros(size, np.int32),
                temperature=np.full(size, 0.7 if index % 3 else 1.0, np.float32),
                turns=np.where(mask, index % 2, -1).astype(np.int32),
                advantages=np.full(size, generator.normal(), np.float32),
                routed_experts=None if routing is None else _routes(generator, size, routing),
            )
        )
    return samples


def _routes(generator: np.random.Generator, size: int, routing: RoutingShape) -> Any:
    shape = (size, routing.num_layers, routing.num_experts)
    experts = generator.random(shape).argsort(axis=-1)[..., : routing.top_k]
    experts[generator.random(size) < 1 / 3] = routing.unknown
    return experts.astype(routing.dtype).reshape(-1).view(f"V{routing.row_bytes}")


def run_case(case: dict[str, Any], folder: Path, *, num_ranks: int) -> None:
    """Some updates in the case's layout; what they measured and the weights they led to."""
    model = Path(case["model"])
    chosen = {"learning_rate": 1e-3, "max_microbatch_tokens": 64} | case.get("settings", {})
    settings = TrainerSettings(**chosen)
    config = model_and_optimizer.read_config(
        model, case.get("megatron", {}), num_ranks=num_ranks, dtype=settings.dtype
    )
    model_and_optimizer.join_process_group(seed=1, sizes=config.sizes, timeout_s=120.0)
    try:
        policy = model_and_optimizer.build_policy(config, settings, num_updates=10)
        import_weights.load_huggingface(policy.model, model)
        policy.take_weights()
        critic = None
        if case.get("critic") == "head":
            critic = ValueHead(config.hidden_size, WITH_HEAD, num_updates=10)
        elif case.get("critic"):
            critic = _critic(case, num_ranks)
        exports = Exports(policy.model, message_bytes=MESSAGE_BYTES)
        is_bit_equal = _comes_back(exports, model)
        first = 0
        if "load" in case:
            checkpoint = latest_checkpoint(Path(case["load"]))
            assert checkpoint is not None
            load_checkpoint(policy, checkpoint, critic=critic)
            first = checkpoint.step
        order = case.get("order_seed", 0)
        count = case.get("num_updates", NUM_UPDATES)
        result = _updates(policy, settings, first, count, order, critic)
        result["is_bit_equal"] = is_bit_equal
        if "save" in case:
            step = first + len(result["updates"])
            mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=step)
            saving = begin_save(
                policy, Path(case["save"]), step=step, mark=mark, keep=1, critic=critic
            )
        names = [spec.name for spec in exports.specs]
        if int(os.environ.get("RANK", "0")):
            exports.send(names)
        else:
            (folder / f"{case['name']}.json").write_text(json.dumps(result))
            gathered = zip(names, exports.gather(names), strict=True)
            tensors = {name: tensor.clone() for name, tensor in gathered}
            save_file(tensors, folder / f"{case['name']}.safetensors")
        if "save" in case:
            # What is trained meanwhile must not be in it.
            saving.start()
            _updates(policy, settings, step, 1, critic=critic)
            assert saving.wait(100.0)
            saving.result()
            dist.barrier()
    finally:
        # The ranks stay; the next case lays them out again.
        parallel_state.destroy_model_parallel()


MESSAGE_BYTES = 1000


class _Largest(TorchDispatchMode):
    """The most bytes that one operation allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.num_bytes = max(self.num_bytes, made.numel() * made.element_size())
        return made


def _comes_back(exports: Exports, model: Path) -> bool:
    """Whether what was read is exported bit for bit.

    And whether it is when it is written to places of another dtype, where rank 0 allocates no more
    than a message at a time: one row where that is more.
    """
    names = [spec.name for spec in exports.specs]
    if int(os.environ.get("RANK", "0")):
        exports.send(names)
        exports.send(names)
        return True
    places = [torch.empty(spec.shape, dtype=torch.bfloat16) for spec in exports.specs]
    with HuggingFaceFolder(model) as folder:
        named = dict(folder.shapes)
        for name, tensor in zip(names, exports.gather(names), strict=True):
            if not torch.equal(tensor.cpu(), folder.read(name).to(tensor.dtype)):
                return False
            del named[name]
        with _Largest() as largest:
            for place, tensor in zip(places, exports.gather(names, places), strict=True):
                if tensor is not place:
                    place.copy_(tensor)
        for spec, place in zip(exports.specs, places, strict=True):
            if not torch.equal(place, folder.read(spec.name).to(torch.bfloat16)):
                return False
    row_bytes = max(spec.shape[-1] for spec in exports.specs) * 4
    return not named and largest.num_bytes <= max(MESSAGE_BYTES, row_bytes)


def _critic(case: dict[str, Any], num_ranks: int) -> model_and_optimizer.Policy:
    """Of the policy's size, with a head that says something."""
    config = model_and_optimizer.read_config(
        Path(case["model"]), case.get("megatron", {}), num_ranks=num_ranks
    )
    critic = model_and_optimizer.build_critic(config, WITH_CRITIC, num_updates=10)
    import_weights.load_huggingface(critic.model, Path(case["model"]))
    if parallel_state.is_pipeline_last_stage():
        with torch.no_grad():
            torch.nn.init.constant_(critic.model.output_layer.weight, 0.02)
    critic.take_weights()
    return critic


WITH_CRITIC = TrainerSettings(
    advantage="gae", max_microbatch_tokens=64, critic=CriticSettings(learning_rate=1e-3)
)


WITH_HEAD = WITH_CRITIC.model_copy(
    update={"critic": CriticSettings(kind="head", value_coefficient=0.5, learning_rate=1e-2)}
)


def _critic_update(critic: model_and_optimizer.Policy, batch: TrainBatch) -> dict[str, float]:
    """One update towards rewards that the episodes' names give."""
    rows, targets, metrics = _valued(critic.model, batch)
    measured = critic_update(
        critic, targets, WITH_CRITIC, rows=range(len(batch)), on_microbatch=lambda: None
    )
    return metrics | measured | {"advantages": float(np.abs(rows.advantages).sum())}


def _valued(
    model: Any, batch: TrainBatch, head: ValueHead | None = None
) -> tuple[TrainBatch, TrainBatch, dict[str, float]]:
    """What `with_values` makes of rewards that the episodes' names give; every second one is
    truncated."""
    members: dict[str, list[int]] = {}
    for row, name in enumerate(batch.episode_ids):
        members.setdefault(name, []).append(row)
    turn = ScoredTurn(
        turn_id="t",
        parent=None,
        request=0,
        num_tokens=1,
        oldest_version=0,
        is_cut=False,
        reward=0.5,
    )
    episodes = {
        name: ScoredEpisode(
            episode_id=name,
            reward=float(int(name[1:]) % 3),
            outcome="truncated" if int(name[1:]) % 2 else "completed",
            is_truncated=int(name[1:]) % 2 == 1,
            turns=(turn, turn),
        )
        for name in members
    }
    group = ScoredGroup(group_id="g", task_id="t", episodes=tuple(episodes.values()))
    credit = Credit(groups=(group,), teaches=(True,), rows={0: tuple(map(tuple, members.values()))})
    values, behind = values_of(
        model,
        batch,
        cut_rows=cut_rows(batch, credit, WITH_CRITIC.critic),
        max_tokens=64,
        on_microbatch=lambda: None,
        head=head,
    )
    return with_values(batch, credit, values, behind, WITH_CRITIC)


def _updates(
    policy: model_and_optimizer.Policy,
    settings: TrainerSettings,
    first: int,
    count: int,
    order_seed: int = 0,
    critic: model_and_optimizer.Policy | ValueHead | None = None,
) -> dict[str, Any]:
    rows = []
    vocab_size = policy.config.vocab_size
    scores: list[float] = []
    for seed in range(first, first + count):
        samples = samples_of(seed, vocab_size=vocab_size, routing=policy.config.routing)
        order = np.arange(len(samples))
        if order_seed:
            order = np.random.default_rng(order_seed).permutation(len(samples))
        samples = [samples[index] for index in order]
        batch = TrainBatch.of(samples)
        limit = settings.max_microbatch_tokens
        column = score(policy.model, batch, max_tokens=limit, on_microbatch=lambda: None)
        scored = np.split(column, batch.starts[1:-1])
        scores = [float(logprob) for place in np.argsort(order) for logprob in scored[place]]
        values, measured = None, {}
        if isinstance(critic, ValueHead):
            given, targets, measured = _valued(policy.model, batch, critic)
            measured["advantages"] = float(np.abs(given.advantages).sum())
            batch = with_value_targets(given, targets)
            values = HeadUpdate(critic, batch, WITH_HEAD, rows=range(len(batch)))
        report = rl_update(
            policy, batch, settings, policy_version=0, on_microbatch=lambda: None, values=values
        )
        rows.append(report.metrics() | report.policy_metrics() | measured)
        if values is not None:
            rows[-1] |= values.metrics
        elif isinstance(critic, model_and_optimizer.Policy):
            rows[-1] |= _critic_update(critic, batch)
    return {"updates": rows, "scores": scores}


if __name__ == "__main__":
    work = Path(sys.argv[1])
    for spec in json.loads((work / "cases.json").read_text()):
        run_case(spec, work, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    model_and_optimizer.leave_process_group()
