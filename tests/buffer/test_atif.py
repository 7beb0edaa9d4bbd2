"""Episodes as ATIF documents: other viewers can read them, and nothing is lost on the way back."""

import json
from pathlib import Path

import atif
import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from outloop.buffer.codec.jsonl import format_line
from outloop.buffer.records import Reward, Sampling, Trajectory, VersionSpan
from outloop.buffer.trajectories.atif_documents import conversation_of, document_of, trajectory_of
from outloop.cli.trajectories import trajectories

DEMO = Path(__file__).resolve().parents[2] / "src/outloop/view/demo"
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
START = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
AFTER = (
    "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def trajectory(make_trajectory, make_turn) -> Trajectory:
    """Three turns: a root, what goes on from it, and a second branch from the root."""
    root = replace(make_turn("e", 0), sampling=Sampling(temperature=0.7, stop=("x",)))
    spans = (
        VersionSpan(policy_version=3, start=0, end=1),
        VersionSpan(policy_version=4, start=1, end=4),
    )
    logprobs = np.array([-0.1, -1e-7, -3.3333333, -20.0], np.float32)
    deep = replace(make_turn("e", 1, parent=0), version_spans=spans, behavior_logprobs=logprobs)
    other = replace(make_turn("e", 2, parent=0), loss_spans=(), mask_reason="undelivered")
    episode = replace(
        make_trajectory("e", purpose="train").episode,
        group_id="g1",
        reward=Reward(value=0.5, components={"form": 0.25}),
        metadata={"source": "a"},
    )
    return Trajectory(episode=episode, turns=(root, deep, other))


def texts(*outputs: str) -> dict[str, tuple[str, str]]:
    """Prompts and outputs of the three turns."""
    prompts = (START, AFTER, AFTER)
    return {f"e e.{i}": pair for i, pair in enumerate(zip(prompts, outputs, strict=True))}


def test_a_document_is_read_back_bit_by_bit(trajectory: Trajectory) -> None:
    """Through JSON: ids, logprobs, versions, spans, order and the branch that each turn is of."""
    document = document_of(trajectory, {})
    again = atif.Trajectory.model_validate_json(json.dumps(document.to_json_dict()))
    assert format_line(trajectory_of(again)) == format_line(trajectory)


def test_another_viewer_sees_a_conversation(trajectory: Trajectory) -> None:
    """Roles, reasoning, tool calls and their results; what a second branch shares is marked."""
    said = (f"<think>\nhm\n</think>\n\nI add. {CALL}<|im_end|>", "It is 2.<|im_end|>", "No.")
    document = document_of(trajectory, texts(*said))
    assert [step.source for step in document.steps] == ["system", "user", "agent", "agent"]
    first = document.steps[2]
    assert (first.message, first.reasoning_content) == ("I add.", "hm")
    assert (first.tool_calls[0].function_name, first.tool_calls[0].arguments) == ("add", {"x": 1})
    assert [result.content for result in first.observation.results] == ["2"]
    assert document.steps[3].metrics.prompt_tokens == 3 + 4 + 3
    assert document.final_metrics.extra == {"reward": 0.5, "form": 0.25}
    (branch,) = document.subagent_trajectories
    assert [bool(step.is_copied_context) for step in branch.steps] == [True, True, True, False]
    assert conversation_of(document)["messages"][2:] == [
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "e.0-0",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "e.0-0", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]


@pytest.mark.medium
def test_an_archive_goes_through_the_command_line(tmp_path: Path) -> None:
    """The recorded demo: what is exported as documents and imported is what --export writes."""

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(trajectories, [str(one) for one in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    where = ("--where", "reward > 0")
    assert "episodes" in run(DEMO, "--export-atif", tmp_path / "documents", *where)
    run(tmp_path / "documents", "--import-atif", tmp_path / "again.jsonl")
    run(DEMO, "--export", tmp_path / "whole.jsonl", *where)
    again, whole = ((tmp_path / f"{n}.jsonl").read_bytes().splitlines() for n in ("again", "whole"))
    assert len(whole) > 10
    assert sorted(again) == sorted(whole)
    run(tmp_path / "documents", "--import-atif", tmp_path / "talk.jsonl", "--conversations")
    rows = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert len(rows) == len(whole)
    assert {message["role"] for row in rows for message in row["messages"]} >= {"user", "assistant"}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{}", (), "no ATIF document"),
        ("not JSON", ("--conversations",), "no ATIF document"),
        (
            '{"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": []}',
            (),
            "--conversations",
        ),
        (None, (), "holds no *.json"),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path, text: str | None, options: tuple[str, ...], words: str
) -> None:
    """With the file's name, and nothing is written."""
    folder, out = tmp_path / "documents", tmp_path / "out.jsonl"
    folder.mkdir()
    if text is not None:
        (folder / "x.json").write_text(text)
    result = CliRunner().invoke(trajectories, [str(folder), "--import-atif", str(out), *options])
    assert result.exit_code != 0
    assert words in str(result.exception)
    assert not out.exists()
