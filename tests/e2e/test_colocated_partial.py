"""Partial rollouts where one device serves and trains: turns are held while the server's memory is
away, and go on from their tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from outloop.buffer.cli.open_run import joined
from outloop.buffer.trajectories.folder import FOLDER
from outloop.buffer.trajectories.reading import read_trajectories

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 4, 3, 2
NUM_TURNS_PER_CONVERSATION = 2
ROLLOUTS = f'''
import json
import time


def tasks():
    """Of the first six groups, which start before the first publish, every second one is long."""
    max_tokens = {{0: 160, 2: 130, 4: 100}}
    return [{{"question": f"say {{i}}", "max_tokens": max_tokens.get(i)}} for i in range(64)]


def eval_tasks():
    return [{{"question": "hold", "max_tokens": None}}]


async def play(task, episode):
    """One short call; or, where `max_tokens` is given, calls without a pause between them until the
    policy's first publish: a call is then in the middle of its answer when the trainer takes the
    memory, whenever that is. The lengths differ, so that the pauses between two calls do not meet.
    Nothing is tried twice, and every call is written down."""
    client = episode.client.with_options(max_retries=0)
    max_tokens = task.payload["max_tokens"]
    limit = 24 if max_tokens is None else max_tokens
    messages, score, is_over = [], 0, False
    while not is_over:
        if len(messages) == 2 * {NUM_TURNS_PER_CONVERSATION}:
            messages = []
        messages.append({{"role": "user", "content": task.payload["question"]}})
        began_at, failure = time.monotonic(), ""
        try:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=limit
            )
        except Exception as error:
            failure = repr(error)
            raise
        finally:
            with open("calls.jsonl", "a") as log:
                log.write(json.dumps([time.monotonic() - began_at, failure]) + "\\n")
        text = answer.choices[0].message.content or ""
        messages.append({{"role": "assistant", "content": text}})
        score += sum(character.isdigit() for character in text)
        is_over = max_tokens is None or answer.system_fingerprint != "policy_version=0"
    return float(score)
'''


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
    calls = [json.loads(line) for line in (workspace / "calls.jsonl").read_text().splitlines()]
    assert [failure for _, failure in calls if failure] == []
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
