"""One process against several: the same samples, permuted and split again, give the same losses,
gradients and weights.

`make test-parity` runs the whole matrix; a few representative layouts run with every other test.
Tolerances: Adam turns the rounding of a near-zero gradient into a difference of up to its learning
rate (1e-3 here), so weights may differ where loss and gradient norm agree.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes.families import make_family
from outloop.engine.train.checkpoint.convert import to_huggingface

PROGRAM = Path(__file__).with_name("parity_ranks.py")
MAX_LOSS_GAP = 1e-5
MAX_NORM_GAP = 1e-4
MAX_LOGPROB_GAP = 1e-4
MAX_WEIGHT_GAP = 1e-4

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MODELS: dict[str, tuple[str, bool, dict[str, int]]] = {
    "qwen3": ("qwen3", False, {}),
    "llama_tied": ("llama3", True, {}),
    "qwen2_tied": ("qwen2", True, {}),
    "moe": ("qwen3_moe", False, {}),
    "glm": ("glm4_moe", False, {}),
    "odd_tied": ("qwen3", True, {"vocab_size": 401}),
}
MATRIX: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp2": (2, "qwen3", TP2),
    "tp2_sp": (2, "qwen3", SP2),
    "tp2_tied": (2, "llama_tied", TP2),
    "tp2_bias": (2, "qwen2_tied", TP2),
    "tp2_sp_odd_vocabulary": (2, "odd_tied", SP2),
    "tp2_recompute": (2, "qwen3", TP2 | RECOMPUTE),
    "pp2": (2, "qwen3", PP2),
    "pp2_tied": (2, "llama_tied", PP2),
    "dp2": (2, "qwen3", {"use_distributed_optimizer": False}),
    "dp2_distributed": (2, "qwen3", {"use_distributed_optimizer": True}),
    "dp2_overlap": (2, "qwen3", {"overlap_grad_reduce": True}),
    "dp2_overlap_tied": (2, "llama_tied", {"overlap_grad_reduce": True}),
    "ep2": (2, "moe", EP2),
    "ep2_overlap": (2, "moe", EP2 | {"overlap_grad_reduce": True}),
    "moe_dp2": (2, "moe", {}),
    "moe_tp2_sp": (2, "moe", SP2),
    "moe_pp2": (2, "moe", PP2),
    "ep2_tp2_etp1": (2, "moe", SP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "glm_pp2": (2, "glm", PP2),
    "glm_ep2_tp2_etp1": (2, "glm", SP2 | EP2 | {"expert_tensor_parallel_size": 1}),
    "tp2_pp2": (4, "qwen3", TP2 | PP2),
    "tp2_sp_pp2": (4, "qwen3", SP2 | PP2),
    "tp2_sp_pp2_tied": (4, "odd_tied", SP2 | PP2),
    "tp2_sp_dp2_overlap": (4, "odd_tied", SP2 | {"overlap_grad_reduce": True}),
    "pp2_dp2": (4, "llama_tied", PP2),
    "dp4": (4, "qwen3", {}),
    "ep4": (4, "moe", {"expert_model_parallel_size": 4}),
    "ep2_pp2": (4, "moe", EP2 | PP2),
    "ep2_tp2_etp2": (4, "moe", SP2 | EP2),
    "ep2_tp2_etp1_dp2": (4, "moe", SP2 | EP2 | {"expert_tensor_parallel_size": 1}),
}
RE_SPLIT: dict[str, Any] = {"order_seed": 5, "settings": {"max_microbatch_tokens": 96}}
"""Ranks get the samples in another order and in other microbatches than the one process does."""
IN_CI = ("tp2_sp_odd_vocabulary", "pp2_tied", "dp2_overlap_tied", "ep2_tp2_etp1")

Job = Callable[[int, list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of the matrix."""
    folder = tmp_path_factory.mktemp("parity")
    for name, (kind, is_tied, sizes) in MODELS.items():
        make_family(kind, folder / "models" / name, is_tied=is_tied, **sizes)
    return folder


