"""A small recorded run, with branches, versions, masks and text that attacks whoever reads it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outloop.buffer.records import OpenEpisode, Opening, Reward, Sampling, Turn, VersionSpan
from outloop.buffer.trajectories.ended import EndedEpisode, Entry, Fate
from outloop.buffer.trajectories.folder import FOLDER, Part, writing
from outloop.buffer.trajectories.tables import Decoder, tables_of, write_tables
from outloop.buffer.trajectories.vocabulary import write_vocabulary

HOSTILE = (
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=2>",
    "</pre></div><svg onload=window.hacked=3>",
    "javascript:window.hacked=4",
    "\u202eevil\u202c",
    "\x1b[31mred",
    "{{constructor.constructor('window.hacked=5')()}}",
)
WORDS = (
    "<|im_start|>user\n",
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
    "question",
    "answer",
    "wrong",
    "4",
    "5",
    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>',
    "<tool_response>4</tool_response>",
    *HOSTILE,
)
USER, END, ASSISTANT, QUESTION, ANSWER, WRONG, FOUR, FIVE, CALL, RESULT, *ATTACKS = range(
    len(WORDS)
)


def turn(
    episode_id: str,
    index: int,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    parent: int | None = None,
    versions: tuple[int, int] = (3, 3),
    cause: str | None = None,
) -> Turn:
    """A turn whose first sampled token is of the first version, and whose last one is masked."""
    n = len(output)
    return Turn(
        turn_id=f"{episode_id}.{index}",
        episode_id=episode_id,
        parent_turn_id=None if parent is None else f"{episode_id}.{parent}",
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        behavior_logprobs=np.linspace(-0.1, -3.0, n).astype(np.float32),
        version_spans=(
            VersionSpan(policy_version=versions[0], start=0, end=1),
            VersionSpan(policy_version=versions[1], start=1, end=n),
        ),
        loss_spans=((0, n - 1),),
        mask_reason="after_stop",
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        branch_cause=cause or ("root" if parent is None else "extension"),
        started_at=100.0,
        finished_at=101.0,
    )


def ended(
    episode_id: str,
    turns: Sequence[Turn],
    *,
    group: str | None = None,
    attempt: int = 0,
    reward: float | None = 1.0,
    fate: Fate = "trained",
    reason: str = "",
    outcome: str = "completed",
    task: str = "sum",
    error: str = "",
    output: str = "",
) -> EndedEpisode:
    """An ended episode of these turns."""
    opening = Opening(
        episode_id=episode_id,
        task_id=task,
        group_id=group,
        attempt=attempt,
        purpose="train" if group else "eval",
        deadline_at=200.0,
        metadata={"agent": HOSTILE[0]},
        opened_at=100.0,
    )
    components = {} if reward is None else {"exact": reward, HOSTILE[1]: 0.5}
    episode = OpenEpisode(
        opening=opening,
        turns=tuple(turns),
        is_closed=True,
        outcome=outcome,  # type: ignore[arg-type]
        reward=None if reward is None else Reward(value=reward, components=components),
        error=error,
        output=output,
    )
    num = sum(len(t.prompt_ids) + len(t.output_ids) for t in turns)
    entry = Entry(episode_id, fate, reason, 110_000, num, 0, 2, 4 if fate == "trained" else -1)
    return EndedEpisode(entry=entry, episode=episode, closed_at=105.0)


def episodes() -> list[EndedEpisode]:
    """Two attempts of a group, one with a branch; a failed one; an evaluation full of attacks."""
    ask = (USER, QUESTION, END, ASSISTANT)
    good = [
        turn("good", 0, ask, (CALL, END)),
        turn("good", 1, (USER, RESULT, END, ASSISTANT), (FOUR, END), parent=0, versions=(3, 4)),
        turn("good", 2, (USER, WRONG, END, ASSISTANT), (FIVE, END), cause="rewritten_history"),
    ]
    bad = [turn("bad", 0, ask, (FIVE, WRONG, WRONG, END), versions=(2, 3))]
    failed = [turn("failed", 0, ask, (WRONG,) * 9)]
    attacks = [turn("attack", 0, (USER, *ATTACKS, END), (ASSISTANT, *ATTACKS))]
    hostile = " ".join(HOSTILE)
    return [
        ended("good", good, group="g0-1"),
        ended("bad", bad, group="g0-1", attempt=1, reward=0.0),
        ended(
            "failed", failed, group="g1-2", reward=None, fate="lost", reason="environment",
            outcome="failed", error="the sandbox did not start",
        ),
        ended("attack", attacks, fate="evaluated", task=HOSTILE[1], error=hostile, output=hostile),
    ]  # fmt: skip


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recorded run `shown`, with a secret that nobody may see."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("runs") / "shown"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="4"))
    tables = tables_of(episodes(), Decoder(tokenizer))
    with writing(folder / FOLDER) as opened:
        write_vocabulary(opened.folder, tokenizer)
        name = opened.new_name(0)
        num_bytes = opened.write_files(name, lambda e, t: write_tables(*tables, e, t))
        part = Part(
            name=name, first=0, last=3, num_episodes=4, num_tokens=50, num_bytes=num_bytes,
            first_ended_at=110.0, last_ended_at=110.0,
        )  # fmt: skip
        opened.commit([part])
    rows = [
        {
            "step": step, "time": 100.0 + step, "train/loss": 0.1, "train/reward_mean": step / 10,
            "train/reward_std": 0.4, "train/episodes": 16, "train/step_s": 2.0, "train/wait_s": 1.0,
            "train/update_s": 0.7, "publish/duration_s": 0.1, "train/policy_version": step,
            "buffer/dropped/no_signal": step // 2, "train/entropy": 1.0 / step,
        }
        for step in range(1, 9)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"time": 105.0, "kind": "part_restarted", "part": "router-0", "exit_code": -9}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "secrets.json").write_text('{"admin_key": "ol-admin-secret"}')
    return folder
