"""What is refused before anything is started, and what a run says that has nothing to do."""

import io
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from outloop.buffer.errors import SettingsError
from outloop.buffer.model_ids import read_vocabulary
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings, build_settings, with_overrides
from outloop.cli import cli
from outloop.engine.launch.settings_checks import check_before_start
from outloop.engine.launch.training import is_finished, train, unfit_rate
from outloop.engine.models.random_init import Sizes, write_policy
from outloop.router.rendering.renderer import PolicyRenderer

PLAY = "async def play(task, episode):\n    return 0.0\n"
MakeSettings = Callable[..., Settings]


@pytest.fixture
def make_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSettings:
    """Settings of a run that could start, with changes by section."""
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path / "policy", 0, (), Sizes(max_context_tokens=512))
    (tmp_path / "rollout.py").write_text(PLAY)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1"}\n')

    def make(**changes: dict[str, Any]) -> Settings:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "runs")},
            "model": {"path": "policy", "max_context_tokens": 512},
            "env": {"tasks": "tasks.jsonl", "rollout_function_path": "rollout:play"},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return build_settings(tree, source="test")

    return make


def as_toml(tree: dict[str, Any], changed: set[str]) -> str:
    """The sections that a run needs, and those that a test changes."""
    lines = []
    for section in sorted({"run", "model", "env"} | changed):
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {json.dumps(value)}"
            for key, value in tree[section].items()
            if isinstance(value, str | int | float)
        ]
    return "\n".join(lines)


