"""`import outloop`: start, watch and stop runs from Python, as a notebook does."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

import outloop
from outloop.buffer.errors import Conflict, SettingsError
from outloop.buffer.run import create_run
from outloop.buffer.settings import build_settings
from outloop.buffer.telemetry import MetricsWriter
from outloop.cli import cli
from outloop.engine.models.random_init import write_policy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
PLAY = """
async def play(task, episode):
    answer = await episode.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.payload["question"]}]
    )
    return float(len(answer.choices[0].message.content or ""))


async def broken(task, episode):
    await play(task, episode)
    return {}["answer"]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """A run as a mapping, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path / "policy", 0)
    (tmp_path / "mine.py").write_text(PLAY)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1"}\n{"question": "2+2"}\n')
    return {
        "run": {"name": "small"},
        "model": {"path": "policy", "renderer": "qwen3", "max_context_tokens": 256},
        "sampling": {"max_new_tokens": 8},
        "env": {"rollout_function_path": "mine:play", "tasks": "tasks.jsonl"},
        "buffer": {"group_size": 4},
        "trainer": {"groups_per_step": 2, "num_steps": 2},
    }


@pytest.mark.slow
def test_a_run_is_trained_and_looked_at(config: dict[str, dict[str, object]]) -> None:
    """In one call; then its metrics and weights are there, and the same call changes nothing."""
    run = outloop.train(config, settings={"trainer.num_steps": 1})
    assert run.exit_code == 0
    assert not run.is_up
    (row,) = [row for row in run.metrics() if "train/loss" in row]
    assert row["train/episodes"] == 8
    assert (run.weights / "model.safetensors").is_file()
    assert outloop.Run("runs/small").settings.trainer.num_steps == 1
    assert outloop.train(config, settings=("trainer.num_steps=1",)).exit_code == 0
    assert len(run.metrics()) == 1


@pytest.mark.slow
def test_a_run_in_the_background_is_stopped_and_resumed(
    config: dict[str, dict[str, object]],
) -> None:
    """`wait=False` returns at once; `stop` ends it with a checkpoint to go on from."""
    run = outloop.train(config, settings={"trainer.num_steps": 100_000}, wait=False)
    deadline = time.monotonic() + 200
    while len(run.metrics()) < 2:
        assert run.is_up
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert run.wait(timeout_s=0.01) is None
    with pytest.raises(Conflict, match="started by this process"):
        outloop.Run("runs/small").stop()
    run.stop()
    assert not run.is_up
    assert run.exit_code == 130
    num_steps = run.metrics()[-1]["step"]
    again = outloop.train(config, settings={"trainer.num_steps": num_steps + 1})
    assert again.exit_code == 0
    assert again.metrics()[-1]["step"] == num_steps + 1


@pytest.mark.slow
def test_failed_episodes_can_be_read(config: dict[str, dict[str, object]]) -> None:
    """The sentence, file and line, and what the policy wrote, after the run was stopped by them."""
    broken = {"env.rollout_function_path": "mine:broken", "trainer.num_steps": 50}
    # One that plays on while later ones fail lets some more end.
    with pytest.raises(SettingsError, match=r"(3\d) of the last \1 episodes failed .*mine\.py:11"):
        outloop.train(config, settings=broken)
    run = outloop.Run("runs/small")
    failed = run.episodes(failed=True)
    assert len(failed) >= 16
    for episode in failed:
        assert episode.error.startswith("KeyError: 'answer' at ")
        assert episode.error.endswith("mine.py:11")
        assert episode.reward == 0.0
        (turn,) = episode.turns
        assert "+" in turn.prompt
        assert turn.output
    words = ["episodes", failed[0].episode_id, "--run", "runs/small", "--json"]
    shown = CliRunner().invoke(cli, words, catch_exceptions=False)
    row = json.loads(shown.stdout.splitlines()[0])
    assert row["episode_id"] == failed[0].episode_id
    assert row["turns"][0]["output"] == failed[0].turns[0].output
    listed = CliRunner().invoke(cli, [*words[:1], "--failed", "--run", "runs/small"])
    assert "20 failed episodes shown; --limit 0 shows all" in listed.stdout
    assert "error: KeyError: 'answer' at " in listed.stdout


@pytest.mark.slow
def test_a_policy_is_served(config: dict[str, dict[str, object]]) -> None:
    """Inside `with` an episode is opened and called; afterwards nothing answers."""
    del config["env"]
    with outloop.serve(config) as served:
        opened = post(
            f"{served.admin_url}/episodes",
            served.runner_key,
            {"task_id": "t", "purpose": "eval", "deadline_s": 60},
        )
        answer = post(
            f"{opened['base_url']}/chat/completions",
            opened["api_key"],
            {"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
        )
        assert answer["usage"]["completion_tokens"] > 0
        assert outloop.Run("runs/small").is_up
    assert not outloop.Run("runs/small").is_up
    with pytest.raises(OSError, match="refused"):
        post(served.admin_url, served.runner_key, {})


@pytest.mark.medium
def test_a_wrong_setting_is_refused_before_anything_starts(
    config: dict[str, dict[str, object]],
) -> None:
    """With the sentence of the command line; a folder that is no run is refused too."""
    with pytest.raises(SettingsError, match=r"unknown setting trainer\.num_step"):
        outloop.train(config, settings={"trainer.num_step": 1})
    with pytest.raises(SettingsError, match="holds no run.json"):
        outloop.Run("elsewhere")
    assert not Path("runs").exists()


def post(url: str, key: str, body: dict[str, object]) -> dict[str, object]:
    """A POST of JSON, answered in JSON."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def test_any_metric_is_plotted(tmp_path: Path) -> None:
    """A chart for each name, and the curve without one; a name that was not recorded is refused."""
    folder = recorded_run(tmp_path)
    run = outloop.Run(folder)
    figure = run.plot("train/entropy", "train/reward_mean")
    assert [axes.get_ylabel() for axes in figure.axes] == ["train/entropy", "train/reward_mean"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.0, 1.0]
    assert run.plot().axes[0].get_ylabel() == "reward"
    with pytest.raises(SettingsError, match="'train/entropie' was not recorded; .*train/entropy"):
        run.plot("train/entropie")
    assert [row["step"] for rows in run.follow() for row in rows] == [1, 2]


def recorded_run(tmp_path: Path) -> Path:
    """The folder of a run of two steps that is over."""
    tree = {"run": {"name": "two", "dir": tmp_path}, "model": {"path": "policy"}}
    folder = tmp_path / "two"
    folder.mkdir()
    create_run(build_settings(tree, source="test"), folder, "redis://nowhere")
    with MetricsWriter(folder) as writer:
        for step in (1, 2):
            row = {"train/loss": 0.1, "train/entropy": 3.0 - step, "train/reward_mean": 0.5}
            writer.write(step, row)
    return folder
