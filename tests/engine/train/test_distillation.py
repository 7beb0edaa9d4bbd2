"""Distillation: gradients against the divergence's own in float64, teachers on the ranks, and a
whole loop that is pulled to its teacher."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.bandit_run import FAST, Setup
from fakes.families import make_family
from fakes.threaded_ranks import in_parts
from outloop.buffer.errors import SettingsError, UpdateRefused
from outloop.buffer.records import TEACHER_CONTEXT
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.engine.train.algorithms.distillation import top_divergence
from outloop.engine.train.algorithms.losses import LOSSES, LossInputs
from outloop.engine.train.algorithms.objective import objective
from outloop.engine.train.algorithms.token_logprobs import logprobs_and_entropies, top_ids
from outloop.engine.train.data.microbatch import build_microbatch
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import Policy, PolicyModel, read_config
from outloop.engine.train.step.policy_update import rl_update
from outloop.engine.train.step.reference_model import load_reference
from outloop.engine.train.step.teacher import (
    read_teacher_config,
    teacher_columns,
    teacher_metrics,
)

MakePolicy = Callable[..., Policy]
MakeSamples = Callable[..., list[Sample]]
CPU = torch.device("cpu")
VOCAB = 7


def update(policy: Policy, samples: list[Sample], chosen: TrainerSettings, **options: Any) -> None:
    """One RL update at version 0."""
    batch = TrainBatch.of(samples)
    rl_update(policy, batch, chosen, policy_version=0, on_microbatch=lambda: None, **options)


def gradient(policy: Policy) -> torch.Tensor:
    """The gradient that the last update left, flat."""
    return torch.cat([p.main_grad.flatten() for p in policy.model.parameters()]).clone()


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, and logprobs of who sampled (near it) and of a teacher, in float64."""
    random = torch.Generator().manual_seed(seed)
    policy, noise, teacher = torch.randn(3, VOCAB, generator=random, dtype=torch.float64)
    behavior = (policy + 0.3 * noise).log_softmax(-1)
    return policy.requires_grad_(), behavior, (2 * teacher).log_softmax(-1)


def trainer(**teacher: Any) -> TrainerSettings:
    """The recipe, and nothing else but the teacher's own settings."""
    return TrainerSettings(
        recipe="distill", max_grad_norm=1e9, teacher={"path": "teacher"} | teacher
    )


def expected_gradient(
    logits: torch.Tensor, behavior: torch.Tensor, teacher: torch.Tensor, chosen: TrainerSettings
) -> torch.Tensor:
    """That of the objective, over every token that the behavior policy might have sampled."""
    logprobs = logits.log_softmax(-1)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        behavior_logprobs=behavior,
        proximal_logprobs=behavior,
        advantages=torch.zeros(VOCAB, dtype=torch.float64),
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        teacher_logprobs=teacher,
    )
    loss = objective(inputs, LOSSES[chosen.loss], chosen).loss
    return torch.autograd.grad((behavior.exp() * loss).sum(), logits)[0]


def divergence(logits: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """KL(policy, teacher), or the other way around, over the whole vocabulary."""
    ours = logits.log_softmax(-1)
    if kind == "reverse":
        return (ours.exp() * (ours - teacher)).sum()
    return (teacher.exp() * (teacher - ours)).sum()


@pytest.mark.parametrize("seed", range(4))
def test_sampled_tokens_pull_as_the_reverse_kl_does(seed: int) -> None:
    """In expectation, also of tokens that other weights sampled; not as the forward KL, nor away
    from the teacher."""
    logits, behavior, teacher = distributions(seed)
    (wanted,) = torch.autograd.grad(divergence(logits, teacher, "reverse"), logits)
    (other,) = torch.autograd.grad(divergence(logits, teacher, "forward"), logits)
    for sampled_by in (logits.detach().log_softmax(-1), behavior):
        got = expected_gradient(logits, sampled_by, teacher, trainer(coefficient=0.5))
        assert torch.allclose(got, 0.5 * wanted, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(got, 0.5 * other, rtol=0.1)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_vocabulary_gives_the_whole_divergence(seed: int, kind: Any) -> None:
    """In value and gradient; of fewer tokens, with the others as one, it is less."""
    logits, _, teacher = distributions(seed)
    whole = divergence(logits, teacher, kind)
    total = float(whole.detach())
    got = top_divergence(logits.log_softmax(-1)[None], teacher[None], kind=kind)
    assert float(got.detach()) == pytest.approx(total, abs=1e-9)
    wanted, found = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (whole, got)
    )
    assert torch.allclose(wanted, found, atol=1e-9)
    top = teacher.topk(3).indices
    ours, theirs = logits.log_softmax(-1), teacher
    rest = [i for i in range(VOCAB) if i not in top.tolist()]
    coarse = divergence(
        torch.cat([ours[top], ours[rest].logsumexp(0, keepdim=True)]),
        torch.cat([theirs[top], theirs[rest].logsumexp(0, keepdim=True)]),
        kind,
    )
    some = top_divergence(ours[top][None], theirs[top][None], kind=kind)
    assert float(some.detach()) == pytest.approx(float(coarse.detach()), abs=1e-9)
    assert 0 < float(some.detach()) < total
    by_coarse, by_some = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (coarse, some)
    )
    assert torch.allclose(by_coarse, by_some, atol=1e-9)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(["reverse", "forward"]))