@pytest.mark.medium
def test_a_run_that_could_start_passes(make_settings: MakeSettings, tmp_path: Path) -> None:
    """And its folder can be written."""
    check_before_start(make_settings())
    assert (tmp_path / "runs/run").is_dir()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": {"max_context_tokens": 1536}},
            ["model.max_context_tokens=1536", "max_position_embeddings=512", "config.json"],
        ),
        (
            {"model": {"max_context_tokens": 256}, "sampling": {"max_new_tokens": 256}},
            ["sampling.max_new_tokens=256", "model.max_context_tokens=256", "prompt"],
        ),
        (
            {"trainer": {"max_microbatch_tokens": 400}},
            ["model.max_context_tokens=512", "trainer.max_microbatch_tokens=400"],
        ),
        ({"model": {"path": "polciy"}}, ["model.path='polciy'", "does not exist", "'policy'"]),
        ({"model": {"path": "runs.toml"}}, ["model.path='runs.toml'", "does not exist"]),
        (
            {"env": {"rollout_function_path": "rollout:paly"}},
            ["has no 'paly'", "did you mean 'play'"],
        ),
    ],
)
def test_what_contradicts_the_model_is_refused(
    changes: dict[str, dict[str, Any]],
    words: list[str],
    make_settings: MakeSettings,
    tmp_path: Path,
) -> None:
    """Before a folder is made, by `train` and by `serve`."""
    with pytest.raises(SettingsError) as caught:
        check_before_start(make_settings(**changes))
    assert [word for word in words if word not in str(caught.value)] == []
    assert not (tmp_path / "runs").exists()
    path = make_settings(**changes).model_dump_json()
    (tmp_path / "run.toml").write_text(as_toml(json.loads(path), set(changes)))
    with pytest.raises(SettingsError) as served:
        CliRunner().invoke(cli, ["serve", "run.toml"], catch_exceptions=False)
    assert str(served.value) == str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_servers_whose_nccl_would_refuse_the_trainers_are_refused(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any part starts, by what each environment's torch says."""

    def python_with(release: str) -> str:
        path = tmp_path / f"python-{release}"
        told = json.dumps({"torch": "2.13.0", "cuda": "13.0", "nccl": release})
        path.write_text(f"#!/bin/sh\necho 'OUTLOOP-LIBRARIES {told}'\n")
        path.chmod(0o755)
        return str(path)

    def settings_of(python: str) -> Settings:
        server = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16", "sglang_python": python}
        return make_settings(server=server, publish={"transport": "collective"})

    monkeypatch.setattr(sys, "executable", python_with("2.29.7"))
    check_before_start(settings_of(python_with("2.29.7")))
    with pytest.raises(SettingsError, match=r"trainer has NCCL 2\.29\.7.* and .* NCCL 2\.30\.7"):
        check_before_start(settings_of(python_with("2.30.7")))


@pytest.mark.medium
def test_a_run_folder_that_cannot_be_written_is_a_sentence(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """A file in its way, or a place where nobody may write."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/runs")):
        settings = make_settings(run={"dir": str(folder)})
        words = f"run.dir='{folder}' run.name='run': the folder cannot be written"
        with pytest.raises(SettingsError, match=words):
            check_before_start(settings)
        with pytest.raises(SettingsError, match=words):
            create_run(settings, folder / "run", "")


def test_a_finished_run_says_so(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Nothing is started; more steps go on, and a run that was not finished does."""
    settings = make_settings(trainer={"num_steps": 3})
    run_dir = tmp_path / "runs/run"
    (run_dir / "checkpoints/step_3").mkdir(parents=True)
    (run_dir / "checkpoints/step_3/complete.json").write_text("{}")
    (run_dir / "hf").mkdir()
    (run_dir / "hf/config.json").write_text("{}")
    out = io.StringIO()
    console = Console(file=out, width=200)
    assert train(settings, stop=threading.Event(), console=console) == 0
    sentence = " ".join(out.getvalue().split())
    assert "has made all of its 3 steps" in sentence
    assert "raise trainer.num_steps" in sentence
    assert "another run.name" in sentence
    assert not (run_dir / "logs").exists()
    assert not is_finished(make_settings(trainer={"num_steps": 4}), run_dir)
    assert not is_finished(make_settings(trainer={"num_steps": 3, "resume": False}), run_dir)
    (run_dir / "hf/config.json").unlink()
    assert not is_finished(settings, run_dir)


@pytest.mark.parametrize(
    "words",
    [
        ("rollout", "run.toml", "--out", "/proc/out.jsonl"),
        ("convert", "policy", "/proc/out"),
        ("new-policy", "--out", "/proc/out"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    words: tuple[str, ...], make_settings: MakeSettings, tmp_path: Path
) -> None:
    """Not after minutes of work."""
    (tmp_path / "run.toml").write_text(
        as_toml(json.loads(make_settings().model_dump_json()), set())
    )
    with pytest.raises(SettingsError, match="'/proc/out.*' cannot be written"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["agent", "data"])
def test_a_folder_with_other_files_is_no_run_s_folder(
    make_settings: MakeSettings, tmp_path: Path, name: str
) -> None:
    """A run is not written over what the user has; its own folder is taken again."""
    settings = make_settings(run={"dir": str(tmp_path), "name": name})
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.py").touch()
    (tmp_path / name / ".gitignore").write_text("*.pyc\n")
    with pytest.raises(SettingsError, match="is a folder with other files"):
        check_before_start(settings)
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == [".gitignore", "mine.py"]
    again = make_settings(run={"dir": str(tmp_path), "name": "fresh"})
    check_before_start(again)
    check_before_start(again)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("env", "rollout_function_path", "{}"),
        ("env", "verifier", "{}"),
        ("env", "tasks", "{}"),
        ("env", "eval_tasks", "{}"),
        ("env", "conversations", "{}"),
        ("eval", "suites", '{{more = {{tasks = "{}"}}}}'),
        ("telemetry", "trackers", '["{}"]'),
    ],
)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowher:f", "there is no module 'nowher'.*did you mean 'nowhere'"),
        ("nowhere:f", "'nowhere' has no 'f'"),
        ("broken:f", r"importing it raised ZeroDivisionError at .*broken\.py:2"),
    ],
)
def test_every_path_to_code_of_the_user_is_imported_before_the_start(
    make_settings: MakeSettings,
    tmp_path: Path,
    section: str,
    name: str,
    value: str,
    path: str,
    sentence: str,
) -> None:
    """Each setting is refused by its name, with the file and line of what was raised."""
    (tmp_path / "nowhere.py").touch()
    (tmp_path / "broken.py").write_text("x = 1\nx / 0\n")
    env: dict[str, Any] = {"import_dir": str(tmp_path)}
    if name == "verifier":
        env |= {"rollout_function_path": None, "agent_command": "python -V"}
        env |= {"agent_sandbox": "none"}
    if name == "eval_tasks" or section == "eval":
        env |= {"eval_tasks": "tasks.jsonl"}
    settings = make_settings(
        env=env,
        eval={"every": 1} if name == "eval_tasks" else {},
        trainer={"mode": "sft"} if name == "conversations" else {},
    )
    changed = with_overrides(settings, (f"{section}.{name}={value.format(path)}",))
    with pytest.raises(SettingsError, match=sentence) as refused:
        check_before_start(changed)
    assert f"{section}.{name}" in str(refused.value)
    assert path in str(refused.value)


