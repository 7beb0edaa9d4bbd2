"""Agents of other projects, unmodified, trained for a few steps with every part real.

They live in an environment of their own, which `make test-clients` makes and names by
OUTLOOP_CLIENTS_PYTHON; other runs leave this test out.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from fakes import user_folder
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import Trajectory
from outloop.buffer.run import load_run

PYTHON = os.environ.get("OUTLOOP_CLIENTS_PYTHON", "")
PROGRAM = Path(__file__).resolve().parents[1] / "fakes" / "third_party.py"
AGENTS = ("openai-agents", "smolagents", "mini-swe-agent")
NUM_STEPS = 2
PROMPTS = ("smolagents/prompts/toolcalling_agent.yaml", "minisweagent/config/mini.yaml")
SCORING = f'''
AGENTS = {AGENTS!r}


def tasks():
    numbers = range(2)
    return [{{"agent": a, "question": f"What is {{n}} + 4?"}} for n in numbers for a in AGENTS]


def score(task, result):
    """A number that differs from answer to answer, so that there is something to learn."""
    return len(result.answer.splitlines()[-1]) % 11 / 10 if result.answer else 0.0
'''
CONFIG = """
[run]
name = "third-party"

[model]
path = "model"
renderer = "qwen3"
renderer_options = {{ enable_thinking = false }}
max_context_tokens = 8192

[env]
agent_command = "{python} {program} {witness} {{agent}} {{question}}"
verifier = "scoring:score"
tasks = "scoring:tasks"
# They write what they saw beside the project.
agent_sandbox = "none"
max_concurrent_episodes = 4
episode_deadline_s = 400
max_replaced_share = 1.0

[sampling]
max_new_tokens = 12

[buffer]
group_size = 2
group_deadline_s = 900
drop_zero_signal = false