def test_a_token_that_the_teacher_did_not_name_adds_nothing(seed: int, kind: Any) -> None:
    """A server may name fewer than were asked for."""
    logits, _, teacher = distributions(seed)
    ours, theirs = logits.log_softmax(-1)[None, :3], teacher[None, :3]
    more = torch.cat([theirs, torch.full((1, 2), -torch.inf, dtype=torch.float64)], 1)
    padded = top_divergence(torch.cat([ours, ours[:, :2]], 1), more, kind=kind)
    plain = top_divergence(ours, theirs, kind=kind)
    assert torch.equal(padded, plain)
    found, wanted = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (padded, plain)
    )
    assert torch.allclose(found, wanted)


def test_a_policy_that_is_its_teacher_stays() -> None:
    """No pull at all, one way or the other."""
    logits, _, _ = distributions(1)
    own = logits.detach().log_softmax(-1)
    assert float(expected_gradient(logits, own, own, trainer()).abs().max()) < 1e-12
    for kind in ("reverse", "forward"):
        (pull,) = torch.autograd.grad(
            top_divergence(logits.log_softmax(-1)[None, :4], own[None, :4], kind=kind).sum(), logits
        )
        assert float(pull.abs().max()) < 1e-12


def wanted_gradient(policy: Policy, samples: list[Sample], chosen: TrainerSettings) -> torch.Tensor:
    """The pull of every trained token, from whole float64 tables by plain autograd."""
    model, total, count = policy.model, torch.zeros((), dtype=torch.float64), 0
    assert chosen.teacher is not None
    for sample in samples:
        batch = build_microbatch(TrainBatch.of([sample]), [0], CPU)
        hidden = model(batch.token_ids_T, batch.row, batch.predictors_N)
        table = torch.log_softmax(model.logits(hidden).double(), -1)
        logprobs = table.gather(1, batch.targets.token_ids_N[:, None])[:, 0]
        mask, behavior = sample.loss_mask, torch.tensor(sample.behavior_logprobs[sample.loss_mask])
        teacher = torch.tensor(sample.teacher_logprobs[mask]).double()
        ratio = (logprobs.detach() - behavior.double()).exp()
        if chosen.teacher.top_k:
            ids = torch.tensor(sample.teacher_top_ids[mask]).long()
            theirs = torch.tensor(sample.teacher_top_logprobs[mask]).double()
            ours = table.gather(1, ids)
            tails = [torch.log1p(-x.exp().sum(1, keepdim=True)) for x in (ours, theirs)]
            ours, theirs = torch.cat([ours, tails[0]], 1), torch.cat([theirs, tails[1]], 1)
            loss = (ours.exp() * (ours - theirs)).sum()
            if chosen.teacher.divergence == "forward":
                loss = (theirs.exp() * (theirs - ours)).sum()
            loss = chosen.teacher.coefficient * loss
        elif chosen.loss == "cispo":
            pull = chosen.teacher.coefficient * (teacher - logprobs.detach())
            loss = -(ratio.clamp(max=5.0) * pull * logprobs).sum()
        total, count = total + loss, count + int(mask.sum())
    grads = torch.autograd.grad(total / count, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).float()


