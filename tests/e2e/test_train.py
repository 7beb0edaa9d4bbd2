"""The whole loop with real processes."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.command_run import assert_nothing_is_left, part_of, training
from fakes.tls_front import tls_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Outloop = Callable[..., subprocess.CompletedProcess[str]]
WriteConfig = Callable[..., Path]
ReadMetrics = Callable[[Path], list[dict[str, float]]]
Allow = Callable[..., None]
GRADED = ("--rollout-function-path", "rollouts:graded")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_loop_trains_at_every_staleness(
    staleness: int,
    workspace: Path,
    write_config: WriteConfig,
    outloop: Outloop,
    read_metrics: ReadMetrics,
) -> None:
    """Versions advance, staleness keeps its bound, logprobs agree, no process is left."""
    write_config(staleness=staleness, steps=4)
    answer = outloop("train", "run.toml", *GRADED)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["train/staleness_max"] <= staleness for row in rows)
    assert all(row["train/episodes"] == 32 for row in rows)
    gaps = [
        row["train/logprob_gap_max"] for row in rows if row["train/logprob_gap_max"] is not None
    ]
    assert gaps
    assert max(gaps) < 1e-4
    assert (workspace / "runs/tiny/hf/model.safetensors").is_file()
    assert (workspace / "runs/tiny/curve.png").is_file()
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_a_run_in_one_process_is_the_same_loop(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """--single-process trains too, with every part in one Python process."""
    write_config(steps=2)
    answer = outloop("train", "run.toml", "--single-process")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["train/policy_version"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_a_recipe_is_logged_at_the_start_and_trains(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """DAPO: what it set, what was set otherwise, and a batch that was filled again until its groups
    have signal."""
    write_config(steps=2)
    answer = outloop(
        *("train", "run.toml", "--set", "trainer.recipe=dapo"),
        *("--set", "trainer.clip_high=0.3", "--set", "trainer.groups_per_step=4"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert 'recipe dapo: trainer.loss="ppo_clip"' in answer.stdout
    assert "overridden: trainer.clip_high=0.3 (recipe: 0.28)" in answer.stdout
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        kept = row["train/episodes"] * row["train/groups_with_signal_share"]
        assert kept >= 4 * 4
        assert row["train/overlong_penalty_mean"] is not None


@pytest.mark.slow
def test_one_list_is_imitated_beside_rl_on_another(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """With top-p, so that all tokens of both are trained over the ids that it left."""
    write_config(steps=2, staleness=0)
    code = workspace / "rollouts.py"
    shown = "\n\ndef shown():\n    return [{'question': f'show {i}'} for i in range(64)]\n"
    code.write_text(code.read_text() + shown)
    answer = outloop(
        *("train", "run.toml", *GRADED, "--set", "sampling.top_p=0.8", "--set", "eval.every=0"),
        *("--set", 'env.tasks={own={source="rollouts:tasks"},shown={source="rollouts:shown"}}'),
        *("--set", 'trainer.sources={shown={loss="sft",min_reward=1.0,weight=0.5}}'),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["train/imitated_share"] < 1
        assert row["train/imitated_nll"] > 0
        assert row["train/support_share"] == 1.0
        assert row["train/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_an_agent_as_a_program_is_trained(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """agent.py, started with a URL and a key in its environment, plays a run's episodes."""
    write_config(steps=2)
    answer = outloop(
        *("train", "run.toml", "--rollout-function-path", "rollouts:program"),
        *("--set", "trainer.groups_per_step=2", "--set", "eval.every=0"),
        # Starting a Python with its client takes seconds on a busy machine.
        *("--set", "env.episode_deadline_s=90", "--set", "env.max_concurrent_episodes=4"),
        *("--set", "trainer.take_timeout_s=120"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [8, 8]
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(row["train/turns_per_episode"] >= 1 for row in rows)


@pytest.mark.slow
def test_failing_agents_are_recorded_and_the_run_goes_on(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """Half of the episodes crash: they score the failure reward and the steps are made."""
    write_config(steps=2)
    answer = outloop("train", "run.toml", "--rollout-function-path", "rollouts:crash")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert len(rows) == 2
    assert 0.1 < rows[0]["train/failed_share"] < 0.9


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_stopped(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """A second start trains the remaining steps and never reuses a policy_version."""
    write_config(steps=2)
    assert outloop("train", "run.toml").returncode == 0
    write_config(steps=4)
    answer = outloop("train", "run.toml")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    versions = [row["train/policy_version"] for row in rows]
    assert len(set(versions)) == 4
    assert versions == sorted(versions)


@pytest.mark.slow
def test_ctrl_c_stops_cleanly(workspace: Path, write_config: WriteConfig) -> None:
    """SIGINT ends every process within its deadline and says how to go on."""
    write_config(steps=500)
    with training(workspace) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "resume" in output
    assert_nothing_is_left(workspace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("router", signal.SIGKILL),
        ("runner", signal.SIGTERM),
        ("server", signal.SIGKILL),
        ("trainer", signal.SIGKILL),
        ("trainer", signal.SIGTERM),
    ],
)
def test_a_part_that_ends_is_replaced_and_the_run_ends(
    part: str,
    number: int,
    workspace: Path,
    write_config: WriteConfig,
    read_metrics: ReadMetrics,
    allow: Allow,
) -> None:
    """Killed, or asked to stop as by a spot machine's notice: the run goes on to its last step, one
    step after the other."""
    write_config(steps=6, held_s=100)
    allow(2)
    with training(workspace) as process:
        part_of(workspace, part).send_signal(number)
        allow()
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    assert "part_restarted" in output
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 4, 5, 6]
    versions = [row["train/policy_version"] for row in rows]
    assert len(set(versions)) == len(versions)
    assert_nothing_is_left(workspace)


@pytest.mark.slow
def test_a_run_whose_router_and_server_speak_https_trains(
    workspace: Path, write_config: WriteConfig, outloop: Outloop, read_metrics: ReadMetrics
) -> None:
    """With an authority of its own: runner, agents, router, trainer and monitor verify both."""
    write_config(steps=2)
    settings = tls_settings(workspace)
    answer = outloop(
        "train", "run.toml", *(f"--set={n}={json.dumps(v)}" for n, v in settings.items())
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    ready = [
        json.loads(line)["url"]
        for name in ("router-0", "server-0")
        for line in (workspace / f"runs/tiny/logs/{name}.log").read_text().splitlines()
        if "part_ready" in line
    ]
    assert len(ready) == 2
    assert all(url.startswith("https://127.0.0.1:") for url in ready)
    assert_nothing_is_left(workspace)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "trainer.num_stepz=3"), "did you mean 'num_steps'"),
        (("--set", "model.path=nowhere"), "model.path='nowhere'"),
        (("--rollout-function-path", "rollouts:plya"), "play"),
        (("--rollout-function-path", "rollouts:wrong"), "task, episode"),
        (("--rollout-function-path", "no_such_module:play"), "no_such_module"),
        (("--set", "env.tasks=missing.jsonl"), "missing.jsonl"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: tuple[str, ...],
    sentence: str,
    workspace: Path,
    write_config: WriteConfig,
    outloop: Outloop,
) -> None:
    """Each mistake is one sentence and exit code 2; no run folder is made."""
    write_config()
    answer = outloop("train", "run.toml", *arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (workspace / "runs").exists()


@pytest.mark.slow
def test_a_reward_that_is_not_a_number_is_named(
    workspace: Path, write_config: WriteConfig, outloop: Outloop
) -> None:
    """A verifier that always returns NaN stops the run with the sentence that says so."""
    write_config()
    answer = outloop("train", "run.toml", "--rollout-function-path", "rollouts:nan")
    assert answer.returncode != 0
    assert "nan" in answer.stdout + answer.stderr
    assert_nothing_is_left(workspace)


@pytest.mark.medium
def test_serve_answers_an_openai_client(workspace: Path, write_config: WriteConfig) -> None:
    """`outloop serve` prints one JSON line, opens episodes and answers chat calls."""
    write_config()
    with subprocess.Popen(
        [sys.executable, "-m", "outloop.cli", "serve", "run.toml"],
        cwd=workspace,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            assert set(facts) == {"base_url", "admin_url", "redis_url", "keys_file"}
            keys = json.loads(Path(facts["keys_file"]).read_text())
            assert not [key for key in keys.values() if str(key) in json.dumps(facts)]
            episode = post(
                facts["admin_url"] + "/episodes",
                keys["runner_key"],
                {
                    "task_id": "t",
                    "group_id": None,
                    "attempt": 0,
                    "deadline_s": 60,
                    "purpose": "eval",
                },
            )
            body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
            chat = post(episode["base_url"] + "/chat/completions", episode["api_key"], body)
            assert chat["choices"][0]["finish_reason"] in {"stop", "length", "tool_calls"}
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
    assert_nothing_is_left(workspace)


def post(url: str, key: str, body: dict[str, object]) -> dict[str, object]:
    """POST JSON with a bearer key and return the JSON answer."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))
