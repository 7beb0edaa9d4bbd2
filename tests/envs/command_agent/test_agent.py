"""Agents that are programs: what they are given, what they may use, and what is left of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.buffer.settings import Settings
from outloop.envs.command_agent import command
from outloop.envs.runner.preflight import check_rollout
from outloop.envs.runner.runner import run

AGENT = """
import json
import os
import sys
import urllib.request

task = json.load(open(sys.argv[1]))
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}
    ).encode(),
    headers={
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
    },
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
print(json.dumps({"task": task, "called": bool(answer["tool_calls"]), "env": dict(os.environ)}))
print("thinking", file=sys.stderr)
"""

VERIFIER = """
import json


def verify(task, result):
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.answer)
    same = said["task"]["question"] == task.payload["question"]
    return {"called": float(said["called"]), "same": float(same)}


def exits(task, result):
    return float(result.exit_code or 0) / 10


def raises(task, result):
    with open("tries", "a") as file:
        file.write("x")
    raise KeyError("answer")


def nothing(task, result):
    return None


def slow(task, result):
    import time

    time.sleep(600)


def tasks():
    return [{"question": f"1{n}*2", "answer": 24 + n} for n in range(5)]
"""


@pytest.fixture
def play_program(
    folder: Path, make_settings: Callable[..., Settings], fake_module: ModuleType
) -> Callable[..., Any]:
    """Write `agent.py` and run it for every episode of a fake router."""

    async def play(router: Any, agent: str, timeout_s: float = 60.0, **env: Any) -> None:
        (folder / "agent.py").write_text(agent)
        (folder / "checks.py").write_text(VERIFIER)
        settings = make_settings(
            **{
                "rollout_function_path": None,
                "tasks": "checks:tasks",
                "agent_command": f"{sys.executable} -S agent.py {{task_file}}",
                "verifier": "checks:exits",
                "max_concurrent_episodes": 4,
            }
            | env
        )
        stop = asyncio.Event()
        playing = run(settings, router_url=router.url, runner_key=fake_module.RUNNER_KEY, stop=stop)
        await asyncio.wait_for(playing, timeout_s)

    return play


@pytest.mark.medium
async def test_a_program_plays_with_its_episodes_key_only(
    router: Any, play_program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, task file and output go where they should; no other key is among them."""
    monkeypatch.setenv("OPENAI_API_KEY", "somebody's own")
    monkeypatch.setenv("OUTLOOP_BUFFER__REDIS_URL", "redis://:password@host")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    router.deadline_s = 60.0
    await play_program(
        router,
        AGENT,
        verifier="checks:verify",
        num_workers=1,
        hidden_task_fields=["answer"],
        reward_weights={"same": 0.5},
        agent_environment=["OPENAI_AGENTS_DISABLE_TRACING", "NOT_SET_HERE"],
    )
    assert router.num_chat_calls == 4
    for name, close in router.closes.items():
        assert close["reward"] == {"value": 1.5, "components": {"called": 1.0, "same": 1.0}}, close
        stdout, stderr = close["output"].split("\n\n")
        assert stderr == "thinking"
        report = json.loads(stdout)
        assert "answer" not in report["task"]
        env = report["env"]
        assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == f"ol-ep-{name}-signature"
        assert env["OPENAI_BASE_URL"] == env["ANTHROPIC_BASE_URL"] + "/v1"
        assert env["OUTLOOP_EPISODE_ID"] == name
        assert env["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
        assert not {"OUTLOOP_BUFFER__REDIS_URL", "HF_TOKEN", "JUDGE_KEY"} & env.keys()
        assert env["OUTLOOP_PROJECT_DIR"] == str(folder)
        assert "ol-runner" not in stdout
        assert not Path(env["OUTLOOP_EPISODE_DIR"]).exists()


@pytest.mark.medium
async def test_a_program_that_fails_is_a_result(router: Any, play_program: Any) -> None:
    """The verifier's reward stands, its last words are in the error, its output is kept."""
    await play_program(router, "import sys\nprint('half')\nsys.exit('no idea')\n")
    assert router.closed("failure_kind") == ["agent"] * 4
    assert [reward["value"] for reward in router.closed("reward")] == [0.1] * 4
    assert router.closed("error")[0] == "AgentFailed: the agent ended with exit_code=1: no idea"
    assert router.closed("output")[0] == "half\n\nno idea"


@pytest.mark.medium
async def test_a_program_that_fails_while_the_router_is_away_is_repeated(
    router: Any, play_program: Any
) -> None:
    """An agent cannot be blamed for an endpoint that is not there."""
    router.health_status = 503
    await play_program(router, "raise SystemExit(1)\n")
    assert router.closed("failure_kind") == ["infrastructure"] * 4
    assert router.closed("reward") == [None] * 4


@pytest.mark.medium
async def test_a_program_that_keeps_the_router_busy_is_to_blame_for_its_end(
    router: Any, play_program: Any
) -> None:
    """A router that answers late is there: an agent's own load is no outage."""
    router.num_episodes = 1
    router.health_delay_s = 6.0
    await play_program(router, "raise SystemExit(1)\n")
    assert router.closed("failure_kind") == ["agent"]
    assert [reward["value"] for reward in router.closed("reward")] == [0.1]


RUNAWAY = """
import os, subprocess, sys, time

# Daemons that left the session, and their own children; some ignore SIGTERM.
code = (
    "import os, signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "os.setsid()\\n"
    "os.fork()\\n"
    "open('pids', 'a').write(f'{os.getpid()}\\\\n')\\n"
    "time.sleep(600)\\n"
)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.Popen([sys.executable, "-S", "-c", code, sys.argv[2]])
        os._exit(0)
while len(open("pids").read().split() if os.path.exists("pids") else []) < 6:
    time.sleep(0.02)
print("started", flush=True)
"""


def processes_of(folder: Path) -> list[psutil.Process]:
    """What agents of this test left running: their command lines name its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"witness-{folder}" in process.cmdline() and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
@pytest.mark.parametrize("end", ["", "time.sleep(600)\n"])
async def test_nothing_of_a_program_is_left(
    end: str, sandbox: str, router: Any, play_program: Any, folder: Path
) -> None:
    """Descendants in other sessions die with it, whether it ended or was ended at its deadline."""
    router.num_episodes = 1
    router.deadline_s = 12.0 if end else 60.0
    command = f"{sys.executable} -S agent.py {{task_file}} witness-{folder}"
    await play_program(router, RUNAWAY + end, agent_command=command, agent_sandbox=sandbox)
    assert router.closed("outcome") == ["truncated" if end else "completed"]
    assert router.closed("output") == ["started"]
    assert processes_of(folder) == []


@pytest.mark.medium
@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
async def test_a_killed_worker_takes_its_programs_with_it(
    sandbox: str, router: Any, play_program: Any, folder: Path
) -> None:
    """kill -9 of the worker: the reaper notices and ends the whole tree."""
    router.num_episodes = 1
    command = f"{sys.executable} -S agent.py {{task_file}} witness-{folder}"
    agent = RUNAWAY + "time.sleep(600)\n"
    playing = asyncio.create_task(
        play_program(router, agent, num_workers=1, agent_command=command, agent_sandbox=sandbox)
    )
    async with asyncio.timeout(40):
        while len(processes_of(folder)) < 7:
            await asyncio.sleep(0.1)
    (worker,) = [
        child
        for child in psutil.Process().children()
        if "outloop.envs.runner.worker_main" in child.cmdline()
    ]
    os.kill(worker.pid, signal.SIGKILL)
    await playing
    async with asyncio.timeout(20):
        while processes_of(folder):
            await asyncio.sleep(0.05)
    assert router.closed("failure_kind") == ["infrastructure"]


HOGS = """
import subprocess, sys, time

code = "data = b'x' * (80 * 2**20)\\nimport time\\ntime.sleep(600)"
for _ in range(4):
    subprocess.Popen([sys.executable, "-S", "-c", code])
time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("agent", "words", "outcome"),
    [
        ("bytearray(2**30)\n", "MemoryError", "failed"),
        (HOGS, "env.agent_memory_mb=200", "truncated"),
        ("while True: print('x' * 10_000)\n", "env.max_output_bytes=1000000", "truncated"),
    ],
)
async def test_memory_and_output_are_limited(
    agent: str, words: str, outcome: str, router: Any, play_program: Any
) -> None:
    """One process or many together, and a flood of output: a result of the agent's, kept short."""
    router.num_episodes = 1
    router.deadline_s = 40.0
    await play_program(router, agent, agent_memory_mb=200, max_output_bytes=1_000_000)
    assert words in router.closed("error")[0]
    assert router.closed("outcome") == [outcome]
    assert router.closed("failure_kind") == ["agent"]
    assert len(router.closed("output")[0]) <= 8000