def taught(samples: list[Sample], folder: Path, top_k: int) -> list[Sample]:
    """The samples as a model in `folder` scores them."""
    teacher = model_of(folder)
    batch = TrainBatch.of([dataclasses.replace(s, advantages=s.advantages * 0) for s in samples])
    columns = teacher_columns(
        teacher, batch, {}, top_k=top_k, vocab_size=400, max_tokens=64, on_microbatch=lambda: None
    )
    return list(batch.with_columns(**columns))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the same vocabulary and of three layers, surer than the policy."""
    folder = tmp_path_factory.mktemp("teacher")
    make_family("qwen3", folder, is_tied=True, num_hidden_layers=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def model_of(folder: Path) -> PolicyModel:
    """The model of a folder on this rank."""
    return load_reference(read_config(folder, {}), folder, pinned_hash="", device=CPU).model


@pytest.mark.medium
@pytest.mark.parametrize(
    "chosen",
    [
        trainer(coefficient=0.7),
        trainer(top_k=5, coefficient=0.7),
        trainer(top_k=5, divergence="forward"),
        # Both losses that see whole sequences go another way through the update.
        trainer(top_k=3).model_copy(update={"opsm_delta": 0.01}),
    ],
    ids=["sampled", "reverse", "forward", "by sequence"],
)
def test_gradients_through_the_model_agree_however_they_are_split(
    chosen: TrainerSettings,
    make_policy: MakePolicy,
    make_samples: MakeSamples,
    teacher_folder: Path,
) -> None:
    """A mutant that turns the sign, the direction or the mask around fails here."""
    assert chosen.teacher is not None
    policy = make_policy(max_grad_norm=1e9)
    samples = taught(make_samples(9), teacher_folder, chosen.teacher.top_k)
    wanted = wanted_gradient(policy, samples, chosen)
    update(policy, samples, chosen)
    assert wanted.abs().max() > 0
    assert (gradient(policy) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    split = make_policy(max_grad_norm=1e9)
    in_parts_of = chosen.model_copy(update={"max_microbatch_tokens": 40})
    update(split, samples[::-1], in_parts_of, max_chunk_logits=5 * 400)
    assert (gradient(split) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_a_reward_is_trained_beside_the_teacher(
    make_policy: MakePolicy, make_samples: MakeSamples, teacher_folder: Path
) -> None:
    """Advantages and pull add up: two gradients and their sum."""
    samples = make_samples(5)
    seen = taught(samples, teacher_folder, 0)
    both = [
        dataclasses.replace(one, advantages=own.advantages)
        for one, own in zip(seen, samples, strict=True)
    ]
    without = {"loss": "cispo", "max_grad_norm": 1e9}
    grads = []
    for given_samples, chosen in (
        (seen, trainer()),
        (samples, TrainerSettings(**without)),
        (both, TrainerSettings(teacher={"path": "t"}, **without)),
    ):
        policy = make_policy(max_grad_norm=1e9)
        update(policy, given_samples, chosen)
        grads.append(gradient(policy))
    assert torch.allclose(grads[0] + grads[1], grads[2], atol=1e-5 * float(grads[2].abs().max()))


def test_a_teacher_scores_as_its_folder_does_behind_what_only_it_sees(
    make_samples: MakeSamples, teacher_folder: Path
) -> None:
    """At each token's temperature; the columns are those of the rows without the context."""
    samples = make_samples(4, temperature=0.7)
    double = transformers.AutoModelForCausalLM.from_pretrained(teacher_folder).double()
    contexts = {samples[0].episode_id: (5, 6, 7), samples[3].episode_id: (9,)}
    model = model_of(teacher_folder)
    batch = TrainBatch.of(samples)
    found = batch.with_columns(
        **teacher_columns(
            model,
            batch,
            contexts,
            top_k=4,
            vocab_size=400,
            max_tokens=64,
            on_microbatch=lambda: None,
        )
    )
    for row in found:
        context = list(contexts.get(row.episode_id, ()))
        with torch.no_grad():
            logits = double(torch.tensor([context + row.token_ids.tolist()])).logits[0]
        table = (logits / 0.7).log_softmax(-1)[len(context) :]
        for at in np.flatnonzero(row.loss_mask).tolist():
            before = table[at - 1] if at or not context else None
            assert before is not None
            assert row.teacher_logprobs[at] == pytest.approx(
                float(before[row.token_ids[at]]), abs=1e-4
            )
            top = before.topk(4)
            assert row.teacher_top_ids[at].tolist() == top.indices.tolist()
            assert row.teacher_top_logprobs[at] == pytest.approx(top.values.numpy(), abs=1e-4)
        assert (row.teacher_logprobs[~row.loss_mask] == 0).all()
    assert 0 < teacher_metrics(found)["train/teacher_top_mass"] < 1


