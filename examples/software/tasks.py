"""Three small repositories, in Python, JavaScript and C, with a bug in each of their revisions.

    python tasks.py     # scores of an agent that does nothing and of the right fix, in the sandbox

The repositories are made in runs/software-repositories. A tag such as `clamp-1` is a revision with
one bug; the branch `main` has none. Tests expect values of the functions that are computed here,
and never enter a sandbox.
"""

import asyncio
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from agent import BASH, SYSTEM_PROMPT

from outloop.buffer.records import Task
from outloop.envs.adapters import software
from outloop.envs.tasks.splits import split_of
from outloop.envs.verifiers.repository_tests import RepositoryTests, read_files

FUNCTIONS = {
    "clamp": (3, lambda x, low, high: min(max(x, low), high)),
    "sign": (1, lambda x: (x > 0) - (x < 0)),
    "gcd": (2, lambda a, b: a if b == 0 else FUNCTIONS["gcd"][1](b, a % b)),
}
ISSUES = {
    "clamp": "clamp(x, low, high) must be x, but at least low and at most high",
    "sign": "sign(x) must be 1, 0 or -1",
    "gcd": "gcd(a, b) must be the greatest common divisor",
}
PYTHON = """\
def clamp(x, low, high):
    if x < low:
        return low
    if x > high:
        return high
    return x


def sign(x):
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def gcd(a, b):
    while b:
        a, b = b, a % b
    return a
"""
JAVASCRIPT = """\
export function clamp(x, low, high) {
    if (x < low) return low;
    if (x > high) return high;
    return x;
}

export function sign(x) {
    if (x > 0) return 1;
    if (x < 0) return -1;
    return 0;
}

export function gcd(a, b) {
    while (b) [a, b] = [b, a % b];
    return a;
}
"""
C = """\
int clamp(int x, int low, int high)
{
    if (x < low) return low;
    if (x > high) return high;
    return x;
}

int sign(int x)
{
    if (x > 0) return 1;
    if (x < 0) return -1;
    return 0;
}

int gcd(int a, int b)
{
    while (b) { int rest = a % b; a = b; b = rest; }
    return a;
}
"""
CHECK_PYTHON = """\
import json, sys
sys.path.insert(0, "src")
import rules
for line in sys.stdin:
    name, *numbers = json.loads(line)
    print(getattr(rules, name)(*numbers))
"""
CHECK_JAVASCRIPT = """\
import * as rules from "./src/rules.mjs";
import { readFileSync } from "node:fs";
for (const line of readFileSync(0, "utf8").trim().split("\\n")) {
    const [name, ...numbers] = JSON.parse(line);
    console.log(rules[name](...numbers));
}
"""
CHECK_C = """\
#include <stdio.h>
int clamp(int, int, int); int sign(int); int gcd(int, int);
int main(void)
{
    char name; int a, b, c;
    while (scanf(" [\\"%c%*[a-z]\\",%d,%d,%d]", &name, &a, &b, &c) == 4)
        printf("%d\\n", name == 'c' ? clamp(a, b, c) : name == 's' ? sign(a) : gcd(a, b));
    return 0;
}
"""
LANGUAGES = {
    "python": ("src/rules.py", PYTHON, "check.py", CHECK_PYTHON, ["python3", "check.py"], []),
    "javascript": (
        *("src/rules.mjs", JAVASCRIPT, "check.mjs", CHECK_JAVASCRIPT),
        *(["node", "check.mjs"], []),
    ),
    "c": (
        *("src/rules.c", C, "check.c", CHECK_C),
        *(["./check"], ["gcc", "-O1", "-o", "check", "check.c", "src/rules.c"]),
    ),
}
BUGS = {
    "clamp-1": ("x < low", "x <= low - 2"),
    "clamp-2": ("return high", "return low"),
    "clamp-3": ("x > high", "x > high + 3"),
    "clamp-4": ("return low", "return low + 1"),
    "clamp-5": ("return high", "return high - 1"),
    "sign-1": ("x > 0", "x > 1"),
    "sign-2": ("return -1", "return 1"),
    "sign-3": ("return 1", "return 2"),
    "sign-4": ("return -1", "return -2"),
    "gcd-1": ("return a", "return b"),
    "gcd-2": ("a % b", "b % a"),
    "gcd-3": ("return a", "return a + 1"),
}
"""Tag -> what a line holds, and what it holds in that revision. All three languages hold them."""
HELD_OUT = ("clamp-2", "sign-1")
"""Bugs that training never sees; those of the curve are known, and told by other calls."""
EDITS = {
    "clamp-2": "/x > high/,+1s/return low/return high/",
    "sign-2": "/x < 0/,+1s/return 1/return -1/",
}
"""What `sed` is to do where a bug cannot be told by its text alone."""
SHARES = {"train": 8, "validation": 1, "test": 1}
NUM_CALLS = 12
"""How many failing calls are known of each bug in each language: an issue quotes one."""

