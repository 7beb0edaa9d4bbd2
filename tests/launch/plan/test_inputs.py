"""The file of `outloop plan`: its tables and its refusals."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from outloop.buffer.errors import SettingsError
from outloop.cli import cli
from outloop.engine.launch.plan.bounds import binding
from outloop.engine.launch.plan.inputs import load_plan, plan_of
from outloop.engine.launch.plan.report import best_split

FILE = """
[loop]
group_size = 2
groups_per_step = 2
max_staleness = 1
[episodes]
seconds = 5.0
[trainer]
update_s = 1.0
publish_s = 0.0
"""


def written(folder: Path, text: str) -> Path:
    """A plan's file."""
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_a_file_says_how_fast_its_run_can_be(tmp_path: Path) -> None:
    """Episodes of 5 s, an update of 1 s, a batch in advance: 3 s a step, 1200 steps an hour."""
    path = written(tmp_path, FILE)
    assert binding(load_plan(path).loop()) == ("groups in flight", pytest.approx(1200))
    shown = CliRunner().invoke(cli, ["plan", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "1,200" in shown.output
    assert "groups in flight" in shown.output


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seconds = 5.0", "", "episodes.seconds is missing: a plan is made from measurements"),
        ("update_s = 1.0", "", "trainer.update_s is missing"),
        ("[trainer]", "[trainer]\nspeed = 1", "trainer.speed is no input of a plan"),
        ("seconds = 5.0", "seconds = [{share = 1.0, low = 2.0, high = 1.0}]", "low=2 and high=1"),
        ("[loop]", "cluster = {gpus = [8]}\n[loop]", "cluster.gpus without"),
        ("group_size = 2", "group_size = 0", "loop.group_size=0"),
        ("[loop]", '[run]\nname = "r"\n[loop]', "outloop check"),
    ],
)
def test_a_file_that_cannot_be_planned_is_refused_in_a_sentence(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    """It names the number, and what would do."""
    with pytest.raises(SettingsError) as caught:
        load_plan(written(tmp_path, FILE.replace(old, new)))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_best_split_gives_each_side_what_it_needs() -> None:
    """Work of 100 s for a server and 300 s for a trainer GPU: a quarter of the GPUs serve."""
    tree = {
        "loop": {"group_size": 1, "groups_per_step": 100, "max_staleness": 100},
        "episodes": {"seconds": 0.0, "tokens": 100.0},
        "trainer": {"gpu_tflops": 1e-12 * 6 * 10_000 / 300 * 1e6, "mfu": 1.0, "publish_s": 0.0},
        "network": {"gradient_gb_per_s": 1e12},
        "servers": {"tokens_per_s_alone": 100.0, "tokens_per_s": 100.0, "max_running": 1},
        "model": {
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 100,
        },
    }
    plan = plan_of(tree, source="test")
    assert plan.model is not None
    scale = plan.model.num_active_params / 1e6
    tree["trainer"]["gpu_tflops"] *= scale
    plan = plan_of(tree, source="test")
    assert plan.inputs.servers is not None
    count, trainer, (_, speed) = best_split(plan, plan.inputs.servers, 40, 100)
    assert (count, trainer) == (10, 30)
    assert speed == pytest.approx(3600 / 10, rel=0.01)
    with pytest.raises(SettingsError, match="at least 2 are needed"):
        best_split(plan, plan.inputs.servers, 1, 100)