@pytest.mark.parametrize("bounds", [[0, 20, 33], [0, 31, 33]])
def test_the_most_probable_ids_of_a_split_vocabulary(bounds: list[int]) -> None:
    """Over all ranks, padding left out; and the logprobs of all of them at once."""
    logits = 4 * torch.randn(6, 33, generator=torch.Generator().manual_seed(3))
    wanted = logits[:, :30].topk(4, dim=-1).indices
    table = logits.log_softmax(-1).gather(1, wanted)

    def part(rank: int, group: dist.ProcessGroup) -> Any:
        own = logits[:, bounds[rank] : bounds[rank + 1]].clone()
        ids = top_ids(own, 4, vocab_size=30, vocab_start=bounds[rank], group=group)
        leaf = own.requires_grad_()
        logprobs, _ = logprobs_and_entropies(
            leaf * 1, ids, None, vocab_start=bounds[rank], group=group
        )
        (logprobs * torch.arange(4.0)).sum().backward()
        return ids, logprobs.detach(), leaf.grad

    results = in_parts(part, 2)
    whole = logits.double().requires_grad_()
    (whole.log_softmax(-1).gather(1, wanted) * torch.arange(4.0)).sum().backward()
    for ids, logprobs, _ in results:
        assert torch.equal(ids, wanted)
        assert torch.allclose(logprobs, table, atol=2e-5)
    joined = torch.cat([gradient for _, _, gradient in results], dim=1)
    assert torch.allclose(joined.double(), whole.grad, atol=2e-5)


MakeRun = Callable[..., Setup]
DISTILL = {"recipe": "distill"}


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_loop_is_pulled_to_its_teacher(setup: MakeRun, teacher_folder: Path, kind: str) -> None:
    """Nothing is paid; the distance to the teacher falls."""
    teacher = {"path": str(teacher_folder), "top_k": 20, "divergence": kind}
    run = setup(
        reward_of=lambda token: 0.0,
        trainer=FAST | DISTILL | {"num_steps": 15, "teacher": teacher},
        buffer={"group_size": 4},
    )
    rows = run.train()
    gaps = [row["train/teacher_kl"] for row in rows]
    assert np.mean(gaps[-3:]) < 0.3 * np.mean(gaps[:3])
    assert all(row["train/groups_with_signal_share"] == 1.0 for row in rows)


def with_tokens(folder: Path, source: Path, *, first: str = "t0", vocab_size: int = 400) -> Path:
    """A copy of a model folder with a tokenizer of one word an id."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    words = {first: 0} | {f"t{index}": index for index in range(1, vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=first))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.medium
def test_a_policy_that_sees_more_teaches_itself(
    setup: MakeRun, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The text of the episode's metadata stands in front for the teacher alone; without it the
    step is refused, since the policy would be its own teacher."""
    folder = with_tokens(tmp_path / "model", tiny_folder())
    teacher = {"context_key": "hint", "context_template": "t9 {context} t9"}
    chosen = {"trainer": FAST | DISTILL | {"num_steps": 2, "teacher": teacher}}
    chosen["buffer"] = {"group_size": 4}
    run = setup(model={"path": folder}, reward_of=lambda token: 0.0, **chosen)
    before = {n: p.detach().clone() for n, p in run.policy.model.named_parameters()}
    with pytest.raises(UpdateRefused, match=r"no episode of step 1 has a text.*context_key='hint'"):
        run.train()
    assert all(torch.equal(p, before[n]) for n, p in run.policy.model.named_parameters())
    assert not run.buffer.marks
    run.buffer.metadata = {TEACHER_CONTEXT: "t3 t4 t5"}
    rows = run.train()
    gaps = [row["train/teacher_kl"] for row in rows]
    assert len(gaps) == 2
    assert abs(gaps[0]) > 1e-3