NUM_CONVERSATIONS = 6000
SLIPS = {"nothing": 0.3, "file": 0.25, "bug": 0.15}
"""How often the scripted player does nothing, edits a file that is not there, or undoes another bug
of the function; otherwise it is right."""


def repositories() -> Path:
    """The folder with the three repositories; made where it is missing, at once or not at all."""
    folder = Path("runs/software-repositories").resolve()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as half:
            made = Path(half) / "made"
            for language in LANGUAGES:
                make_repository(made / language, language)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                assert folder.is_dir()
    return folder


def make_repository(folder: Path, language: str) -> None:
    """`main` without a bug, and a tag for each bug."""
    path, source, *_ = LANGUAGES[language]
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    environ = {**os.environ, **who, "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", folder, *words], check=True, env=environ, capture_output=True)

    (folder / "src").mkdir(parents=True)
    git("init", "--initial-branch=main")
    for tag in ("", *BUGS):
        (folder / path).write_text(with_bug(source, tag) if tag else source)
        git("add", "--all")
        git("commit", "--message", tag or "Rules for numbers")
        if tag:
            git("tag", tag)
            git("reset", "--hard", "HEAD~1")


def with_bug(source: str, tag: str) -> str:
    """A source as the revision has it."""
    return source.replace(*BUGS[tag], 1)


def calls(name: str) -> list[list]:
    """Calls of one function that show its bugs, among others."""
    rng = random.Random(name)
    arity, _ = FUNCTIONS[name]
    chosen = [sorted(rng.randint(1, 40) for _ in range(arity)) for _ in range(6)]
    edges = {
        "clamp": [[0, 1, 5], [9, 0, 5], [-7, -3, 3], [6, 0, 5]],
        "sign": [[1], [0], [-1], [-12]],
        "gcd": [[12, 18], [18, 12], [7, 5], [9, 0]],
    }
    return [[name, *numbers] for numbers in edges[name] + chosen]


def failing_calls(tag: str, language: str) -> list[str]:
    """What an issue says of a bug: calls, what they are, and what they must be."""
    name = tag.partition("-")[0]
    arity, function = FUNCTIONS[name]
    broken: dict = {}
    exec(with_bug(PYTHON, tag), broken)
    rng = random.Random(f"{tag} {language}")
    found: list[str] = []
    for _ in range(1000):
        numbers = [rng.randint(-9 if name == "sign" else 0, 20) for _ in range(arity)]
        if name == "clamp":
            numbers[1:] = sorted(numbers[1:])
        if name == "gcd":
            numbers = [number + 1 for number in numbers]
        is_now, must_be = broken[name](*numbers), function(*numbers)
        text = f"{name}({', '.join(map(str, numbers))}) is {is_now}, not {must_be}"
        if is_now != must_be and text not in found:
            found.append(text)
    return found[:NUM_CALLS]


@cache
def made_task(language: str, tag: str) -> dict:
    """A task without its issue."""
    _, _, check, text, command, build = LANGUAGES[language]
    name = tag.partition("-")[0]
    arity, function = FUNCTIONS[name]
    padding = [0] * (3 - arity) if language == "c" else []
    tests = [
        {
            "command": command,
            "stdin": "".join(
                json.dumps(call + padding, separators=(",", ":")) + "\n" for call in some
            ),
            "stdout": "\n".join(str(function(*call[1:])) for call in some),
        }
        for some in (calls(name)[:4], calls(name)[4:])
    ]
    return software.task(
        repositories() / language,
        tag,
        "",
        editable=["src"],
        tests=tests,
        hidden_files={check: text},
        build=build,
        max_turns=4,
        timeout_s=60.0,
    )