@pytest.fixture(scope="module")
def job(work: Path) -> Job:
    """Run cases over a number of ranks, all in one start."""

    def run(num_ranks: int, cases: list[dict[str, Any]]) -> None:
        if not cases:
            return
        (work / "cases.json").write_text(json.dumps(cases))
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        answer = subprocess.run(
            [sys.executable, *(start if num_ranks > 1 else []), str(PROGRAM), str(work)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert answer.returncode == 0, answer.stderr[-4000:]

    return run


def run_layouts(names: Iterable[str], work: Path, job: Job) -> None:
    """The layouts of `names` and, on one process, what they are compared with."""
    chosen = {name: MATRIX[name] for name in names}
    models = sorted({model for _, model, _ in chosen.values()})
    path = {model: str(work / "models" / model) for model in models}
    job(1, [{"name": f"alone_{model}", "model": path[model]} for model in models])
    for num_ranks in (2, 4):
        job(
            num_ranks,
            [
                {"name": name, "model": path[model], "megatron": raw} | RE_SPLIT
                for name, (ranks, model, raw) in chosen.items()
                if ranks == num_ranks
            ],
        )


def assert_parity(name: str, work: Path) -> None:
    """Every measure of every update, the last logprobs, and every weight."""
    alone = f"alone_{MATRIX[name][1]}"
    want, got = (json.loads((work / f"{case}.json").read_text()) for case in (alone, name))
    assert got["is_bit_equal"], name
    assert len(want["updates"]) == len(got["updates"]) == 3
    for before, after in zip(want["updates"], got["updates"], strict=True):
        assert abs(before["train/loss"] - after["train/loss"]) <= MAX_LOSS_GAP, name
        assert abs(before["train/grad_norm"] - after["train/grad_norm"]) <= MAX_NORM_GAP, name
        for metric in before.keys() - {"train/padding_share", "train/imbalance"}:
            assert after[metric] == pytest.approx(before[metric], rel=1e-3, abs=1e-4), metric
    gaps = [abs(a - b) for a, b in zip(want["scores"], got["scores"], strict=True)]
    assert max(gaps) <= MAX_LOGPROB_GAP, name
    assert_weights_agree(alone, name, work)


def assert_weights_agree(alone: str, name: str, work: Path) -> None:
    """Every tensor, within what Adam makes of rounding."""
    weights = [load_file(work / f"{case}.safetensors") for case in (alone, name)]
    assert weights[0].keys() == weights[1].keys()
    for tensor, values in weights[0].items():
        assert (values - weights[1][tensor]).abs().max() <= MAX_WEIGHT_GAP, f"{name}: {tensor}"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_representative_layouts_agree_with_one_process(work: Path, job: Job) -> None:
    """TP with SP, PP, DP with the distributed optimizer and overlap, EP with expert TP."""
    run_layouts(IN_CI, work, job)
    for name in IN_CI:
        assert_parity(name, work)


RESHARDINGS = (
    ("tp2_sp", "dp2_distributed"),
    ("dp2_overlap", "pp2"),
    ("pp2", "tp2"),
    ("ep2", "moe_tp2_sp"),
    ("moe_pp2", "ep2_tp2_etp1"),
    ("ep2_tp2_etp1", "moe_dp2"),
    ("glm_pp2", "glm_ep2_tp2_etp1"),
)
"""From one layout of two ranks to another, the distributed optimizer to the plain one and back."""


def reshard(pairs: Iterable[tuple[str, str]], work: Path, job: Job, *, num_ranks: int = 2) -> None:
    """Two updates in the first layout, a checkpoint, and the third update in the second."""
    cases = []
    models = set()
    for before, after in pairs:
        _, model, raw = MATRIX[before]
        models.add(model)
        path, folder = str(work / "models" / model), str(work / f"{before}_to_{after}_checkpoint")
        cases += [
            {
                "name": f"{before}_before_{after}",
                "model": path,
                "megatron": raw,
                "num_updates": 2,
                "save": folder,
            },
            {
                "name": f"{before}_to_{after}",
                "model": path,
                "megatron": MATRIX[after][2],
                "num_updates": 1,
                "load": folder,
            },
        ]
    job(1, [{"name": f"alone_{m}", "model": str(work / "models" / m)} for m in sorted(models)])
    job(num_ranks, cases)


def assert_resumed(before: str, after: str, work: Path) -> None:
    """The third update and the weights after it are those of three updates on one process.

    The checkpoint of two ranks is converted too: bit-equal to what the ranks exported.
    """
    saved = work / f"{before}_to_{after}_checkpoint/step_2"
    to_huggingface(saved, work / f"{before}_{after}_hf", config=work / "models" / MATRIX[before][1])
    converted = load_file(work / f"{before}_{after}_hf/model.safetensors")
    exported = load_file(work / f"{before}_before_{after}.safetensors")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[tensor], exported[tensor]) for tensor in exported)
    name, alone = f"{before}_to_{after}", f"alone_{MATRIX[before][1]}"
    want, got = (json.loads((work / f"{case}.json").read_text()) for case in (alone, name))
    for metric in ("train/loss", "train/grad_norm"):
        gap = abs(want["updates"][2][metric] - got["updates"][0][metric])
        assert gap <= MAX_NORM_GAP, (name, metric)
    assert_weights_agree(alone, name, work)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_checkpoint_loads_in_another_layout(work: Path, job: Job) -> None:
    """Tensor-parallel ranks write, data-parallel ranks with the distributed optimizer go on; and
    these write, each as much as the other, for pipeline stages."""
    reshard(RESHARDINGS[:2], work, job)
    for pair in RESHARDINGS[:2]:
        assert_resumed(*pair, work)
    written = work / "{}_to_{}_checkpoint/step_2/shards".format(*RESHARDINGS[1])
    sizes = [path.stat().st_size for path in written.glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.45 * sum(sizes)


OF_FOUR_RANKS = (
    ("tp2_sp_dp2_overlap", "pp2_dp2"),
    ("pp2_dp2", "tp2_sp_dp2_overlap"),
    ("ep2_tp2_etp1_dp2", "ep2_pp2"),
)
"""Parts of split, of tied and of expert weights, on two data-parallel ranks each."""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_parts_of_four_ranks_load_in_another_layout(work: Path, job: Job) -> None:
    """Each rank writes its own; the next layout goes on as one process does."""
    reshard(OF_FOUR_RANKS, work, job, num_ranks=4)
    for pair in OF_FOUR_RANKS:
        assert_resumed(*pair, work)


@pytest.fixture(scope="module")
def whole_matrix(work: Path, job: Job) -> Path:
    """Every layout, run."""
    run_layouts(MATRIX, work, job)
    return work


@pytest.mark.parity
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", sorted(MATRIX))
def test_every_layout_agrees_with_one_process(name: str, whole_matrix: Path) -> None:
    """Loss, gradient norm, metrics, logprobs and weights after three updates."""
    assert_parity(name, whole_matrix)


@pytest.fixture(scope="module")
def reshardings(work: Path, job: Job) -> Path:
    """Every pair of layouts, run."""
    reshard(RESHARDINGS, work, job)
    return work


@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), RESHARDINGS)
def test_every_checkpoint_loads_in_another_layout(
    before: str, after: str, reshardings: Path
) -> None:
    """Save in one, load in the other, one more step: equal."""
    assert_resumed(before, after, reshardings)


