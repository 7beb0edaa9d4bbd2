"""Routing replay: a server's experts in the trainer, whatever the trainer's router would choose."""

import base64
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from fakes.records import trajectory_of
from outloop.buffer.errors import RecordError, SettingsError
from outloop.buffer.records import Sampling, Turn, VersionSpan
from outloop.buffer.routed_experts import RoutedExperts, RoutingShape
from outloop.buffer.settings import TrainerSettings
from outloop.engine.train.data.microbatch import build_microbatch
from outloop.engine.train.data.samples import Sample, build_samples, prompt_sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron import import_weights, model_and_optimizer
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.recompute_logprobs import score

SHAPE = RoutingShape(num_layers=2, top_k=3, num_experts=300)
CPU = torch.device("cpu")
MAX_GAP = 1e-4
MIN_GAP = 0.02
"""What other experts change at least, where some token's are others."""


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[Turn], dict[tuple[str, int], int]]:
    """Turns of a tree, and the mark of each id's predecessor: its turn and place."""
    turns: list[Turn] = []
    marks: dict[tuple[str, int], int] = {}
    for index in range(draw(st.integers(1, 5))):
        parent = draw(st.none() | st.sampled_from(turns)) if turns else None
        num_prompt, num_output = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        num_rows = num_prompt + num_output - (parent is None)
        first = 40 * index
        experts = np.broadcast_to(
            np.arange(first, first + num_rows)[:, None, None], (num_rows, 2, 3)
        ) + np.arange(3)
        turn = Turn(
            turn_id=f"t{index}",
            episode_id="e",
            parent_turn_id=None if parent is None else parent.turn_id,
            prompt_ids=np.ones(num_prompt, np.int32),
            output_ids=np.ones(num_output, np.int32),
            behavior_logprobs=np.zeros(num_output, np.float32),
            version_spans=(VersionSpan(0, 0, num_output),),
            loss_spans=((0, num_output),),
            sampling=Sampling(temperature=1.0),
            finish_reason="stop",
            started_at=0.0,
            finished_at=0.0,
        )
        if draw(st.booleans()) or parent is None:
            turn = replace(turn, routed_experts=RoutedExperts.of(SHAPE, experts))
            for row in range(num_rows):
                marks[turn.turn_id, row + (parent is None)] = first + row
        turns.append(turn)
    return turns, marks


@pytest.mark.medium
@given(episodes())
def test_each_token_has_the_experts_before_the_next(
    sampled: tuple[list[Turn], dict[tuple[str, int], int]],
) -> None:
    """Along every branch, over turns with and without them; the last token has none."""
    turns, marks = sampled
    trajectory = trajectory_of(turns)
    for sample in build_samples(trajectory, routing=SHAPE):
        branch = trajectory.branches()[sample.branch]
        places = [
            (turn.turn_id, place)
            for turn in branch
            for place in range(len(turn.prompt_ids) + len(turn.output_ids))
        ]
        assert sample.routed_experts is not None
        rows = sample.routed_experts.view("<u2").reshape(-1, 2, 3)
        assert len(rows) == len(places) == sample.num_tokens
        for token, after in enumerate([*places[1:], None]):
            mark = marks.get(after) if after is not None else None
            expected = SHAPE.unknown if mark is None else mark
            assert rows[token, 0, 0] == rows[token, 1, 0] == expected


class Player:
    """Plays turns against a server of the tiny model, and records them as a router does."""

    def __init__(self, url: str, routing: RoutingShape) -> None:
        self.url = url
        self.routing = routing
        self.turns: list[Turn] = []

    def turn(self, parent: Turn | None, prompt: list[int], *, num_new: int = 24) -> Turn:
        """One more turn after `parent`."""
        before: list[int] = []
        path = parent
        while path is not None:
            before = [*path.prompt_ids.tolist(), *path.output_ids.tolist(), *before]
            path = next((t for t in self.turns if t.turn_id == path.parent_turn_id), None)
        answer = httpx.post(
            self.url + "/generate",
            json={
                "input_ids": before + prompt,
                "sampling_params": {"max_new_tokens": num_new, "ignore_eos": True},
                "return_logprob": True,
                "return_routed_experts": True,
                "routed_experts_start_len": max(0, len(before) - 1),
            },
        ).json()
        meta = answer["meta_info"]
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        experts = flat.reshape(-1, self.routing.num_layers, self.routing.top_k)
        turn = Turn(
            turn_id=f"t{len(self.turns)}",
            episode_id="e",
            parent_turn_id=None if parent is None else parent.turn_id,
            prompt_ids=np.array(prompt, np.int32),
            output_ids=np.array(answer["output_ids"], np.int32),
            behavior_logprobs=np.array(
                [entry[0] for entry in meta["output_token_logprobs"]], np.float32
            ),
            version_spans=(VersionSpan(0, 0, num_new),),
            loss_spans=((0, num_new),),
            sampling=Sampling(temperature=1.0),
            finish_reason="length",
            started_at=0.0,
            finished_at=0.0,
            routed_experts=RoutedExperts.of(self.routing, experts),
        )
        self.turns.append(turn)
        return turn