async def test_a_verifier_that_raises_is_asked_again_and_never_a_zero(
    router: Any, play_program: Any, folder: Path
) -> None:
    """Three times on the same artefacts; then the attempt failed for the environment's reasons."""
    router.num_episodes = 1
    await play_program(router, "print(1)\n", verifier="checks:raises")
    assert (folder / "tries").read_text() == "xxx"
    assert router.closed("failure_kind") == ["environment"]
    assert router.closed("reward") == [None]
    assert "the verifier raised KeyError: 'answer' (3 times)" in router.closed("error")[0]


@pytest.mark.medium
async def test_a_verifier_that_does_not_finish_is_the_agents_failure(
    router: Any, play_program: Any
) -> None:
    """The answer cannot be judged within the deadline: the lowest reward."""
    router.num_episodes = 1
    await play_program(
        router, "print(1)\n", verifier="checks:slow", verifier_timeout_s=0.5, failure_reward=-1.0
    )
    assert router.closed("failure_kind") == ["agent"]
    assert router.closed("reward")[0]["value"] == -1.0
    assert "the verifier took longer than 0.5 s" in router.closed("error")[0]


@pytest.mark.medium
async def test_a_verifier_that_says_nothing_stops_the_run(router: Any, play_program: Any) -> None:
    """Its sentence names the setting and what is allowed."""
    router.num_episodes = 20
    with pytest.raises(SettingsError, match="env.verifier='checks:nothing' returned no usable"):
        await play_program(router, "print(1)\n", verifier="checks:nothing")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("last", "value", "components"),
    [
        ("0.25", 0.25, {}),
        ('{"right": 1, "short": 0.5}', 1.5, {"right": 1.0, "short": 0.5}),
    ],
)
async def test_a_verifier_may_be_a_command(
    last: str,
    value: float,
    components: dict[str, float],
    router: Any,
    play_program: Any,
    folder: Path,
) -> None:
    """It reads the whole task and the result from files; its last line is the score."""
    router.num_episodes = 1
    (folder / "judge.sh").write_text(
        'grep -q \'"answer": 24\' "$1" && grep -q 1234 "$2" && test -f "$3/left.txt" || exit 9\n'
        'test -z "$OPENAI_API_KEY" || exit 8\n'
        f"echo looking; echo '{last}'\n"
    )
    agent = (
        "import os\nprint(1234)\n"
        "open(os.environ['OUTLOOP_EPISODE_DIR'] + '/left.txt', 'w').write('x')\n"
    )
    await play_program(
        router,
        agent,
        hidden_task_fields=["answer"],
        verifier="sh judge.sh {task_file} {result_file} {episode_dir}",
    )
    assert router.closed("reward") == [{"value": value, "components": components}]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("script", "words"),
    [("exit 3", "exit_code=3"), ("echo well", "its last line of output is 'well'")],
)
async def test_a_verifier_command_that_fails_is_the_environments(
    script: str, words: str, router: Any, play_program: Any, folder: Path
) -> None:
    """Neither an exit code nor a word is a score."""
    router.num_episodes = 1
    (folder / "judge.sh").write_text(script + "\n")
    await play_program(router, "print(1)\n", verifier="sh judge.sh {result_file}")
    assert router.closed("failure_kind") == ["environment"]
    assert words in router.closed("error")[0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"verifier": None}, ["env.verifier is missing", "def verify(task, result)"]),
        ({"verifier": "checks:verfy"}, ["did you mean 'verify'?"]),
        ({"verifier": "checks:one"}, ["signature (task)", "(task, result)"]),
        ({"agent_command": "no-such-program {task_file}"}, ["no program 'no-such-program'"]),
        ({"agent_command": "sh agnet.sh"}, ["no file 'agnet.sh'", "did you mean 'agent.sh'?"]),
        ({"agent_command": "sh agent.sh {taks_file}"}, ["{taks_file}", "mean 'task_file'?"]),
        ({"agent_command": "sh agent.sh {answer}"}, ["{answer}", "allowed here"]),
        ({"agent_command": "sh 'agent.sh"}, ["No closing quotation", "quote it"]),
        ({"agent_command": ""}, ["is empty"]),
        ({"agent_environment": ["OPENAI_API_KEY"]}, ["'OPENAI_API_KEY' cannot be passed on"]),
        ({"rollout_function_path": "checks:one"}, ["both given", "leave one out"]),
    ],
)
def test_a_command_that_cannot_work_is_a_sentence_before_anything_starts(
    env: dict[str, Any], words: list[str], folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Each names the setting, what is there and what to do."""
    (folder / "checks.py").write_text(VERIFIER + "\n\ndef one(task):\n    return 1.0\n")
    (folder / "agent.sh").write_text("echo 1\n")
    good = {
        "rollout_function_path": None,
        "tasks": "checks:tasks",
        "agent_command": "sh agent.sh {question}",
        "verifier": "checks:verify",
        "hidden_task_fields": ["answer"],
    }
    check_rollout(make_settings(**good))
    with pytest.raises(SettingsError) as caught:
        check_rollout(make_settings(**(good | env)))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


SPY = """
import json, os
from helper import ASKED, WORDS

def text_of(path):
    try:
        return open(path, errors="replace").read()
    except OSError as error:
        return type(error).__name__

own = os.environ["OUTLOOP_EPISODE_DIR"]
seen = {path: text_of(path) for path in ASKED}
listed = {path: os.listdir(path) for path in ASKED if os.path.isdir(path)}
written = []
for path in ("/etc/x", os.path.join(os.environ["OUTLOOP_PROJECT_DIR"], "x"), "/tmp/x", "x"):
    try:
        open(path, "w").close()
        written.append(path)
    except OSError:
        pass
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
print(json.dumps({
    "seen": seen, "listed": listed, "written": written, "num_processes": len(pids),
    "cwd": os.getcwd() == own, "helper": WORDS, "home": os.environ["HOME"],
    "others": [name for name in os.listdir(os.path.dirname(os.path.dirname(own)))
               if name.startswith("episode-") and name not in own],
}))
"""


@pytest.mark.medium
async def test_a_program_sees_its_project_and_nothing_of_the_run(
    router: Any, play_program: Any, folder: Path
) -> None:
    """Under bubblewrap: no keys, run folders, tasks, verifier, other processes or homes."""
    (folder / "runs/run").mkdir(parents=True)
    (folder / "tasks.jsonl").write_text('{"question": "1", "answer": 24}\n')
    secret = folder / "runs/run/secrets.json"
    secret.write_text("the runner key")
    asked = [secret, folder / "runs", folder / "tasks.jsonl", folder / "checks.py", Path.home()]
    names = [str(path) for path in asked]
    (folder / "helper.py").write_text(f"WORDS = 'own code'\nASKED = {names!r}\n")
    router.num_episodes = 2
    await play_program(
        router,
        SPY,
        tasks="tasks.jsonl",
        hidden_task_fields=["answer"],
        agent_sandbox="bubblewrap",
    )
    assert router.closed("outcome") == ["completed"] * 2, router.closed("error")
    for output in router.closed("output"):
        report = json.loads(output.splitlines()[0])
        assert "runner key" not in output
        assert "24" not in str(report["seen"][str(asked[2])])
        assert "def verify" not in output
        assert report["seen"][str(folder / "runs")] == "FileNotFoundError"
        assert report["written"] == ["/tmp/x", "x"]
        assert report["num_processes"] <= 3
        assert report["cwd"] is True
        assert report["helper"] == "own code"
        assert report["others"] == []
        assert report["home"] != str(Path.home())


async def test_without_a_sandbox_a_program_still_starts_in_its_own_folder(
    router: Any, play_program: Any, folder: Path
) -> None:
    """Its files are found from there, and what it writes is not in the project."""
    (folder / "helper.py").write_text("WORDS = 'own code'\nASKED = []\n")
    router.num_episodes = 1
    await play_program(router, SPY, agent_sandbox="none")
    report = json.loads(router.closed("output")[0])
    assert (report["cwd"], report["helper"]) == (True, "own code")
    assert not (folder / "task.json").exists()


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
async def test_a_program_may_be_a_module(
    sandbox: str, router: Any, play_program: Any, folder: Path
) -> None:
    """`python -m package` is found in the project, though it starts elsewhere."""
    (folder / "team").mkdir()
    (folder / "team/__main__.py").write_text("from team import words\nprint(words.ALL)\n")
    (folder / "team/words.py").write_text("ALL = 'found'\n")
    router.num_episodes = 1
    await play_program(router, "", agent_sandbox=sandbox, agent_command=f"{sys.executable} -m team")
    assert router.closed("output") == ["found"]


@pytest.mark.medium
def test_a_program_that_its_sandbox_cannot_start_is_refused_before_anything_starts(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """The sentence says how to name what the program needs; named, it is found."""
    (folder / "checks.py").write_text(VERIFIER)
    (folder / "own").mkdir()
    interpreter = folder / "own/interpreter"
    interpreter.symlink_to("/bin/sh")
    script = folder / "agent"
    script.write_text(f"#!{interpreter}\necho 1\n")
    script.chmod(0o755)
    env = {
        "rollout_function_path": None,
        "tasks": "checks:tasks",
        "agent_command": str(script),
        "verifier": "checks:verify",
    }
    with pytest.raises(SettingsError, match="env.agent_read_only") as caught:
        check_rollout(make_settings(**env))
    assert f"{str(script)!r} cannot be started in its sandbox" in str(caught.value)
    check_rollout(make_settings(**env, agent_read_only=["own"]))


@pytest.mark.medium
@pytest.mark.parametrize(
    "command",
    [
        "own/bin/python {project_dir}/agent.py",
        "{project_dir}/own/bin/python {project_dir}/agent.py",
        "env FOO=1 {project_dir}/own/bin/python {project_dir}/agent.py",
        "sh -c 'exec {project_dir}/own/bin/python {project_dir}/agent.py'",
        "sh -c 'exec PREFIX/bin/python PREFIX/../agent.py'",
    ],
)
async def test_an_interpreter_of_the_projects_is_whole_wherever_it_stands(
    router: Any, play_program: Any, folder: Path, command: str
) -> None:
    """Its modules are there behind `env` and in a shell too, from any working directory."""
    agent = "import sys, only_here\nprint(sys.prefix)\n"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder / "own"], check=True
    )
    (site,) = (folder / "own/lib").glob("python*/site-packages")
    (site / "only_here.py").write_text("")
    router.num_episodes = 1
    command = command.replace("PREFIX", str(folder / "own"))
    await play_program(router, agent, agent_sandbox="bubblewrap", agent_command=command)
    assert router.closed("output") == [str(folder / "own")], router.closed("error")


def test_python_is_the_one_that_runs_outloop_where_path_has_none(
    folder: Path, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment need not be activated for its agents to start."""
    (folder / "checks.py").write_text(VERIFIER)
    (folder / "agent.py").write_text("print(1)\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    check_rollout(
        make_settings(
            rollout_function_path=None,
            tasks="checks:tasks",
            agent_command="python agent.py",
            verifier="checks:verify",
        )
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"hidden_task_fields": ["anwser"]}, ["'anwser'", "did you mean 'answer'?"]),
        ({"hidden_task_fields": ["answer", "task_id"]}, ["'task_id'", "answer, question"]),
        ({"agent_read_only": ["promts"]}, ["env.agent_read_only", "/promts'"]),
        ({"agent_command": "sh agent.sh {qestion}"}, ["did you mean 'question'?"]),
        ({"agent_sandbox": "auto"}, ["env.agent_sandbox", "'bubblewrap' or 'none'"]),
    ],
)
def test_names_in_values_that_name_nothing_are_refused(
    env: dict[str, Any], words: list[str], folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """A misspelt field would be shown to the policy, and a misspelt folder would be missing."""
    (folder / "checks.py").write_text(VERIFIER)
    (folder / "agent.sh").write_text("echo 1\n")
    good = {
        "rollout_function_path": None,
        "tasks": "checks:tasks",
        "agent_command": "sh agent.sh {question}",
        "verifier": "checks:verify",
        "hidden_task_fields": ["answer"],
    }
    with pytest.raises(SettingsError) as caught:
        check_rollout(make_settings(**(good | env)))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.medium
def test_a_machine_without_bubblewrap_is_refused_before_anything_starts(
    folder: Path, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs unconfined unless the settings say so, and the sentence names both ways."""
    (folder / "checks.py").write_text(VERIFIER)
    (folder / "agent.py").write_text("print(1)\n")
    env = {
        "rollout_function_path": None,
        "tasks": "checks:tasks",
        "agent_command": f"{sys.executable} agent.py",
        "verifier": "checks:verify",
    }
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(SettingsError) as caught:
        check_rollout(make_settings(**env))
    for words in ("no bwrap on PATH", "apt-get install bubblewrap", 'env.agent_sandbox = "none"'):
        assert words in str(caught.value)
    check_rollout(make_settings(**env, agent_sandbox="none"))


@pytest.mark.medium
async def test_a_program_that_asks_for_time_gets_it(router: Any, play_program: Any) -> None:
    """At its deadline a program is asked to end before it is ended, in its sandbox too."""
    agent = (
        "import signal, sys, time\n"
        "def end(number, frame):\n    print('tidied up', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('here', flush=True)\ntime.sleep(600)\n"
    )
    router.num_episodes = 1
    router.deadline_s = 6.0
    await play_program(router, agent, agent_sandbox="bubblewrap", verifier_timeout_s=2.0)
    assert router.closed("output") == ["here\ntidied up"]
    assert router.closed("outcome") == ["truncated"]


@pytest.mark.medium
async def test_what_cannot_be_started_leaves_no_descriptor(tmp_path: Path) -> None:
    """Too long arguments, a missing folder and a cancelled start cost nothing that stays."""
    limits = command.Limits(time_s=5, memory_mb=100, output_bytes=1000, kept_bytes=1000)

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def start(*words: str, folder: Path = tmp_path) -> None:
        await command.run(["true", *words], limits, env={}, folder=folder)

    await start()
    before = num_open()
    for _ in range(5):
        with pytest.raises(EnvironmentFailure, match="could not be started"):
            await start("x" * 2**22)
        with pytest.raises(EnvironmentFailure, match="could not be started"):
            await start(folder=tmp_path / "missing")
        for _ in range(3):
            starting = asyncio.create_task(start())
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
    async with asyncio.timeout(30):
        while num_open() > before:
            await asyncio.sleep(0.02)
