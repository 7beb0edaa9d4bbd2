"""Reward models: losses against float64 autograd, updates whatever the split, and whole trainings
from pairs and from scored episodes, with accuracy on what was held out."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import save_file

from fakes.conversations import Conversations
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Trajectory, Turn
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.buffer.telemetry import MetricsWriter
from outloop.engine.train.algorithms.reward_losses import bradley_terry, regression
from outloop.engine.train.data.microbatch import build_microbatch
from outloop.engine.train.data.reward_rows import Comparison, is_held_out, scored_rows
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.megatron.model_and_optimizer import (
    Policy,
    ValueModel,
    build_reward_model,
    read_config,
)
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.reward_model import run_reward_model
from outloop.engine.train.step.reward_update import (
    HEAD,
    load_reward_model,
    reward_update,
    scores_of,
)

MakeTurn = Callable[..., Turn]
MakeTrajectory = Callable[..., Trajectory]
MakeSamples = Callable[..., list[Sample]]


def written_out(kind: str, scores: torch.Tensor, targets: list[float], sets: list[int]) -> Any:
    """The loss from its formula, pair by pair."""
    if kind == "regression":
        return (0.5 * (scores - torch.tensor(targets, dtype=torch.float64)) ** 2).mean()
    of_sets = []
    for label in sorted(set(sets)):
        rows = [i for i, one in enumerate(sets) if one == label]
        pairs = [(i, j) for i in rows for j in rows if targets[i] > targets[j]]
        if pairs:
            of_sets.append(
                torch.stack(
                    [-torch.nn.functional.logsigmoid(scores[i] - scores[j]) for i, j in pairs]
                ).mean()
            )
    return torch.stack(of_sets).mean() if of_sets else scores.sum() * 0


@pytest.mark.medium
@settings(max_examples=60)
@given(st.data(), st.sampled_from(["bradley_terry", "regression"]))
def test_losses_and_gradients_are_those_of_their_formulas(data: Any, kind: str) -> None:
    """A mutant that swaps better and worse, or the weights of sets, fails here."""
    count = data.draw(st.integers(1, 8))
    numbers = st.lists(st.floats(-4, 4), min_size=count, max_size=count)
    scores = torch.tensor(data.draw(numbers), dtype=torch.float64, requires_grad=True)
    targets = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count))
    sets = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    wanted = written_out(kind, scores, targets, sets)
    (gradient,) = torch.autograd.grad(wanted, scores)
    function = bradley_terry if kind == "bradley_terry" else regression
    found = function(scores.detach().numpy(), np.array(targets), sets)
    assert found.loss == pytest.approx(float(wanted.detach()), abs=1e-12)
    assert found.gradient == pytest.approx(gradient.numpy(), abs=1e-12)
    pairs = [
        (i, j)
        for i in range(count)
        for j in range(count)
        if sets[i] == sets[j] and targets[i] > targets[j]
    ]
    assert found.num_pairs == len(pairs)
    if pairs:
        right = [
            np.sign(float(scores[i].detach() - scores[j].detach())) / 2 + 0.5 for i, j in pairs
        ]
        assert found.accuracy == pytest.approx(np.mean(right))


def test_no_difference_overflows() -> None:
    """Scores far apart, the wrong way around."""
    found = bradley_terry(np.array([-2000.0, 2000.0]), np.array([1.0, 0.0]), [0, 0])
    assert found.loss == pytest.approx(4000.0)
    assert found.gradient.tolist() == [-1.0, 1.0]
    assert found.accuracy == 0.0


def model_of(folder: Path, **chosen: Any) -> Policy:
    """A reward model over the layers of a folder, with a head that is not zero."""
    made = build_reward_model(
        read_config(folder, {}), TrainerSettings(max_grad_norm=1e9, **chosen), num_updates=5
    )
    assert isinstance(made.model, ValueModel)
    load_reward_model(made.model, folder)
    with torch.no_grad():
        made.model.output_layer.weight.copy_(torch.linspace(-1, 1, 64)[None])
    made.take_weights()
    return made


def test_an_update_is_the_gradient_of_its_loss_however_it_is_split(
    tiny_folder: Callable[..., Path], make_samples: MakeSamples
) -> None:
    """Rows of a pair in different microbatches: the same gradient as of all at once."""
    rows = make_samples(8)
    sets = [
        Comparison(name=str(i), rows=tuple(rows[2 * i : 2 * i + 2]), targets=(float(i % 2), 0.5))
        for i in range(4)
    ]
    chosen = scored_rows(sets)
    grads = []
    for max_tokens in (1000, 40):
        made = model_of(tiny_folder())
        measured = reward_update(
            made,
            chosen.batch,
            chosen.targets,
            chosen.sets,
            loss="bradley_terry",
            max_tokens=max_tokens,
            on_microbatch=lambda: None,
        )
        grads.append(torch.cat([p.main_grad.flatten() for p in made.model.parameters()]).clone())
    model = model_of(tiny_folder()).model
    assert isinstance(model, ValueModel)
    outputs = []
    for row in rows:
        (one,) = [scored_rows([Comparison(name="", rows=(row,), targets=(0.0,))])]
        packed = build_microbatch(one.batch, [0], torch.device("cpu"))
        hidden = model(packed.token_ids_T, packed.row, packed.predictors_N)
        outputs.append(model.values(hidden)[0].double())
    loss = written_out("bradley_terry", torch.stack(outputs), chosen.targets, chosen.sets)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert measured["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    for gradient in grads:
        assert (gradient - wanted).abs().max() <= 3e-5 * wanted.abs().max()


@pytest.fixture
def train(
    tiny_folder: Callable[..., Path],
    make_ranks: Callable[..., RankController],
    tmp_path: Path,
) -> Callable[..., tuple[Run, list[dict[str, float]]]]:
    """Train on trajectories; the run and the rows of its metrics."""

    def make(
        trajectories: Sequence[Trajectory], model: Path | None = None, **trainer: Any
    ) -> tuple[Run, list[dict[str, float]]]:
        chosen = {"mode": "sft", "learning_rate": 3e-3, "groups_per_step": 16} | trainer
        run = create_run(
            Settings(model={"path": model or tiny_folder()}, trainer=chosen),
            tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            "unix:///nowhere",
        )
        with MetricsWriter(run.dir) as metrics:
            run_reward_model(
                run,
                make_ranks(run),
                reader=Conversations(list(trajectories)),
                metrics=metrics,
                stop=threading.Event(),
            )
        lines = (run.dir / "metrics.jsonl").read_text().splitlines()
        return run, [json.loads(line) for line in lines]

    return make


@pytest.fixture
def answers(
    make_turn: MakeTurn, make_trajectory: MakeTrajectory
) -> Callable[..., Iterator[Trajectory]]:
    """Two answers to a question, of which the lower id is better; with pairs in the metadata, or as
    the episodes of a group with a reward."""

    def make(count: int, *, as_pairs: bool) -> Iterator[Trajectory]:
        random = np.random.default_rng(4)
        for number in range(count):
            two = sorted(random.choice(np.arange(100, 140), 2, replace=False).tolist())
            for place, (answer, reward) in enumerate(zip(two, (1.0, 0.0), strict=True)):
                one = make_trajectory(
                    [
                        make_turn(
                            "a", prompt=[7, 10 + number % 50], output=[answer, 99], logprobs=None
                        )
                    ],
                    purpose="sft",
                    group_id=None if as_pairs else f"g{number}",
                    reward=None if as_pairs else reward,
                    episode_id=f"e{number}-{place}",
                )
                metadata = {"pair": str(number), "reward": str(reward)} if as_pairs else {}
                episode = structs.replace(one.episode, metadata=metadata)
                yield structs.replace(one, episode=episode)

    return make


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "as_pairs"), [("bradley_terry", True), ("regression", False)])
def test_a_reward_model_orders_what_it_never_saw(
    kind: str,
    as_pairs: bool,
    train: Callable[..., Any],
    answers: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """By preferences or by rewards; and goes on from its own folder where it was."""
    data = list(answers(400, as_pairs=as_pairs))
    run, rows = train(
        data, reward_model=kind, num_steps=120, num_epochs=6, held_out_share=0.2, warmup_steps=5
    )
    assert rows[0]["reward_model/held_out_accuracy"] == 0.5
    assert rows[-1]["reward_model/held_out_accuracy"] > 0.75
    assert 40 < rows[-1]["reward_model/held_out_pairs"] < 120
    assert (run.dir / "hf" / HEAD).is_file()
    _, again = train(data, model=run.dir / "hf", reward_model=kind, num_steps=1, held_out_share=0.2)
    before = rows[-1]["reward_model/held_out_loss"]
    assert again[0]["reward_model/held_out_loss"] == pytest.approx(before, rel=1e-4, abs=1e-6)


@pytest.mark.medium
def test_a_head_of_another_model_is_refused(
    train: Callable[..., Any], answers: Callable[..., Any]
) -> None:
    """With both shapes."""
    run, _ = train(list(answers(30, as_pairs=True)), reward_model="bradley_terry", num_steps=1)
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, run.dir / "hf" / HEAD)
    made = build_reward_model(read_config(run.dir / "hf", {}), TrainerSettings(), num_updates=1)
    with pytest.raises(SettingsError, match=r"weight is \(1, 3\), \(1, 64\) is due"):
        load_reward_model(made.model, run.dir / "hf")


@pytest.mark.medium
def test_rows_that_say_nothing_are_refused(
    train: Callable[..., Any],
    answers: Callable[..., Any],
    make_turn: MakeTurn,
    make_trajectory: MakeTrajectory,
) -> None:
    """Equal rewards, and rewards that are none."""
    good = next(answers(1, as_pairs=True))
    bad = structs.replace(
        good, episode=structs.replace(good.episode, metadata={"pair": "1", "reward": "much"})
    )
    with pytest.raises(SettingsError, match="reward='much' is no finite number"):
        train([bad], reward_model="bradley_terry")
    with pytest.raises(SettingsError, match="no comparison to train on.*1 have equal rewards"):
        train([good, good], reward_model="bradley_terry", held_out_share=0.0)


def test_what_is_held_out_depends_on_the_name_alone() -> None:
    """And is about the share that was asked for."""
    names = [f"g{i}" for i in range(2000)]
    held = [name for name in names if is_held_out(name, 0.1)]
    assert 150 < len(held) < 250
    assert all(is_held_out(name, 0.2) for name in held)
    assert not any(is_held_out(name, 0.0) for name in names)


def test_scores_do_not_depend_on_what_follows_in_a_microbatch(
    tiny_folder: Callable[..., Path], make_samples: MakeSamples
) -> None:
    """A row's score is its own."""
    made = model_of(tiny_folder())
    rows = make_samples(5)
    assert isinstance(made.model, ValueModel)

    def of(chosen: list[Sample], max_tokens: int) -> list[float]:
        comparison = Comparison(name="", rows=tuple(chosen), targets=(0.0,) * len(chosen))
        batch = scored_rows([comparison]).batch
        return scores_of(
            made.model, batch, max_tokens=max_tokens, on_microbatch=lambda: None
        ).tolist()

    whole = of(rows, 1000)
    assert whole == pytest.approx([score for row in rows for score in of([row], 40)], abs=1e-5)
    cut = dataclasses.replace(
        rows[0],
        token_ids=np.where(np.arange(rows[0].num_tokens) > 0, rows[0].token_ids + 1, 3).astype(
            "i4"
        ),
    )
    assert of([cut], 1000) != pytest.approx([whole[0]], abs=1e-5)