def _played(url: str, routing: RoutingShape) -> TrainBatch:
    """Three turns, the second continued in two ways; prefixes come from the server's cache."""
    player = Player(url, routing)
    generator = np.random.default_rng(0)

    def prompt(size: int) -> list[int]:
        return [int(token) for token in generator.integers(2, 200, size)]

    root = player.turn(None, prompt(17))
    middle = player.turn(root, prompt(9))
    for _ in range(2):
        player.turn(middle, prompt(11))
    player.turn(None, prompt(40))
    samples = build_samples(trajectory_of(player.turns), routing=routing)
    assert [sample.num_trained_tokens for sample in samples] == [72, 24, 24]
    return TrainBatch.of(samples)


def _gaps(model: Any, batch: TrainBatch) -> np.ndarray:
    found = score(model, batch, max_tokens=128, on_microbatch=lambda: None)
    assert batch.behavior_logprobs is not None
    return np.abs(found - batch.behavior_logprobs)[batch.loss_mask]


def _unsure(folder: Path, made: Path) -> None:
    """A copy of a Qwen3-MoE whose routers have three equal rows: rounding decides among them."""
    shutil.copytree(folder, made)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[2:] = tensor[1]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_the_gap_of_another_router_vanishes(
    kind: str,
    make_model: Callable[..., Path],
    start_torch_server: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A correction bias that has drifted, or logits that are equal but for noise: without replay
    tokens meet other experts than at the server, with it logprobs agree to rounding."""
    folder = make_model(kind, tied=False)
    if kind == "qwen3_moe":
        _unsure(folder, tmp_path / "unsure")
        folder = tmp_path / "unsure"
    model = model_and_optimizer.PolicyModel(model_and_optimizer.read_config(folder, {}))
    import_weights.load_huggingface(model, folder)
    assert model.config.routing is not None
    batch = _played(start_torch_server(folder).url, model.config.routing)
    assert _gaps(model, batch).max() <= (MAX_GAP if kind == "glm4_moe" else np.inf)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.decoder.layers:
            if kind == "glm4_moe" and hasattr(layer.mlp, "router"):
                layer.mlp.router.expert_bias.add_(torch.randn(8) * 0.5)
            elif kind == "qwen3_moe":
                layer.mlp.router.weight[1:].add_(torch.randn(3, 64) * 1e-6)
    without = _gaps(model, dataclasses.replace(batch, routed_experts=None))
    assert without.max() > MIN_GAP
    assert _gaps(model, batch).max() <= MAX_GAP
    again = TrainBatch.decode(batch.encode())
    assert _gaps(model, again.select([2, 0])).max() <= MAX_GAP


@pytest.mark.medium
def test_only_the_replayed_experts_are_trained(
    make_model: Callable[..., Path], start_torch_server: Callable[..., Any]
) -> None:
    """An update sends every token to the experts that are recorded; the router learns too."""
    folder = make_model("qwen3_moe", tied=False)
    settings = TrainerSettings(max_microbatch_tokens=128)
    policy = model_and_optimizer.build_policy(
        model_and_optimizer.read_config(folder, {}), settings, num_updates=1
    )
    import_weights.load_huggingface(policy.model, folder)
    routing = policy.config.routing
    assert routing is not None
    batch = _played(start_torch_server(folder).url, routing)
    assert batch.routed_experts is not None
    ones = np.full((len(batch.token_ids), 2, 2), (1, 3), np.uint8)
    batch = dataclasses.replace(
        batch,
        routed_experts=ones.reshape(-1).view(batch.routed_experts.dtype),
        advantages=np.ones_like(batch.advantages),
    )
    rl_update(policy, batch, settings, policy_version=0, on_microbatch=lambda: None)
    for layer in policy.model.decoder.layers:
        moved = [
            bool(expert.linear_fc1.weight.main_grad.abs().max() > 0)
            for expert in layer.mlp.experts.local_experts
        ]
        assert moved == [False, True, False, True]
        assert layer.mlp.router.weight.main_grad.abs().max() > 0


def test_routes_of_another_model_are_refused(make_model: Callable[..., Path]) -> None:
    """Their rows have other sizes."""
    rows = np.zeros(3 * 4, np.uint8).view("V4")
    batch = dataclasses.replace(TrainBatch.of([_row(3)]), routed_experts=rows)
    build_microbatch(batch, [0], CPU, routing=RoutingShape(num_layers=2, top_k=2, num_experts=4))
    with pytest.raises(RecordError, match="another model"):
        build_microbatch(batch, [0], CPU, routing=SHAPE)
    assert build_microbatch(batch, [0], CPU).row.routes is None


def _row(num_tokens: int) -> Sample:
    return prompt_sample(range(num_tokens))


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_cannot_replay_is_refused(is_fused: bool, make_model: Callable[..., Path]) -> None:
    """At the first forward that has routes, with the setting that goes on without them."""
    config = model_and_optimizer.read_config(make_model("qwen3_moe", tied=False), {})
    model = model_and_optimizer.PolicyModel(config)
    config.pipeline_model_parallel_size = 2
    config.recompute_granularity, config.recompute_modules = "selective", ["moe"]
    config.moe_router_fusion = is_fused
    rows = np.zeros(3 * 4, np.uint8).view("V4")
    batch = dataclasses.replace(TrainBatch.of([_row(3)]), routed_experts=rows)
    microbatch = build_microbatch(batch, [0], CPU, routing=config.routing)
    sentence = "cannot replay routes" if is_fused else "routes of another microbatch"
    with pytest.raises(SettingsError, match=sentence):
        model.decoder.layers[0](
            torch.zeros(3, 1, 64), attention_mask=None, packed_seq_params=microbatch.row
        )