@pytest.mark.medium
def test_a_context_that_is_too_long_drops_its_group(
    setup: MakeRun, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """As overlong, before anything is scored."""
    folder = with_tokens(tmp_path / "model", tiny_folder())
    teacher = {"context_key": "hint", "max_context_tokens": 3}
    run = setup(
        model={"path": folder},
        trainer=FAST | DISTILL | {"num_steps": 1, "groups_per_step": 2, "teacher": teacher},
    )
    run.buffer.metadata = {TEACHER_CONTEXT: "t3 t4 t5 t6"}
    with pytest.raises(UpdateRefused, match="overlong"):
        run.train()
    assert ("drop", "overlong") in run.events


def test_a_teacher_with_other_tokens_is_refused(
    make_policy: MakePolicy, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """By its tokenizer where there is one, else by its size; before any rank loads it."""
    policy = with_tokens(tmp_path / "policy", tiny_folder())
    other = with_tokens(tmp_path / "other", tiny_folder(), first="zero")
    small, padded = tmp_path / "small", tmp_path / "padded"
    make_family("qwen3", small, is_tied=True, vocab_size=300)
    make_family("qwen3", tmp_path / "larger", is_tied=True, vocab_size=448)
    with_tokens(padded, tmp_path / "larger")

    def config_of(folder: Path) -> Any:
        return read_teacher_config(
            Settings(
                model={"path": policy},
                trainer={"recipe": "distill", "teacher": {"path": folder}},
            ),
            make_policy().config,
        )

    with pytest.raises(SettingsError, match=r"token 't0' is None there and 0 here"):
        config_of(other)
    with pytest.raises(SettingsError, match="vocab_size=300.*has 400"):
        config_of(small)
    assert config_of(padded).vocab_size == 448


@pytest.mark.medium
def test_an_id_that_the_teacher_lacks_refuses_the_step(
    make_samples: MakeSamples, tmp_path: Path
) -> None:
    """A policy may sample an id of its padding; a smaller teacher has no row for it."""
    make_family("qwen3", tmp_path / "small", is_tied=True, vocab_size=390)
    model = model_of(tmp_path / "small")
    (sample,) = make_samples(1)
    sample.token_ids[-1] = 395
    with pytest.raises(UpdateRefused, match="id 395, the teacher has vocab_size=390"):
        teacher_columns(
            model,
            TrainBatch.of([sample]),
            {},
            top_k=0,
            vocab_size=400,
            max_tokens=64,
            on_microbatch=lambda: None,
        )


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"trainer": DISTILL}, "without a teacher trains nothing"),
        ({"trainer": {"advantage": "none"}}, "without trainer.teacher trains nothing"),
        ({"trainer": DISTILL | {"teacher": {}}}, "would be its own teacher"),
        ({"trainer": DISTILL | {"teacher": {"path": "m"}}}, "is model.path"),
        (
            {"trainer": DISTILL | {"teacher": {"path": "t", "urls": ["http://a:1"]}}},
            "one teacher is allowed",
        ),
        (
            {
                "trainer": DISTILL | {"teacher": {"path": "t"}},
                "buffer": {"drop_zero_signal": True},
            },
            "drops every group",
        ),
        (
            {
                "trainer": DISTILL | {"teacher": {"urls": ["http://a:1"]}},
                "sampling": {"temperature": 0.7},
            },
            "servers score at temperature 1",
        ),
        (
            {"trainer": DISTILL | {"teacher": {"path": "t", "divergence": "forward"}}},
            "has no effect",
        ),
        ({"trainer": DISTILL | {"teacher": {"path": "t", "timeout_s": 5}}}, "has no effect"),
        ({"trainer": DISTILL | {"teacher": {"path": "t", "coefficient": 0}}}, "greater than 0"),
        ({"trainer": DISTILL | {"kl": "k1", "teacher": {"path": "t"}}}, "are not trained"),
        (
            {"trainer": DISTILL | {"teacher": {"context_key": "a", "context_template": "b"}}},
            "the place of the text",
        ),
        (
            {
                "trainer": DISTILL | {"teacher": {"context_key": "a"}},
                "model": {"path": "m", "max_context_tokens": 16384},
            },
            "together exceed",
        ),
        ({"trainer": {"mode": "sft", "teacher": {"path": "t"}}}, "has no effect"),
    ],
)
def test_a_teacher_without_effect_or_sense_is_refused(
    sections: dict[str, Any], sentence: str
) -> None:
    """Before anything is started, with what to change."""
    with pytest.raises(ValueError, match="Value error|greater than") as caught:
        Settings(**({"model": {"path": "m"}} | sections))
    assert sentence in str(caught.value)


def test_a_batch_keeps_what_the_teacher_named(make_samples: MakeSamples) -> None:
    """Rows, selections, copies for other ranks and files have the wide columns too."""
    samples = make_samples(3)
    batch = TrainBatch.of(samples)
    size = len(batch.token_ids)
    ids = np.arange(2 * size, dtype=np.int32).reshape(size, 2)
    wide = batch.with_columns(teacher_top_ids=ids, teacher_top_logprobs=ids.astype(np.float32))
    again = TrainBatch.decode(wide.encode())
    assert (again.teacher_top_ids == ids).all()
    second = slice(int(batch.starts[1]), int(batch.starts[2]))
    assert (again.select([1]).teacher_top_ids == ids[second]).all()
    with pytest.raises(ValueError, match="is due"):
        batch.with_columns(teacher_logprobs=ids.astype(np.float32))
    metrics = teacher_metrics(wide.with_columns(teacher_logprobs=batch.behavior_logprobs))
    assert metrics["train/teacher_kl"] == 0.0