@pytest.mark.parametrize("where", ["a part", "the whole model"])
def test_a_tokenizer_with_ids_that_the_model_has_no_row_for_is_refused(
    make_settings: MakeSettings, tmp_path: Path, where: str
) -> None:
    """A token that was added without resizing the model: by the launcher and by a router that is
    started alone. Fewer ids than rows are no matter."""
    folder = tmp_path / "policy"
    config = json.loads((folder / "config.json").read_text())
    rows = config["vocab_size"]

    def with_rows(number: int) -> None:
        changed = config | {"vocab_size": number}
        if where == "a part":
            del changed["vocab_size"]
            changed["text_config"] = {"vocab_size": number}
        (folder / "config.json").write_text(json.dumps(changed))

    with_rows(rows + 64)
    check_before_start(make_settings())
    text = json.loads((folder / "tokenizer.json").read_text())
    new = 1 + max(read_vocabulary(folder).values())
    text["added_tokens"].append(
        text["added_tokens"][-1] | {"id": new, "content": "<|extra|>", "special": True}
    )
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with_rows(new)
    words = rf"1 tokens beyond the model's vocab_size={new} .*'<\|extra\|>' \({new}\)"
    with pytest.raises(SettingsError, match=words):
        check_before_start(make_settings())
    with pytest.raises(SettingsError, match=words):
        PolicyRenderer(make_settings().model)
    with_rows(new + 1)
    check_before_start(make_settings())
    PolicyRenderer(make_settings().model)


@pytest.mark.parametrize(
    ("rate", "words"), [(1e-6, "will hardly learn"), (1e-3, ""), (None, "will hardly learn")]
)
@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_a_rate_of_another_size_of_model_is_named(
    make_settings: MakeSettings, rate: float | None, words: str, mode: str
) -> None:
    """A random model of a laptop does not learn at the default of large ones."""
    trainer = {"mode": mode} | ({} if rate is None else {"learning_rate": rate})
    sentence = unfit_rate(make_settings(trainer=trainer))
    assert words in sentence
    assert bool(sentence) == bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"env": {"agent_environment": ["SERCH_KEY"]}},
            ["env.agent_environment[0]='SERCH_KEY'", "did you mean 'SEARCH_KEY'"],
        ),
        (
            {"router": {"upstreams": {"judge": {"base_url": "http://x", "api_key_env": "SEARCH"}}}},
            ["router.upstreams.judge.api_key_env='SEARCH'", "did you mean 'SEARCH_KEY'"],
        ),
        (
            {"env": {"agent_read_only": ["nowhere"]}},
            ["env.agent_read_only='nowhere' does not exist"],
        ),
        (
            {"trainer": {"kl": "k3", "reference_path": "polcy"}},
            ["trainer.reference_path='polcy' does not exist", "did you mean 'policy'"],
        ),
        (
            {"trainer": {"advantage": "gae", "critic": {"path": "polcy"}}},
            ["trainer.critic.path='polcy' does not exist", "did you mean 'policy'"],
        ),
        (
            {"trainer": {"teacher": {"path": "polcy"}}},
            ["trainer.teacher.path='polcy' does not exist", "did you mean 'policy'"],
        ),
        (
            {
                "trainer": {"teacher": {"context_key": "qestion"}},
                "buffer": {"drop_zero_signal": False},
            },
            ["trainer.teacher.context_key='qestion'", "did you mean 'question'"],
        ),
        (
            {"buffer": {"redis_url": "redis://h", "redis_password_file": "polcy"}},
            ["buffer.redis_password_file='polcy' does not exist"],
        ),
        (
            {"server": {"num_servers": 0, "urls": ["http://x"], "api_key_file": "keys"}},
            ["server.api_key_file='keys' does not exist"],
        ),
        ({"telemetry": {"trackers": ["wandbb"]}}, ["'wandbb' is unknown", "did you mean 'wandb'"]),
        ({"env": {"rollout_function_path": "rolout:play"}}, ["did you mean 'rollout'"]),
        ({"env": {"tasks": "taks.jsonl"}}, ["taks.jsonl"]),
        ({"env": {"eval_tasks": "taks.jsonl"}, "eval": {"every": 1}}, ["taks.jsonl"]),
        (
            {"sampling": {"governance_by_parameter": {"temprature": "record"}}},
            ["governance_by_parameter.temprature", "did you mean 'temperature'"],
        ),
        (
            {
                "env": {"tasks": {"easy": {"source": "tasks.jsonl"}}},
                "trainer": {"sources": {"esay": {}}},
            },
            ["trainer.sources.esay", "did you mean 'easy'"],
        ),
        ({"server": {"device": "gpu"}}, ["server.device='gpu'"]),
        ({"trainer": {"device": "cuda:one"}}, ["trainer.device='cuda:one'"]),
    ],
)
def test_a_name_in_a_value_that_names_nothing_is_refused(
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, dict[str, Any]],
    words: list[str],
) -> None:
    """Variables, files, fields, parameters, lists, modules and devices, with the nearest name."""
    monkeypatch.setenv("SEARCH_KEY", "k")
    with pytest.raises(SettingsError) as refused:
        check_before_start(make_settings(**changes))
    assert [word for word in words if word not in str(refused.value)] == []
