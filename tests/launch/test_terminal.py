"""What people type and see first: init, settings, completion, the curve and the time left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import load_settings, trace_settings
from outloop.engine.launch.console import sparkline, time_left
from outloop.engine.models.random_init import Sizes, write_policy
from outloop.project.write import write_project


def outloop(*arguments: str, cwd: Path, text: str = "", **environment: str) -> str:
    """What the command prints; it must end well."""
    answer = subprocess.run(
        [sys.executable, "-m", "outloop.cli", *arguments],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


BASE = '[model]\npath = "policy"\n[trainer]\nnum_steps = 5\nlearning_rate = 0.1\n'


def test_files_extend_others(tmp_path: Path) -> None:
    """A file changes what it extends, relative to its own folder; later bases win over earlier."""
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "fast.toml").write_text("[trainer]\nnum_steps = 2\n")
    (tmp_path / "inner").mkdir()
    run = tmp_path / "inner/run.toml"
    run.write_text('extends = ["../base.toml", "../fast.toml"]\n[run]\nname = "mine"\n')
    settings = load_settings(run, ("trainer.groups_per_step=3",))
    assert (settings.run.name, settings.trainer.num_steps) == ("mine", 2)
    assert (settings.trainer.learning_rate, settings.trainer.groups_per_step) == (0.1, 3)
    assert settings.env.import_dir == tmp_path / "inner"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('extends = "run.toml"', "in a circle: .*run.toml -> .*run.toml"),
        ('extends = "gone.toml"', r"gone.toml' does not exist; .*run.toml' extends it"),
        ("extends = 3", "extends=3 is no path"),
    ],
)
def test_a_wrong_extends_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """The files are named."""
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SettingsError, match=sentence):
        load_settings(tmp_path / "run.toml")


@pytest.mark.medium
def test_each_setting_says_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, base file, environment, flag, recipe, default: the value is the one in force."""
    (tmp_path / "base.toml").write_text(BASE)
    run = tmp_path / "run.toml"
    run.write_text('extends = "base.toml"\n[trainer]\nnum_steps = 7\nrecipe = "dapo"\n')
    monkeypatch.setenv("OUTLOOP_RUN__SEED", "4")
    settings, found = trace_settings(run, ("buffer.group_size=6",))
    assert found["trainer.num_steps"] == (7, str(run))
    assert found["trainer.learning_rate"] == (0.1, str(tmp_path / "base.toml"))
    assert found["run.seed"] == (4, "environment")
    assert found["buffer.group_size"] == (6, "--set buffer.group_size=6")
    assert found["trainer.clip_high"] == (0.28, "recipe dapo")
    assert found["trainer.adam_beta1"][1] == "default"
    assert found["env.import_dir"][1] == "folder of the file"
    assert settings.trainer.clip_high == 0.28
    shown = json.loads(outloop("settings", "run.toml", "--json", cwd=tmp_path))
    assert shown["trainer.num_steps"] == [7, "run.toml"]
    text = outloop("settings", "run.toml", cwd=tmp_path)
    assert "trainer.num_steps" in text
    assert "adam_beta1" not in text


@pytest.mark.medium
def test_shells_complete_commands_and_settings(tmp_path: Path) -> None:
    """The script is the shell's, and what it calls knows commands, sections and settings."""
    for shell in ("bash", "zsh", "fish"):
        assert "_OUTLOOP_COMPLETE" in outloop("completion", shell, cwd=tmp_path)

    def complete(*words: str) -> set[str]:
        answer = outloop(
            cwd=tmp_path,
            _OUTLOOP_COMPLETE="bash_complete",
            COMP_WORDS=" ".join(("outloop", *words)),
            COMP_CWORD=str(len(words)),
        )
        return {line.partition(",")[2] for line in answer.splitlines()}

    assert complete("tr") == {"train", "train-recorded", "trainer", "trajectories", "tracker"}
    assert complete("train", "run.toml", "--set", "tra") == {"trainer.", "trajectories."}
    assert "trainer.num_steps=" in complete("train", "run.toml", "--set", "trainer.num_")


@pytest.mark.medium
def test_init_writes_a_folder_whose_settings_hold(tmp_path: Path) -> None:
    """Three answers on standard input; a folder that is there is left alone."""
    shown = outloop("init", cwd=tmp_path, text="first\nprogram\nrandom\n")
    assert "outloop train run.toml" in shown
    folder = tmp_path / "first"
    settings = load_settings(folder / "run.toml")
    assert settings.env.agent_command == "python agent.py --task {task_file}"
    assert (folder / "policy/model.safetensors").is_file()
    again = subprocess.run(
        [sys.executable, "-m", "outloop.cli", "init", "--dir", "first"],
        cwd=tmp_path, input="function\nrandom\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize(
    ("policy", "dtype", "learning_rate", "lengths"),
    [
        ("Qwen/Qwen3-0.6B", "bfloat16", 1e-6, (4096, 2048)),
        ("Qwen/Qwen3-8B", "bfloat16", 1e-6, (8192, 4096)),
        ("tiny", "float32", 1e-3, (64, 32)),
    ],
)
def test_init_goes_by_the_models_size(
    tmp_path: Path, policy: str, dtype: str, learning_rate: float, lengths: tuple[int, int]
) -> None:
    """Dtype of trainer and servers, learning rate, and lengths that the model knows."""
    if policy == "tiny":
        sizes = Sizes(max_context_tokens=64)
        write_policy(tmp_path / policy, 0, (), sizes)
        policy = str(tmp_path / policy)
    write_project(tmp_path / "mine", agent="function", policy=policy)
    settings = load_settings(tmp_path / "mine" / "run.toml")
    assert (settings.trainer.dtype, settings.server.dtype) == (dtype, dtype)
    assert settings.trainer.learning_rate == learning_rate
    assert (settings.model.max_context_tokens, settings.sampling.max_new_tokens) == lengths


def test_init_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    """A sentence, and nothing is written."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"config\.json cannot be read"):
        write_project(tmp_path / "mine", agent="function", policy=str(tmp_path / "empty"))
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize("agent", ["function", "program"])
def test_what_init_wrote_trains(tmp_path: Path, agent: str) -> None:
    """As it stands, for two steps."""
    outloop("init", "--dir", "mine", "--agent", agent, "--policy", "random", cwd=tmp_path)
    shown = outloop(
        *("train", "run.toml", "--set", "trainer.num_steps=2", "--set", "eval.every=0"),
        cwd=tmp_path / "mine",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert "step 2:" in shown
    assert (tmp_path / "mine/runs/mine/hf/model.safetensors").is_file()


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    """Lowest to highest; of many values means of neighbours."""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(number) for number in range(1000)])) <= 60


def test_the_time_left_follows_the_last_steps() -> None:
    """The median of ten, for the steps that are missing; nothing at the end."""
    rows = [{"step": step, "train/step_s": 100.0 if step == 1 else 2.0} for step in range(1, 12)]
    assert time_left(rows, 21) == "about 20 s left"
    assert time_left(rows, 11 + 1800) == "about 60 min left"
    assert time_left(rows, 11 + 18000) == "about 10.0 h left"
    assert time_left(rows, 11) == ""
    assert time_left([], 5) == ""
