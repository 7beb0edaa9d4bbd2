"""Harbor task folders, worked on in the sandbox and scored by their own tests."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.envs.adapters import harbor

PlayWith = Callable[..., Any]

TASK = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 10.0
[verifier]
timeout_sec = 8.0
[environment]
memory_mb = 512
"""
TEST = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.25 > /logs/verifier/reward.txt
fi
"""
SOURCE = """
from outloop.envs.adapters import harbor
from outloop.envs.adapters.harbor import Harbor

def games():
    return harbor.tasks("terminal")
"""
OPTIONS = {"tasks": "user:games", "rollout_function_path": "user:Harbor"}


def write_task(folder: Path, **files: str) -> Path:
    """A task in the layout that Harbor documents; `files` by path, `__` for a slash."""
    contents = {
        "task.toml": TASK,
        "instruction.md": "Write the word in word.txt backwards into answer.txt.",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY word.txt .\n",
        "environment/word.txt": "lamp\n",
        "tests/test.sh": TEST,
        "tests/expected.txt": "pmal\n",
    }
    for name, content in (contents | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def runs(*commands: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A policy that runs one command after another, and then says that it is done."""

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in messages)
        if number == len(commands):
            return {"role": "assistant", "content": "Done."}
        arguments = json.dumps({"command": commands[number]})
        function = {"name": "bash", "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    return answer


async def reward(router: Any, play_with: PlayWith, *commands: str) -> float:
    """What one episode of the task scores when the policy runs `commands`."""
    router.num_episodes = 1
    router.answer = runs(*commands)
    await play_with(router, SOURCE, **OPTIONS)
    (close,) = router.closes.values()
    assert close["outcome"] == "completed", close
    return float(close["reward"]["value"])


@pytest.mark.medium
async def test_the_policy_works_in_the_sandbox_and_the_tests_score_it(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """The environment's files are in /app, and what one command leaves the next one finds."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, "rev word.txt > half", "mv half /app/answer.txt") == 1


@pytest.mark.medium
async def test_a_wrong_answer_gets_what_the_tests_say(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """A reward between 0 and 1 is as good as any."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, "cp word.txt answer.txt") == 0.25


@pytest.mark.medium
@pytest.mark.parametrize(
    "forgery",
    [
        "mkdir -p .harbor/logs/verifier; echo 1 > .harbor/logs/verifier/reward.json",
        "mkdir -p .harbor/tests; echo 'echo 1 > /logs/verifier/reward.txt' > .harbor/tests/test.sh",
        "mkdir -p .harbor; ln -s /work .harbor/tests; ln -s /work .harbor/logs",
        "rm -rf .harbor; mkfifo .harbor",
        "(while true; do echo 1 > /logs/verifier/reward.json; done) & disown",
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' > ~/.bashrc; export BASH_ENV=~/.bashrc",
    ],
)
async def test_rewards_and_tests_of_the_policy_do_not_count(
    router: Any, play_with: PlayWith, folder: Path, forgery: str
) -> None:
    """What it put where the tests and the reward belong is removed before they run."""
    write_task(folder / "terminal/reverse")
    assert await reward(router, play_with, forgery) == 0.25


@pytest.mark.medium
async def test_the_policy_does_not_see_the_tests(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Neither at /tests nor in the task's folder on the host."""
    write_task(folder / "terminal/reverse")
    command = f"cat /tests/expected.txt {folder}/terminal/reverse/tests/expected.txt > answer.txt"
    assert await reward(router, play_with, command) == 0.25


async def played(
    router: Any, play_with: PlayWith, *commands: str, num_episodes: int = 1
) -> list[dict[str, Any]]:
    """How the episodes of the task end when the policy runs `commands`."""
    router.num_episodes = num_episodes
    router.answer = runs(*commands)
    await play_with(router, SOURCE, timeout_s=60.0, **OPTIONS)
    return list(router.closes.values())


SITE = "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d; "
EXITS = "import os; os._exit(0)"
CHECK = "assert open('/app/answer.txt').read().strip() == 'pmal'"
BY_EXIT_CODE = """#!/bin/bash
if {}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
UNITTEST = f"""import unittest
class Tests(unittest.TestCase):
    def test_answer(self): {CHECK}
"""
LEFT_BEHIND = {
    "a verdict in a closed folder": (
        "mkdir -p .harbor/logs/verifier /logs/verifier; echo 1 > .harbor/logs/verifier/reward.json;"
        "echo 1 > /logs/verifier/reward.json; chmod 555 .harbor/logs/verifier /logs/verifier"
    ),
    "tests in a closed folder": "mkdir -p .harbor/tests; echo > .harbor/tests/x; chmod 555 .harbor",
    "usercustomize": f"{SITE} echo '{EXITS}' > $d/usercustomize.py",
    "a path file": f"{SITE} echo '{EXITS}' > $d/x.pth",
    "a module of Python's": f"for m in re os unittest json; do echo '{EXITS}' > $m.py; done",
    "a package of Python's": (
        f"mkdir unittest; echo '{EXITS}' > unittest/__init__.py; cp unittest/__init__.py"
        " unittest/__main__.py"
    ),
    "sitecustomize": f"echo '{EXITS}' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "profiles": (
        "for f in .bashrc .profile .bash_profile .pythonrc; do echo 'exit 0' > $f; done;"
        "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod 755 bin/python3"
    ),
    "a link to the tests": "ln -s /tests/expected.txt answer.txt",
    "a link by a link": "ln -s . here; ln -s here/../tests/expected.txt answer.txt",
    "a relative link": "ln -s ../outloop/given/tests/expected.txt answer.txt",
    "a link of a folder": "ln -s /tests t; ln -s t/expected.txt answer.txt",
    "a FIFO": "mkfifo answer.txt",
    "a socket": "python3 -c 'import socket; socket.socket(1).bind(\"answer.txt\")'",
    "a full disk": "echo no > answer.txt; head -c 400M /dev/zero > big",
    "many files": "seq 5000 | xargs touch",
    "sparse files": "for i in $(seq 30); do truncate -s 200M s$i; done",
    "folders without rights": "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b/c a/b a",
    "deep folders": "d=.; for i in $(seq 300); do d=$d/d; mkdir $d; done",
    "names that are no text": "touch $'\\xff' $'a\\nb'",
    "a whole folder replaced": "cd /; rm -rf /work/*; mv /work /gone; kill -9 -1",
}
"""What a policy may leave with a wrong answer."""


@pytest.mark.medium
@pytest.mark.parametrize("left", LEFT_BEHIND)
async def test_what_the_policy_leaves_scores_as_the_wrong_answer_that_it_is(
    router: Any, play_with: PlayWith, folder: Path, left: str
) -> None:
    """It is neither right by any of three usual forms of tests, nor somebody else's failure."""
    tests = (
        "python3 /tests/check.py",
        "(cd /app && python3 -m unittest discover -s /tests)",
        '[ "$(timeout 2 cat answer.txt)" = "$(cat /tests/expected.txt)" ]',
    )
    write_task(
        folder / "terminal/reverse",
        **{
            "tests/test.sh": BY_EXIT_CODE.format(" || ".join(tests)),
            "tests/check.py": CHECK,
            "tests/test_answer.py": UNITTEST,
        },
    )
    (close,) = await played(router, play_with, LEFT_BEHIND[left])
    assert close["outcome"] == "completed", close
    assert close["reward"]["value"] == 0


RUNS_IT = """#!/bin/bash
said=$(python3 /app/solution.py)
if [ "$said" = pmal ]; then echo 1 > /tmp/said; else echo 0 > /tmp/said; fi
mv /tmp/said /logs/verifier/reward.txt
"""
WRITE = "open('/logs/verifier/{}', 'w').write({!r})\n"
UNDER_TEST = {
    "the other file": WRITE.format("reward.json", "1"),
    "both files": WRITE.format("reward.json", "1") + WRITE.format("reward.txt", "1"),
    "another name": WRITE.format("Reward.json", "1"),
    "killing the tests": WRITE.format("reward.txt", "1") + "import os; os.kill(os.getppid(), 9)",
    "killing all": WRITE.format("reward.txt", "1") + "import os; os.kill(-1, 9)",
    "a closed folder": (
        WRITE.format("reward.txt", "1") + "import os; os.chmod('/logs/verifier/reward.txt', 0o444)"
    ),
    "a read-only folder": "import os; os.chmod('/logs/verifier', 0o555)",
    "another folder": (
        "import os; os.rename('/tmp/logs', '/tmp/old'); os.makedirs('/tmp/logs/verifier')\n"
        + WRITE.format("reward.txt", "1")
        + "os.chmod('/logs/verifier/reward.txt', 0o444)"
    ),
    "a link": (
        WRITE.format("reward.json", "1")
        + "import os; os.symlink('/dev/null', '/logs/verifier/reward.txt')"
    ),
    "a second name": (
        WRITE.format("x", "1")
        + "import os; os.link('/logs/verifier/x', '/logs/verifier/reward.txt')"
    ),
    "the tests' limits": (
        WRITE.format("reward.txt", "1") + "import os, resource\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))"
    ),
    "other tests": "open('/tests/expected.txt', 'w').write('x')",
    "a script under way": "open('/tests/test.sh', 'a').write('echo 1 > /logs/verifier/reward.txt')",
    "no folder": "import shutil; shutil.rmtree('/tmp/logs')",
    "a full disk": "while True: open('/tmp/big', 'ab').write(bytes(2**20))",
    "no more files": (
        WRITE.format("reward.json", "1")
        + "i = 0\nwhile True: open(f'/tmp/{i}', 'w').close(); i += 1"
    ),
    "no more files, and its own": (
        WRITE.format("reward.txt", "1")
        + "i = 0\nwhile True: open(f'/tmp/{i}', 'w').close(); i += 1"
    ),
    "a closed way": WRITE.format("reward.txt", "1") + "import os; os.chmod('/tmp/logs', 0)",
    "a linked folder": (
        "import os; os.rename('/logs/verifier', '/logs/old'); os.symlink('old', '/logs/verifier')\n"
        + WRITE.format("reward.txt", "1")
        + "os.chmod('/logs/old/reward.txt', 0o444)"
    ),
    "a folder in its place": "import os; os.mkdir('/logs/verifier/reward.txt')",
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "much memory": "x = bytearray(3 * 2**30)",
    "no end": "while True: pass",
    "stopped tests": "import os; os.kill(os.getppid(), 19)",
}
"""What a wrong solution may do when the tests run it."""


@pytest.mark.medium
@pytest.mark.parametrize("done", UNDER_TEST)
async def test_what_a_solution_does_when_it_is_tested_scores_nothing(
    router: Any, play_with: PlayWith, folder: Path, done: str
) -> None:
    """The untouched folder is judged without trouble, so that the trouble is the solution's."""
    write_task(
        folder / "terminal/reverse",
        **{"tests/test.sh": RUNS_IT, "task.toml": TASK.replace("8.0", "3.0")},
    )
    put = f"cat > solution.py <<'END'\n{UNDER_TEST[done]}\nEND"
    (close,) = await played(router, play_with, put)
    assert close["outcome"] == "completed", close
    assert close["reward"]["value"] == 0


@pytest.mark.medium
@pytest.mark.parametrize("written", ["nan", "inf", "-1", "1e9", "1e308", "true", "1 1", "", "0x1"])
@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
async def test_a_reward_that_is_no_number_from_0_to_1_is_0(
    router: Any, play_with: PlayWith, folder: Path, written: str, name: str
) -> None:
    """Where the tests write what the policy's program prints."""
    test = f"if [ -f /app/say ]; then cat /app/say; else echo 0; fi > /logs/verifier/{name}"
    write_task(folder / "terminal/reverse", **{"tests/test.sh": test})
    assert await reward(router, play_with, f"printf '{written}' > say") == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("written", "value", "components"),
    [
        ('{"reward": 0.5}', 0.5, {}),
        ('{"reward": 0.5, "style": 1}', 0.5, {"style": 1.0}),
        ('{"right": 0.5, "style": 0.25}', 0.75, {"right": 0.5, "style": 0.25}),
        ('{"right": 0.5, "style": NaN}', 0.0, {}),
        ('{"right": 0.5, "style": true}', 0.0, {}),
        ("{}", 0.0, {}),
        ("[1]", 0.0, {}),
    ],
)
async def test_keys_of_a_reward_are_components(
    router: Any,
    play_with: PlayWith,
    folder: Path,
    written: str,
    value: float,
    components: dict[str, float],
) -> None:
    """One bad number makes all of it 0."""
    test = "#!/bin/bash\nif [ -f say ]; then cat say; else echo 0; fi > /logs/verifier/reward.json"
    write_task(folder / "terminal/reverse", **{"tests/test.sh": test})
    (close,) = await played(router, play_with, f"printf '{written}' > say")
    assert close["reward"]["value"] == value
    assert close["reward"].get("components", {}) == components


@pytest.mark.medium
async def test_a_right_answer_is_found_right_however_it_is_kept(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Modes, links that stay inside, modules beside the tests and in /app arrive."""
    check = "import wanted, mine\nassert mine.answer == wanted.answer"
    test = BY_EXIT_CODE.format(
        "cd /app && ./run && /tests/run && python3 /tests/check.py && [ $LEVEL = 3 ]"
    )
    write_task(
        folder / "terminal/reverse",
        **{
            "task.toml": TASK + "[verifier.env]\nLEVEL = '3'\n",
            "tests/test.sh": test,
            "tests/run": "#!/bin/sh\ngrep -q pmal answer.txt",
            "tests/check.py": check,
            "tests/wanted.py": "answer = 'pmal'",
        },
    )
    (folder / "terminal/reverse/tests/run").chmod(0o755)
    commands = (
        "mkdir out; rev word.txt > out/answer; ln -s out/answer answer.txt",
        "printf '#!/bin/sh\\ngrep pmal answer.txt' > run; chmod 755 run",
        "echo \"answer = 'pmal'\" > mine.py",
    )
    assert await reward(router, play_with, *commands) == 1


@pytest.mark.medium
async def test_tests_that_cannot_judge_the_untouched_folder_are_the_environments_failure(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """It never scores zero; the sentence holds what they printed."""
    write_task(folder / "terminal/broken", **{"tests/test.sh": "echo no reward; exit 1"})
    (close,) = await played(router, play_with)
    assert (close["failure_kind"], close["reward"]) == ("environment", None)
    assert "wrote no reward to /logs/verifier: no reward" in close["error"]


@pytest.mark.medium
async def test_tests_that_write_a_reward_only_for_a_right_answer_say_0_for_a_wrong_one(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """With `set -e` they end early, of the untouched folder too."""
    test = "set -e\ngrep -q pmal /app/answer.txt\necho 1 > /logs/verifier/reward.txt\n"
    write_task(folder / "terminal/reverse", **{"tests/test.sh": test})
    assert await reward(router, play_with, "echo wrong > answer.txt") == 0


DOCKERFILE = "FROM x\nWORKDIR /app\n"
REFUSED = {
    "images are not built here": {"environment/Dockerfile": "FROM x\nRUN apt-get install y\n"},
    "agent=3": {"task.toml": "agent = 3"},
    "Invalid": {"task.toml": "= 3"},
    "steps": {"task.toml": TASK + "[[steps]]\nname = 'a'\n"},
    "verifier.environment_mode": {
        "task.toml": TASK.replace("[verifier]", "[verifier]\nenvironment_mode = 'separate'")
    },
    "verifier.user": {"task.toml": TASK.replace("[verifier]", "[verifier]\nuser = 'agent'")},
    "agent.user": {"task.toml": TASK.replace("[agent]", "[agent]\nuser = 'agent'")},
    "environment.workdir": {"task.toml": TASK + "workdir = '/src'\n"},
    "environment.docker_image": {"task.toml": TASK + "docker_image = 'x'\n"},
    "environment.mcp_servers": {"task.toml": TASK + "[[environment.mcp_servers]]\nname = 'a'\n"},
    "environment.healthcheck": {"task.toml": TASK + "[environment.healthcheck]\ncommand = 'a'\n"},
    "environment.allow_internet": {"task.toml": TASK + "allow_internet = true\n"},
    "environment.gpus": {"task.toml": TASK + "gpus = 1\n"},
    "environment.new_field": {"task.toml": TASK + "new_field = 1\n"},
    "environment.env.HOST": {"task.toml": TASK + "[environment.env]\nHOST = '${HOST}'\n"},
    "verifier.env.N": {"task.toml": TASK + "[verifier.env]\nN = 3\n"},
    "agent.timeout_sec": {"task.toml": TASK.replace("10.0", "nan")},
    "verifier.timeout_sec": {"task.toml": TASK.replace("8.0", "true")},
    "environment.memory_mb": {"task.toml": TASK.replace("512", "-1")},
    "docker-compose.yaml": {"environment/docker-compose.yaml": "services: {}"},
    "tests/Dockerfile": {"tests/Dockerfile": "FROM x"},
    "WORKDIR /src": {"environment/Dockerfile": "FROM x\nWORKDIR /src\n"},
    "COPY word.txt /data/": {"environment/Dockerfile": DOCKERFILE + "COPY word.txt /data/\n"},
    "COPY --chown": {"environment/Dockerfile": DOCKERFILE + "COPY --chown=1 word.txt .\n"},
    "COPY none.txt": {"environment/Dockerfile": DOCKERFILE + "COPY none.txt .\n"},
    "ADD": {"environment/Dockerfile": DOCKERFILE + "ADD http://a/b.tar .\n"},
    "ENTRYPOINT": {"environment/Dockerfile": DOCKERFILE + "ENTRYPOINT serve\n"},
    "USER": {"environment/Dockerfile": DOCKERFILE + "USER agent\n"},
    "one FROM": {"environment/Dockerfile": DOCKERFILE + "FROM y\n"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_tasks_that_would_mean_something_else_here_are_refused(tmp_path: Path, named: str) -> None:
    """When they are read, with the folder and the field."""
    write_task(tmp_path / "task", **REFUSED[named])
    with pytest.raises(SettingsError, match=f"Harbor task .*/task'.*{re.escape(named)}"):
        harbor.tasks(tmp_path)


@pytest.mark.medium
async def test_a_dockerfile_says_what_is_where(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Folders are copied by their content, files under another name; variables are set."""
    dockerfile = (
        "# comment\nFROM x AS base\nWORKDIR /app\nENV LEVEL=3 NAME='a b'\nENV OLD form it is\n"
        "COPY src/ lib/\nCOPY word.txt \\\n  other.txt\nCOPY word.txt src/a /app/both/\nCMD x\n"
    )
    write_task(
        folder / "terminal/reverse",
        **{
            "environment/Dockerfile": dockerfile,
            "environment/src/a": "a",
            "environment/src/deep/b": "b",
            "tests/test.sh": "cp seen /logs/verifier/reward.txt",
        },
    )
    look = (
        'seen="$(find . -type f | sort | tr "\\n" " ")$LEVEL$NAME$OLD"; wanted="./both/a '
        './both/word.txt ./lib/a ./lib/deep/b ./other.txt 3a bform it is"; '
        '[ "$seen" = "$wanted" ] && echo 1 > seen || { echo 0 > seen; echo "$seen" >&2; }'
    )
    assert await reward(router, play_with, look) == 1


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    """And so is one whose tests are missing."""
    with pytest.raises(SettingsError, match=r"no task\.toml below it"):
        harbor.tasks(tmp_path)
    (write_task(tmp_path / "task") / "tests/test.sh").unlink()
    with pytest.raises(SettingsError, match=r"tests/test\.sh is missing"):
        harbor.tasks(tmp_path)
    assert harbor.tasks(write_task(tmp_path / "task"))[0]["deadline_s"] == 18.0
