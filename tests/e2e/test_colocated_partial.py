"""Partial rollouts where one device serves and trains: turns are held while the server's memory is
away, and go on from their tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from outloop.buffer.open_run import joined
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.trajectories.reading import read_trajectories

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 4, 3, 2
NUM_LONG_GROUPS = 2
"""Fewer than a step leaves, so that the first step is made of short ones."""
ROLLOUTS = f'''
import asyncio
import os
import sys
from pathlib import Path

ORDER = {{}}


def tasks():
    return [{{"question": f"say {{i}}"}} for i in range(64)]


def eval_tasks():
    return [{{"question": "hold"}}]


async def play(task, episode):
    """The first tasks are long: a program calls without a pause until it has met a publish. The
    others make one call, after all of these programs have made one."""
    order = ORDER.setdefault(task.task_id, len(ORDER))
    if order < {NUM_LONG_GROUPS}:
        return await call(task, episode, "long")
    while len(list(Path().glob("calling-*"))) < {NUM_LONG_GROUPS * GROUP_SIZE}:
        await asyncio.sleep(0.02)
    return await call(task, episode, "short")


async def call(task, episode, kind):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "caller.py", kind, task.payload["question"],
        stdout=asyncio.subprocess.PIPE, env={{**os.environ, **episode.environ()}},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return float(output)
'''
CALLER = """
import json
import os
import sys
import urllib.request
from pathlib import Path

kind, question = sys.argv[1:]
max_tokens = {"short": 24, "long": 160}[kind]
messages, score, is_over = [], 0, False
while not is_over:
    if len(messages) == 4:
        messages = []
    messages.append({"role": "user", "content": question})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": max_tokens}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    # Nothing is tried twice: whatever is not an answer ends the program, and so the attempt.
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    messages.append(answer["choices"][0]["message"])
    score += sum(character.isdigit() for character in messages[-1]["content"] or "")
    Path("calling-" + os.environ["OUTLOOP_EPISODE_ID"]).touch()
    is_over = kind == "short" or answer["system_fingerprint"] != "policy_version=0"
print(score)
"""


@pytest.mark.slow
def test_turns_wait_for_the_trainer_and_go_on_from_their_tokens(
    workspace: Path,
    write_config: Callable[..., Path],
    outloop: Callable[..., CompletedProcess[str]],
    read_metrics: Callable[[Path], list[dict[str, float]]],
) -> None:
    """A step takes the short groups; the long ones meet its hand-over in the middle of a turn, get
    an answer of two versions and no error, and are trained one publish later."""
    write_config(staleness=0, steps=NUM_STEPS)
    (workspace / "rollouts.py").write_text(ROLLOUTS)
    (workspace / "caller.py").write_text(CALLER)
    values: dict[str, Any] = {
        "trainer.is_colocated": True,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.num_epochs_per_take": 2,
        "buffer.group_size": GROUP_SIZE,
        "buffer.over_provision": 2.0,
        "buffer.drop_zero_signal": False,
        "sampling.max_new_tokens": 160,
        "model.max_context_tokens": 512,
        "eval.every": 0,
        "env.episode_deadline_s": 180,
    }
    options = [f"--set={name}={json.dumps(value)}" for name, value in values.items()]
    finished = outloop("train", "run.toml", *options, timeout_s=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = [row for row in read_metrics(workspace / "runs/tiny") if "train/loss" in row]
    assert len(rows) == NUM_STEPS
    # What a step carried is a publish old, although the run is synchronous otherwise.
    assert max(row["train/staleness_max"] for row in rows) == 1
    assert rows[-1]["buffer/ledger/replaced"] == rows[-1]["buffer/discarded_time_share"] == 0
    with joined(workspace / "runs/tiny") as reader:
        numbers = {n: column.num_attempts for n, column in reader.ledger().training.items()}
    assert numbers == {"trained": NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE}
    mixed = [
        turn
        for trajectory in read_trajectories(workspace / "runs/tiny" / FOLDER)
        for turn in trajectory.turns
        if len(turn.version_spans) > 1
    ]
    assert mixed, "no turn was held"
    for turn in mixed:
        ends = [0, *(span.end for span in turn.version_spans)]
        assert [span.start for span in turn.version_spans] == ends[:-1]
        assert ends[-1] == len(turn.output_ids) == len(turn.behavior_logprobs)
        versions = [span.policy_version for span in turn.version_spans]
        assert versions == sorted(set(versions))