IN_BFLOAT16 = ("dp2", "dp2_distributed", "tp2_sp", "pp2_tied", "ep2")
MAX_BFLOAT16_LOSS_GAP = 0.01
MAX_BFLOAT16_NORM_GAP = 0.03
MAX_BFLOAT16_LOGPROB_GAP = 0.05
"""Of one process's; ranks round partial sums to bfloat16 that one process does not have."""


@pytest.fixture(scope="module")
def in_bfloat16(work: Path, job: Job) -> Path:
    """Layouts of two ranks and one process, with bfloat16 weights."""
    settings = {"dtype": "bfloat16", "learning_rate": 1e-5}
    models = sorted({MATRIX[name][1] for name in IN_BFLOAT16})
    path = {model: str(work / "models" / model) for model in models}
    alone = [
        {"name": f"bfloat16_{model}", "model": path[model], "settings": settings}
        for model in models
    ]
    split = {"order_seed": 5, "settings": settings | {"max_microbatch_tokens": 96}}
    job(1, alone)
    job(
        2,
        [
            {
                "name": f"bfloat16_{name}",
                "model": path[MATRIX[name][1]],
                "megatron": MATRIX[name][2],
            }
            | split
            for name in IN_BFLOAT16
        ],
    )
    return work


@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_layouts_in_bfloat16_agree_with_one_process(name: str, in_bfloat16: Path) -> None:
    """Plain and distributed optimizers, every kind of split; to bfloat16's rounding."""
    want, got = (
        json.loads((in_bfloat16 / f"bfloat16_{case}.json").read_text())
        for case in (MATRIX[name][1], name)
    )
    assert got["is_bit_equal"]
    for before, after in zip(want["updates"], got["updates"], strict=True):
        loss_gap = abs(before["train/loss"] - after["train/loss"])
        assert loss_gap <= MAX_BFLOAT16_LOSS_GAP
        assert after["train/grad_norm"] == pytest.approx(
            before["train/grad_norm"], rel=MAX_BFLOAT16_NORM_GAP
        )
    gaps = [abs(a - b) for a, b in zip(want["scores"], got["scores"], strict=True)]
    assert max(gaps) <= MAX_BFLOAT16_LOGPROB_GAP


