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
from pathlib import Path

from outloop.buffer.records import Task
from outloop.envs.adapters import software
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
    "clamp-1": [("x < low", "x <= low - 2")],
    "clamp-2": [("return high", "return low")],
    "sign-1": [("x > 0", "x > 1")],
    "sign-2": [("return -1", "return 1")],
    "gcd-1": [("return a", "return b")],
    "gcd-2": [("a % b", "b % a")],
}
"""Tag -> what a line holds, and what it holds in that revision. All three languages hold them."""
HELD_OUT = ("clamp-2", "sign-1")


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
    for tag, pairs in {"": [], **BUGS}.items():
        text = source
        for right, wrong in pairs:
            text = text.replace(right, wrong, 1)
        (folder / path).write_text(text)
        git("add", "--all")
        git("commit", "--message", tag or "Rules for numbers")
        if tag:
            git("tag", tag)
            git("reset", "--hard", "HEAD~1")


def calls(name: str) -> list[list]:
    """Calls of one function that show its bugs, among others."""
    rng = random.Random(name)
    arity, _ = FUNCTIONS[name]
    chosen = [sorted(rng.randint(1, 40) for _ in range(arity)) for _ in range(6)]
    edges = {
        "clamp": [[0, 1, 5], [9, 0, 5], [-7, -3, 3], [5, 5, 5]],
        "sign": [[1], [0], [-1], [-12]],
        "gcd": [[12, 18], [18, 12], [7, 5], [9, 0]],
    }
    return [[name, *numbers] for numbers in edges[name] + chosen]


def rows(tags: list[str]) -> list[dict]:
    """A task for each of the bugs in each language."""
    found = []
    for language, (_, _, check, text, command, build) in LANGUAGES.items():
        for tag in tags:
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
            found.append(
                software.task(
                    repositories() / language,
                    tag,
                    f"{ISSUES[name]}. It is in src.",
                    editable=["src"],
                    tests=tests,
                    hidden_files={check: text},
                    build=build,
                    timeout_s=60.0,
                )
            )
    return found


def train_tasks() -> list[dict]:
    """What RL practises on."""
    return rows([tag for tag in BUGS if tag not in HELD_OUT])


def eval_tasks() -> list[dict]:
    """Bugs that training never sees."""
    return rows(list(HELD_OUT))


def conversations() -> list[dict]:
    """What a tokenizer is made from: issues, sources, and a tool call."""
    sources = "\n".join(source for _, source, *_ in LANGUAGES.values())
    call = json.dumps({"command": "sed -i 's/x <= low - 2/x < low/' src/rules.py"})
    texts = [*ISSUES.values(), sources, call]
    return [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": call}]}
        for t in texts
    ]


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
    for row in train_tasks() + eval_tasks():
        before, after = (asyncio.run(score(row, is_fixed)) for is_fixed in (False, True))
        print(Path(row["repository"]).name, row["revision"], before, after)
