"""`outloop check`: what settings take, by hand, and what does not fit with a remedy that does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings, load_settings, with_overrides
from outloop.cli import cli
from outloop.engine.launch.known_models import KNOWN_CONFIGS
from outloop.engine.launch.plan.fit import Fit, Gpus, fit
from outloop.engine.launch.plan.memory import ModelShape
from outloop.engine.train.megatron.parallel_config import read_sizes

GIB = 2**30
EXAMPLES = Path(__file__).resolve().parents[3] / "examples/gpu"
SIZES = {
    "Qwen/Qwen3-0.6B": (0.6, 0.05),
    "Qwen/Qwen3-8B": (8.2, 0.05),
    "Qwen/Qwen3-30B-A3B": (30.5, 0.05),
    "zai-org/GLM-4.5-Air": (106.0, 1.0),
    "zai-org/GLM-4.5": (355.0, 3.0),
}
"""Billions of parameters that the models' pages state, and by how much the formula may differ:
GLM-4.5's last layer, which predicts further tokens, is not counted."""

EXPERTS = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "sequence_parallel": True,
}

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def settings_of(**sections: dict[str, Any]) -> Settings:
    """Of a run on GPUs, with changes by section."""
    tree: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-8B", "max_context_tokens": 8192},
        "server": {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"},
        "trainer": {"device": "cuda", "dtype": "bfloat16"},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return build_settings(tree, source="test")


def fit_of(settings: Settings, **gpus: float) -> Fit:
    """Of the model that the settings name."""
    name = str(settings.model.path)
    return fit(settings, KNOWN_CONFIGS[name], Gpus(**gpus), source=name)


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_known_sizes_give_the_parameters_of_their_pages(name: str) -> None:
    """To the decimal that is stated, or a hundredth."""
    shape = ModelShape.of_config(KNOWN_CONFIGS[name], source=name)
    stated, gap = SIZES[name]
    assert shape.num_params / 1e9 == pytest.approx(stated, abs=gap)


def test_an_8b_policy_by_hand() -> None:
    """On four ranks, tensor-parallel by two, beside a server of one GPU; 8,190,735,360 weights, of
    which 36 x 4 norms and one more are shared by no tensor-parallel rank but too few to show."""
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    found = fit_of(settings_of(trainer={"num_ranks": 4, "megatron": split}))
    weights = 8.1907e9
    assert found.num_gpus == 5
    assert found.rank.weights == pytest.approx(2 * weights / 2, rel=1e-3)
    assert found.rank.gradients == pytest.approx(4 * weights / 2, rel=1e-3)
    assert found.rank.optimizer == pytest.approx(12 * weights / 2 / 2, rel=1e-3)
    # Two bytes of four widths of 4096, queries and outputs of 4096, keys and values of 1024, three
    # of 12288; 36 layers, 16384 tokens, two ranks.
    a_token = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    assert found.rank.activations == a_token * 36 * 16384 / 2
    assert found.server is not None
    left = 0.85 * 80 * GIB - 2 * weights
    # Keys and values, eight heads of 128, two bytes, 36 layers.
    assert found.server.cache_tokens == pytest.approx(left / (2 * 8 * 128 * 2 * 36), rel=1e-3)
    # 32 groups of 8 full contexts; six operations a weight and token.
    work = 6 * weights * 32 * 8 * 8192
    reduce_s = 2 * 0.5 * 4 * weights / 2 / 25e9
    assert found.update_s == pytest.approx(work / (4 * 989e12 * 0.3) + reduce_s, rel=1e-3)
    assert found.publish_s == pytest.approx(2 * weights / 25e9, rel=1e-3)
    assert found.step_s >= max(found.generate_s, found.update_s + found.publish_s)


def test_optimizer_state_of_experts_is_shared_by_fewer_ranks() -> None:
    """Eight ranks with an eighth of the experts each have nobody to share its state with."""
    model = {"path": "Qwen/Qwen3-30B-A3B"}
    split = {"expert_model_parallel_size": 8}
    found = fit_of(settings_of(model=model, trainer={"num_ranks": 8, "megatron": split}))
    experts = 48 * 128 * 3 * 2048 * 768 / 8
    dense = found.rank.weights / 2 - experts
    assert found.rank.optimizer == pytest.approx(12 * (experts + dense / 8))


def test_a_mixture_with_dense_layers_and_shared_experts_by_hand() -> None:
    """GLM-4.5-Air, whose 106 billion parameters are 12 for a token: 8 of 128 experts and the shared
    one in 45 layers, behind a dense one. Sixteen ranks, tensor-parallel by 4, with an eighth of the
    experts each, whole ones."""
    split = {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    }
    model = {"path": "zai-org/GLM-4.5-Air"}
    server = {"tensor_parallel_size": 8}
    trainer = {"num_ranks": 16, "megatron": split}
    found = fit_of(settings_of(model=model, server=server, trainer=trainer))
    expert = 3 * 4096 * 1408
    # Queries and outputs of 96 heads, keys and values of 8, their biases, two norms.
    attention = 2 * 4096 * 12288 + 2 * 4096 * 1024 + 12288 + 2 * 1024 + 2 * 4096
    layer = attention + expert + (4096 + 1) * 128
    dense = (45 * layer + attention + 3 * 4096 * 10944 + 2 * 151552 * 4096) / 4
    experts = 45 * 128 / 8 * expert
    assert found.rank.weights == pytest.approx(2 * (dense + experts))
    # Four data-parallel ranks share what is dense, two hold the same experts.
    assert found.rank.optimizer == pytest.approx(12 * (dense / 4 + experts / 2))
    assert found.shape.num_active_params / 1e9 == pytest.approx(12, abs=1.5)


def test_what_is_beside_the_policy_counts() -> None:
    """A reference is its weights once more, a critic all of it; on shared GPUs servers release all
    but two GiB for a step and keep their weights for a checkpoint, and a step does one thing after
    the other."""
    plain = fit_of(settings_of())
    assert fit_of(settings_of(trainer={"kl": "k3"})).rank_total == (
        plain.rank_total + plain.rank.weights
    )
    critic = fit_of(settings_of(trainer={"recipe": "ppo"}))
    assert critic.rank_total == 2 * plain.rank_total - plain.rank.loss
    share = {"sglang": {"mem_fraction_static": 0.5}}
    shared = fit_of(settings_of(server=share, trainer={"is_colocated": True}))
    assert (shared.num_gpus, plain.num_gpus) == (1, 2)
    assert plain.rank_limit - shared.rank_limit == 2 * GIB
    assert shared.server is not None
    state = shared.rank.weights + shared.rank.gradients + shared.rank.optimizer
    assert (plain.checkpoint, shared.checkpoint) == (0.0, state + shared.server.weights)
    parts = shared.generate_s + shared.update_s + shared.publish_s
    assert shared.step_s == pytest.approx(parts)


@pytest.mark.parametrize(
    ("sections", "gpus", "words"),
    [
        ({"trainer": {"num_ranks": 1}}, {}, ["a trainer rank does not fit", "may take 72.0 GiB"]),
        (
            {"trainer": {"num_ranks": 4, "dtype": "float32"}},
            {"memory_gib": 100.0},
            ["a trainer rank does not fit"],
        ),
        (
            {"trainer": {"num_ranks": 8}, "server": {"tensor_parallel_size": 1}},
            {"memory_gib": 16.0},
            ["a server does not fit", "15.3 GiB of weights"],
        ),
        (
            {
                "model": {"path": "Qwen/Qwen3-30B-A3B"},
                "server": {"tensor_parallel_size": 2},
                "trainer": {"num_ranks": 8, "megatron": EXPERTS},
            },
            {"memory_gib": 60.0},
            ["a trainer rank does not fit", "may take 54.0 GiB"],
        ),
        (
            {
                "model": {"path": "Qwen/Qwen3-30B-A3B"},
                "server": {"tensor_parallel_size": 2},
                "trainer": {"num_ranks": 8, "is_colocated": True, "megatron": EXPERTS | RECOMPUTE},
            },
            {"memory_gib": 100.0},
            ["a checkpoint does not fit on shared GPUs", "beside 28.4 GiB of the server's weights"],
        ),
        (
            {
                "model": {"path": "Qwen/Qwen3-0.6B"},
                "server": {"sglang": {"mem_fraction_static": 0.99}},
                "trainer": {"is_colocated": True},
            },
            {},
            ["leaves no 2.0 GiB", "mem_fraction_static = 0.97"],
        ),
    ],
)
def test_what_does_not_fit_has_a_remedy_that_does(
    sections: dict[str, Any], gpus: dict[str, float], words: list[str]
) -> None:
    """The sentence has the number; each setting that it proposes is enough for its part."""
    settings = settings_of(**sections)
    found = fit_of(settings, **gpus)
    sentence = found.refusals[0]
    assert [word for word in words if word not in sentence] == []
    _, _, proposed = sentence.rpartition("; ")
    for remedy in proposed.split(", or "):
        pairs = re.findall(r'((?:trainer|server)\.[\w.]+) (?:=|to) ("?[\w.]+"?)', remedy)
        assert pairs, remedy
        words_of = tuple(f"{name}={value}" for name, value in pairs)
        other = with_overrides(settings, words_of)
        trainer = other.trainer
        read_sizes(trainer.megatron, num_ranks=trainer.num_ranks, layers="transformer_engine")
        changed = fit_of(other, **gpus)
        assert sentence.partition(":")[0] not in " ".join(changed.refusals), remedy


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that they name, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = next(line for line in path.read_text().splitlines() if "outloop check" in line)
    arguments = command.removeprefix("#").split()[1:]
    arguments[1] = str(path)
    answer = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert "it fits" in answer.output
    settings = load_settings(path)
    assert f"{fit_of(settings).rank.total / GIB:.1f} GiB" in answer.output


BY_HAND = {
    "qwen3-0.6b-colocated": (596_049_920, 0, 1, 1, 1),
    "qwen3-8b-colocated": (8_190_735_360, 0, 2, 1, 4),
    "qwen3-8b-disaggregated": (8_190_735_360, 0, 2, 1, 2),
    "qwen3-30b-a3b-one-node": (1_541_093_376, 48 * 128 * 3 * 2048 * 768, 2, 4, 4),
    "qwen3-30b-a3b-two-nodes": (1_541_093_376, 48 * 128 * 3 * 2048 * 768, 2, 4, 4),
}
"""Weights beside the experts, weights of these, ranks that share a layer, that share the experts,
and that hold the same weights."""


def test_the_page_of_the_examples_has_what_the_formulas_give() -> None:
    """2, 4 and 12 bytes a weight, by docs/scaling.md: the last divided by those who hold the same,
    which for an expert are fewer."""
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = {row[0]: row for row in rows if len(row) > 10 and row[0] in BY_HAND}
    assert table.keys() == {path.stem for path in EXAMPLES.glob("*.toml")}
    for name, (dense, experts, tensor, expert, data) in BY_HAND.items():
        held = dense / tensor, experts / expert / tensor
        optimizer = 12 * (held[0] / data + held[1] / (data / expert))
        sizes = 2 * sum(held), 4 * sum(held), optimizer
        stated = [float(cell.split()[0]) for cell in table[name][1:4]]
        assert stated == pytest.approx([size / GIB for size in sizes], abs=0.06), name


def test_a_node_of_80_gb_cannot_train_experts_beside_servers() -> None:
    """The command refuses with the number, after its tables."""
    path = EXAMPLES / "qwen3-30b-a3b-one-node.toml"
    with pytest.raises(
        SettingsError, match=r"a checkpoint does not fit .* 67\.\d GiB of a trainer"
    ):
        CliRunner().invoke(cli, ["check", str(path)], catch_exceptions=False)


def test_check_reads_a_folder(tmp_path: Path) -> None:
    """Its config.json alone; one of other layers, or without sizes, is a sentence."""
    config = dict(KNOWN_CONFIGS["Qwen/Qwen3-0.6B"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"\n')
    command = ["check", str(tmp_path / "run.toml")]
    answer = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert "0.60 billion" in answer.output
    for other in ({"n_routed_experts": 128}, {"kv_lora_rank": 512}, {"num_local_experts": 8}):
        (tmp_path / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(SettingsError, match=f"{next(iter(other))}=.* are not counted"):
            CliRunner().invoke(cli, command, catch_exceptions=False)
    wrong = [*command, "--set", "trainer.megatron.tensor_model_parallel_size=3"]
    with pytest.raises(SettingsError, match="tensor_model_parallel_size=3"):
        CliRunner().invoke(cli, wrong, catch_exceptions=False)
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match="has no hidden_size"):
        CliRunner().invoke(cli, command, catch_exceptions=False)