WITH_A_CRITIC = {
    "tp2_sp": "tp2_sp_odd_vocabulary",
    "pp2_tied": "pp2_tied",
    "dp2": "dp2_distributed",
}
"""Sequence-parallel columns, stages of which only the last has a head, a distributed optimizer."""


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_critic_is_the_same_in_every_layout(kind: str, work: Path, job: Job) -> None:
    """Values, advantages, loss, gradient norm of three updates, the policy's too where the critic
    is a head on it; one that tensor-parallel ranks wrote goes on in data-parallel ranks."""

    def case(name: str, layout: str, **more: Any) -> dict[str, Any]:
        _, model, raw = MATRIX[layout]
        megatron = {} if name.startswith(f"{kind}_alone") else raw
        path = str(work / "models" / model)
        return {"name": name, "model": path, "megatron": megatron, "critic": kind} | more

    job(1, [case(f"{kind}_alone_{name}", at) for name, at in WITH_A_CRITIC.items()])
    saved = {"num_updates": 2, "save": str(work / f"{kind}_checkpoint")}
    resumed = {"num_updates": 1, "load": str(work / f"{kind}_checkpoint")}
    job(
        2,
        [
            *(case(f"{kind}_{name}", at, **RE_SPLIT) for name, at in WITH_A_CRITIC.items()),
            case(f"{kind}_saved", "tp2_sp", **saved),
            case(f"{kind}_resumed", "dp2_distributed", **resumed),
        ],
    )

    def updates(name: str) -> list[dict[str, float]]:
        found: list[dict[str, float]] = json.loads((work / f"{name}.json").read_text())["updates"]
        return found

    pairs = [(updates(f"{kind}_alone_{n}"), updates(f"{kind}_{n}")) for n in WITH_A_CRITIC]
    pairs.append((updates(f"{kind}_alone_dp2")[2:], updates(f"{kind}_resumed")))
    for want, got in pairs:
        assert len(want) == len(got) > 0
        for before, after in zip(want, got, strict=True):
            assert before["train/critic_grad_norm"] > 0.01
            for metric in before.keys() - {"train/padding_share", "train/imbalance"}:
                assert after[metric] == pytest.approx(before[metric], rel=2e-3, abs=2e-4), metric


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_muon_is_the_same_where_matrices_are_whole(work: Path, job: Job) -> None:
    """Pipeline stages and data-parallel ranks follow one process for three updates, and what stages
    wrote goes on in data-parallel ranks; tensor-parallel ones are refused (test_muon)."""
    settings = {"optimizer": "muon"}
    split = {"settings": settings | RE_SPLIT["settings"], "order_seed": RE_SPLIT["order_seed"]}

    def case(name: str, megatron: dict[str, Any], **more: Any) -> dict[str, Any]:
        path = str(work / "models" / "qwen3")
        return {"name": name, "model": path, "megatron": megatron, "settings": settings} | more

    job(1, [case("muon_alone", {})])
    place = str(work / "muon_checkpoint")
    job(
        2,
        [
            case("muon_pp2", PP2, **split),
            case("muon_dp2", {}, **split),
            case("muon_saved", PP2, num_updates=2, save=place),
            case("muon_resumed", {}, num_updates=1, load=place),
        ],
    )

    def updates(name: str) -> list[dict[str, float]]:
        found: list[dict[str, float]] = json.loads((work / f"{name}.json").read_text())["updates"]
        return found

    whole = updates("muon_alone")
    for want, name in ((whole, "muon_pp2"), (whole, "muon_dp2"), (whole[2:], "muon_resumed")):
        assert len(want) == len(updates(name)) > 0
        for before, after in zip(want, updates(name), strict=True):
            # An update is made orthogonal in bfloat16, so that rounding grows from step to step.
            assert after["train/loss"] == pytest.approx(before["train/loss"], abs=2e-3), name
            assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=1e-2)