[trainer]
num_steps = {steps}
groups_per_step = 3
learning_rate = 1e-4
checkpoint_every = 0
take_timeout_s = 900
"""

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1500)]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Settings, verifier, and a random policy whose tokenizer has read the agents' long prompts."""
    (tmp_path / "witness").mkdir()
    (tmp_path / "scoring.py").write_text(SCORING)
    packages = Path(PYTHON).parent.parent / "lib" / "python3.11" / "site-packages"
    rows = [
        {
            "messages": [
                {"role": "user", "content": (packages / prompt).read_text()},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for prompt in PROMPTS
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    user_folder.start(
        tmp_path,
        *("new-policy", "--out", "model", "--conversations", "prompts.jsonl"),
        *("--vocab-size", "4000", "--max-context-tokens", "8192"),
        log=tmp_path / "out.log",
    ).wait(120)
    text = CONFIG.format(
        python=PYTHON, program=PROGRAM, witness=tmp_path / "witness", steps=NUM_STEPS
    )
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that are steps."""
    path = folder / "runs/third-party/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def check_episode(found: Trajectory, seen: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    """Turns, their ids, branches and reward against what the witness saw."""
    exchanges = [line for line in seen if line.get("status") == 200]
    printed = [line["printed"] for line in seen if "printed" in line]
    turns = sorted(found.turns, key=lambda turn: turn.started_at)
    by_id = {turn.turn_id: turn for turn in turns}
    assert len(turns) == len(exchanges)
    for turn, exchange in zip(turns, exchanges, strict=True):
        ids = [*turn.prompt_ids]
        step = by_id.get(turn.parent_turn_id or "")
        while step is not None:
            ids = [*step.prompt_ids, *step.output_ids, *ids]
            step = by_id.get(step.parent_turn_id or "")
        given = tokenizer.decode(ids, skip_special_tokens=False)
        generated = tokenizer.decode([*turn.output_ids], skip_special_tokens=False)
        for text in texts_of(exchange["request"]):
            assert text.strip() in given
        # Answers of /v1/responses repeat the instructions.
        for text in texts_of({**exchange["response"], "instructions": None}):
            # A call that is broken is text of its own: the space around it is not the policy's.
            assert "".join(text.split()) in "".join(generated.split())
        assert (
            len(turn.output_ids)
            == exchange["response"]["usage"][
                "output_tokens" if "responses" in exchange["path"] else "completion_tokens"
            ]
        )
    assert [turn.branch_cause for turn in turns] == [*expected_causes(exchanges)]
    if printed:
        assert found.episode.outcome == "completed"
        assert found.episode.reward is not None
        last = printed[0].splitlines()[-1:] or [""]
        assert found.episode.reward.value == len(last[0]) % 11 / 10
    else:
        # openai-agents raises when an answer was cut off by its length.
        assert (found.episode.outcome, found.episode.failure_kind) == ("failed", "agent")


def expected_causes(exchanges: list[dict[str, Any]]) -> Iterator[str]:
    """What begins a branch, by the requests alone, since a random policy may say anything.

    smolagents asks for a last answer under another system prompt; mini-swe-agent leaves an answer
    without a tool call out of what it says next.
    """
    yield "root"
    for before, now in pairwise(exchanges):
        reply = next(iter(messages_of(before["response"])), {})
        asked = [text_of(one) for one in messages_of(now["request"], "system")]
        if asked != [text_of(one) for one in messages_of(before["request"], "system")]:
            yield "system_changed"
        elif text_of(reply) in [text_of(one) for one in messages_of(now["request"])]:
            yield "extension"
        else:
            yield "history_rewritten"


def messages_of(body: dict[str, Any], role: str = "assistant") -> list[dict[str, Any]]:
    """The messages of a role in a request or an answer of either dialect."""
    said = [choice["message"] for choice in body.get("choices", [])]
    said += [*body.get("messages", []), *as_items(body.get("input")), *body.get("output", [])]
    return [one for one in said if one.get("role") == role]


def text_of(message: dict[str, Any]) -> str:
    """A message's text, of which agents strip the ends."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return content.strip()


def texts_of(body: dict[str, Any]) -> list[str]:
    """Every text that a request or an answer of either dialect holds."""
    found = []
    replies = [choice["message"] for choice in body.get("choices", [])]
    for item in [*body.get("messages", []), *as_items(body.get("input")), *replies]:
        content = item.get("content") or ""
        parts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
        found += parts
    for item in body.get("output", []):
        found += [part.get("text", "") for part in item.get("content", [])]
    return [*found, body.get("instructions") or ""]


def as_items(given: Any) -> list[dict[str, Any]]:
    """The `input` of the responses dialect: a text, or items."""
    return [{"content": given}] if isinstance(given, str) else list(given or [])


def test_agents_of_other_projects_are_trained(workspace: Path) -> None:
    """What the buffer holds is what went over the wire: turns, ids, branches and rewards."""
    training = user_folder.start(workspace, "train", "run.toml", log=workspace / "out.log")
    try:
        while len(steps_of(workspace)) < NUM_STEPS - 1:
            log = (workspace / "out.log").read_text()
            assert training.poll() is None, log
            with suppress(subprocess.TimeoutExpired):
                training.wait(0.5)
        # What steps were made of is kept until the checkpoint at the end contains it.
        reader = BufferReader.connect(load_run(workspace / "runs/third-party"))
        held = [t for t in reader.archive.trajectories() if isinstance(t, Trajectory)]
        reader.close()
        assert training.wait(900) == 0, (workspace / "out.log").read_text()
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait(60)
    tokenizer = Tokenizer.from_file(str(workspace / "model/tokenizer.json"))
    players: dict[str, list[Trajectory]] = {name: [] for name in AGENTS}
    for found in held:
        log = workspace / "witness" / f"{found.episode.episode_id}.jsonl"
        seen = [json.loads(line) for line in log.read_text().splitlines()]
        check_episode(found, seen, tokenizer)
        players[player_of(seen)].append(found)
    assert all(players.values()), {name: len(group) for name, group in players.items()}
    rows = steps_of(workspace)
    assert [row["train/episodes"] for row in rows] == [6] * NUM_STEPS
    assert all(row["train/tokens"] > 0 for row in rows)


def player_of(seen: list[dict[str, Any]]) -> str:
    """Whose exchange this is, by what only that agent sends."""
    first = seen[0]
    if "responses" in first["path"]:
        return "openai-agents"
    tools = {tool["function"]["name"] for tool in first["request"].get("tools", [])}
    return "mini-swe-agent" if tools == {"bash"} else "smolagents"