def rows(tags: Iterable[str], split: str | None = None) -> list[dict]:
    """Tasks of these bugs in each language; a hash of the issue decides its split."""
    found = []
    for language, (path, *_) in LANGUAGES.items():
        for tag in tags:
            must = ISSUES[tag.partition("-")[0]]
            for call in failing_calls(tag, language):
                issue = f"{call}: {must}. See {path}"
                if split is None or split_of(issue, SHARES) == split:
                    found.append({**made_task(language, tag), "issue": issue})
    random.Random(0).shuffle(found)
    return found


def trained_bugs() -> list[str]:
    """The tags of bugs that training sees."""
    return [tag for tag in BUGS if tag not in HELD_OUT]


def train_tasks() -> list[dict]:
    """What RL practises on."""
    return rows(trained_bugs(), "train")


def eval_tasks() -> list[dict]:
    """What the curve is measured on: bugs of training, told by calls that no training issue has."""
    return rows(trained_bugs(), "test")


def unseen_bug_tasks() -> list[dict]:
    """Bugs that training never sees, for models that can read the code."""
    return rows(HELD_OUT)


def fix(tag: str, path: str) -> str:
    """The command that undoes a bug."""
    right, wrong = BUGS[tag]
    return f"sed -i '{EDITS.get(tag, f's/{wrong}/{right}/')}' {path}"


def scripted_player(row: dict, rng: random.Random) -> str:
    """A command that often slips; empty for none."""
    tag, path = row["revision"], row["issue"].rpartition(" ")[2]
    (slip,) = rng.choices([*SLIPS, ""], [*SLIPS.values(), 1 - sum(SLIPS.values())])
    if slip == "nothing":
        return ""
    if slip == "file":
        path = rng.choice([other for other, *_ in LANGUAGES.values() if other != path])
    if slip == "bug":
        name = tag.partition("-")[0]
        tag = rng.choice([one for one in trained_bugs() if one.startswith(name) and one != tag])
    return fix(tag, path)


def oracle_player(row: dict, rng: random.Random) -> str:
    """The right command; no policy ever learns from it."""
    return fix(row["revision"], row["issue"].rpartition(" ")[2])


def played(row: dict, command: str) -> list[dict]:
    """The conversation in which the agent runs it, if it runs anything."""
    path = row["issue"].rpartition(" ")[2]
    missing = (
        f"sed: can't read {command.rpartition(' ')[2]}: No such file or directory\n\n[exit code 2]"
    )
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "call_0", "type": "function", "function": function}
    shown = "" if command.endswith(f" {path}") else missing
    ran = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": shown},
    ]
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": row["issue"]},
        *(ran if command else []),
        {"role": "assistant", "content": "DONE"},
    ]


def conversations() -> list[dict]:
    """What the warm start learns from: the scripted player on training issues."""
    rng = random.Random(1)
    chosen = train_tasks()
    some = [chosen[index % len(chosen)] for index in range(NUM_CONVERSATIONS)]
    return [{"messages": played(row, scripted_player(row, rng)), "tools": [BASH]} for row in some]


async def score(row: dict, is_fixed: bool) -> float:
    """What the tests say of the revision as it is, or as `main` has it."""
    verifier = RepositoryTests()
    task = Task(task_id="t", payload=row)
    wanted = Task(task_id="t", payload={**row, "revision": "main"} if is_fixed else row)
    try:
        return await verifier.score(task, read_files(await verifier.base(wanted), ["src"]))
    finally:
        await verifier.tear_down()


if __name__ == "__main__":
    for row in (one for tag in BUGS for one in rows([tag])[::NUM_CALLS]):
        before, after = (asyncio.run(score(row, is_fixed)) for is_fixed in (False, True))
        print(Path(row["repository"]).name, row["revision"], before, after)
