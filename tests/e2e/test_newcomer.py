"""A new user's day: an empty folder, an agent of one's own, ten tasks, and every wrong step."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes import user_folder
from outloop.buffer.telemetry import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/your_agent"
BLOCK = re.compile(r"^```\w+ title=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A process per episode on a busy machine takes seconds.
PATIENT = ("--set", "trainer.take_timeout_s=400", "--set", "env.episode_deadline_s=200")
SMALL = ("--set", "trainer.num_steps=2", "--set", "trainer.groups_per_step=1", *PATIENT)
NUM_FIRST = 16
HOLD = f'''

import itertools
import os
import time
from pathlib import Path


def hold():
    """Until the test says so, whoever is not among the first; under the runner's process id."""
    for number in itertools.count():
        try:
            Path(f"start-{{number}}").touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    if number >= {NUM_FIRST}:
        Path(f"held-{{os.getppid()}}-{{number}}").touch()
        while not Path("go").exists():
            time.sleep(0.05)
'''
ROLLOUT = """
[model]
path = "policy"

[env]
rollout_function_path = "rollout:play"
tasks = "tasks.jsonl"
"""
Outloop = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader of docs/your-own-agent.md has after its first page."""
    for name in ("agent.py", "agent.mjs", "package.json", "verifier.py", "rollout.py", "run.toml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    shutil.copy(EXAMPLE / "tasks.jsonl", tmp_path)
    page = (ROOT / "docs/your-own-agent.md").read_text()
    for name, text in BLOCK.findall(page):
        if name in ("curl.sh", "http_runner.py"):
            (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def outloop(folder: Path) -> Outloop:
    """Run the command line in the user's folder."""

    def run(*arguments: str, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
        return user_folder.run(folder, *arguments, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="session")
def made_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's first command, run once; the same arguments give the same files."""
    folder = tmp_path_factory.mktemp("newcomer")
    made = user_folder.run(folder, "new-policy", "--out", "policy", timeout_s=200.0)
    assert made.returncode == 0, made.stderr
    return folder / "policy"


@pytest.fixture
def policy(folder: Path, made_policy: Path) -> Path:
    """What it made, in the user's folder."""
    return Path(shutil.copytree(made_policy, folder / "policy"))


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command line in the background; stopped at the end."""
    with user_folder.start(folder, *arguments) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(90)
                finally:
                    process.kill()


def steps(folder: Path) -> list[dict[str, float]]:
    """The steps that a run has made."""
    return [row for row in read_metrics(folder / "runs/your-agent") if "train/loss" in row]


def assert_trained(folder: Path, answer: subprocess.CompletedProcess[str]) -> None:
    """Two steps on episodes that called the model and were scored."""
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = steps(folder)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    assert all(row["train/episodes"] == 4 for row in rows)
    assert all(row["train/failed_share"] == 0 for row in rows)
    assert all(row["train/turns_per_episode"] >= 1 for row in rows)


@pytest.mark.slow
def test_an_agent_program_trains_from_an_empty_folder(
    folder: Path, policy: Path, outloop: Outloop
) -> None:
    """As the page says, word for word, only shorter."""
    assert_trained(folder, outloop("train", "run.toml", *SMALL))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="the example's second agent is for node")
def test_the_same_agent_in_javascript_trains(folder: Path, policy: Path, outloop: Outloop) -> None:
    """Installed by the example's own command, unmodified."""
    npm = ["npm", "install", "--no-fund", "--no-audit"]
    subprocess.run(npm, cwd=folder, check=True, timeout=300, capture_output=True)
    command = "node agent.mjs --task {task_file}"
    assert_trained(folder, outloop("train", "run.toml", "--agent-command", command, *SMALL))


@pytest.mark.slow
def test_the_same_agent_as_a_rollout_function_trains_with_two_runners(
    folder: Path, policy: Path
) -> None:
    """Both runners claim from one buffer; one is killed while it plays, and the process that takes
    its place plays too."""
    text = (folder / "run.toml").read_text()
    text = re.sub(
        r"agent_command = .*\nverifier = .*", 'rollout_function_path = "rollout:play"', text
    )
    (folder / "run.toml").write_text(text.replace("episodes = 4", "episodes = 2"))
    play = (folder / "rollout.py").read_text()
    (folder / "rollout.py").write_text(
        play.replace("    answer =", "    hold()\n    answer =") + HOLD
    )

    def held() -> Counter[int]:
        """How many episodes each runner's process holds, or held when it was killed."""
        return Counter(int(path.name.split("-")[1]) for path in folder.glob("held-*"))

    with started(
        folder,
        *("train", "run.toml", "--set", "env.num_runners=2", "--set", "trainer.num_steps=5"),
        *("--set", "env.max_runner_silence_s=5", *PATIENT),
    ) as process:
        wait_until(lambda: sorted(held().values()) == [2, 2] and steps(folder) != [], process)
        os.kill(min(held()), signal.SIGKILL)
        wait_until(lambda: len(held()) == 3, process)
        (folder / "go").touch()
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    rows = steps(folder)
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 4, 5]
    assert all(row["train/episodes"] == 8 for row in rows)
    for name in ("runner-0", "runner-1"):
        log = (folder / f"runs/your-agent/logs/{name}.log").read_text()
        played = re.findall(r'"num_closed": (\d+)', log)
        assert played
        assert int(played[-1]) > 0


@pytest.mark.slow
def test_plain_http_from_a_shell(folder: Path, policy: Path) -> None:
    """The page's curl commands: open, run, reward, close, and look at what was recorded."""
    with started(folder, "serve", "run.toml", "--show-keys") as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        env = {
            **os.environ,
            "ADMIN_URL": facts["admin_url"],
            "RUNNER_KEY": facts["runner_key"],
        }
        answer = subprocess.run(
            ["sh", "curl.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stdout + answer.stderr
        recorded = json.loads(answer.stdout[answer.stdout.rindex('{"opening"') :])
        assert recorded["outcome"] == "completed"
        assert recorded["reward"]["components"] == {"digits": 0.5}
        (turn,) = recorded["turns"]
        assert len(turn["output_ids"]) == len(turn["behavior_logprobs"]) > 0


@pytest.mark.slow
def test_plain_http_trains(folder: Path, policy: Path) -> None:
    """The page's runner over urllib plays a run to its end."""
    with started(folder, "train", "run.toml", *SMALL, "--set", "env.num_runners=0") as process:
        registry = folder / "runs/your-agent/logs/router-0.log"
        wait_until(lambda: registry.exists() and "part_ready" in registry.read_text(), process)
        url = re.findall(r'"url": "(http[^"]+)"', registry.read_text())[0]
        keys = json.loads((folder / "runs/your-agent/secrets.json").read_text())
        runner = subprocess.run(
            [sys.executable, "http_runner.py", url, keys["runner_key"]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output + runner.stderr
    assert len(steps(folder)) == 2


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return when it is true; fail when the process ends before, or after minutes."""
    deadline = time.monotonic() + 400
    while not is_true():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "text", "arguments", "words"),
    [
        ("x", "", ("--agent-command", "python agnet.py"), ["'agnet.py'", "mean 'agent.py'?"]),
        ("x", "", ("--agent-command", "pyton agent.py"), ["no program 'pyton'", "PATH"]),
        ("x", "", ("--agent-command", "python agent.py {tsk}"), ["{tsk}", "allowed here"]),
        ("x", "", ("--verifier", "verifier:verfy"), ["has no 'verfy'", "mean 'verify'?"]),
        (
            "verifier.py",
            "def verify(task):\n    pass\n",
            (),
            ["(task, result)", "signature (task)"],
        ),
        ("verifier.py", "import nothing_there\n", (), ["importing it raised", "nothing_there"]),
        (
            "tasks.jsonl",
            '{"question": "a"}\n{"question"\n',
            (),
            ["tasks.jsonl, line 2", "not JSON"],
        ),
        ("x", "", ("--rollout-function-path", "rollout:play"), ["both given", "leave one out"]),
        ("run.toml", ROLLOUT.replace("play", "plya"), (), ["has no 'plya'", "mean 'play'?"]),
        ("rollout.py", "def play(task):\n    pass\n", (), ["signature (task)", "(task, episode)"]),
    ],
)
def test_a_wrong_step_is_one_sentence_before_anything_starts(
    name: str,
    text: str,
    arguments: tuple[str, ...],
    words: list[str],
    folder: Path,
    outloop: Outloop,
) -> None:
    """Exit code 2, no traceback, no run folder; the sentence says what to do."""
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "policy").mkdir(exist_ok=True)
        (folder / "policy" / file).write_text('{"model_type": "qwen3_moe"}')
    if name == "rollout.py":
        (folder / "run.toml").write_text(ROLLOUT)
    if text:
        (folder / name).write_text(text)
    answer = outloop("train", "run.toml", *arguments)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert [word for word in words if word not in answer.stderr] == []
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "verifier", "words"),
    [
        (
            "print(1)\n",
            "def verify(task, result):\n    return 1.0\n",
            ["none of the first 32 episodes made a model call", "OPENAI_BASE_URL"],
        ),
        (
            "print(1)\n",
            "def verify(task, result):\n    return task.payload['answer']\n",
            ["the verifier raised KeyError: 'answer' (3 times)", "Correct what raised it"],
        ),
        (
            "print(1)\n",
            "def verify(task, result):\n    pass\n",
            ["returned no usable reward 8 times", "the verifier returned None"],
        ),
    ],
)
def test_a_wrong_step_that_only_playing_shows_ends_the_run_with_a_sentence(
    agent: str, verifier: str, words: list[str], folder: Path, policy: Path, outloop: Outloop
) -> None:
    """An agent that ignores its address, a verifier that raises, a reward that is missing."""
    (folder / "agent.py").write_text(agent)
    (folder / "verifier.py").write_text(verifier)
    command = f"{sys.executable} -I -S agent.py"
    answer = outloop("train", "run.toml", "--agent-command", command, *PATIENT, "--set",
                     "buffer.max_staleness=8", "--set", "env.max_replacements=20")  # fmt: skip
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert [word for word in words if word not in answer.stdout + answer.stderr] == []
