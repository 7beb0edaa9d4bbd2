"""Unmodified agents of other projects against the router, with a scripted policy.

They live in an environment of their own, which `make test-clients` makes and names by
OUTLOOP_CLIENTS_PYTHON, OUTLOOP_CODEX and OUTLOOP_QWEN; other runs leave these tests out.
"""

import asyncio
import os
from pathlib import Path

import pytest
from fake_server import Script

PYTHON = os.environ.get("OUTLOOP_CLIENTS_PYTHON", "")
QWEN = os.environ.get("OUTLOOP_QWEN", "")
CODEX = os.environ.get("OUTLOOP_CODEX", "")
PROGRAMS = Path(__file__).resolve().parents[1] / "fakes" / "agent_programs.py"
THOUGHT = "<think>\nI need the tool.\n</think>\n\nLet me see.\n"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CODEX_CONFIG = """
model = "policy"
model_provider = "outloop"
[model_providers.outloop]
name = "outloop"
base_url = "%s"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""
ONE_BRANCH = ["root", "extension"]

pytestmark = [pytest.mark.clients, pytest.mark.timeout(180)]


def script_policy(stage, *outputs: str) -> None:
    """The policy says one output after the other, by how often it has spoken."""
    stop = stage.renderer.stop_ids[0]

    def answer(request: dict) -> Script:
        text = stage.renderer.tokenizer.decode(request["input_ids"])
        said = outputs[min(len(stage.server.requests), len(outputs)) - 1]
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        ids = [*stage.renderer.tokenizer.encode(said), stop]
        return Script(ids=ids, finish={"type": "stop", "matched": stop})

    stage.server.answer = answer


async def run_program(*command: str, **environment: str) -> str:
    """What a program prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
        cwd=environment.get("HOME"),
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


def check_exact(stage, episode) -> list[str]:
    """Every turn's path is what the server was given; returns the branch causes."""
    turns = stage.turns(episode)
    by_id = {turn.turn_id: turn for turn in turns}
    seen = {r["rid"].rpartition("-")[0]: r["input_ids"] for r in stage.server.requests}
    for turn in turns:
        path, step = list(turn.prompt_ids), by_id.get(turn.parent_turn_id)
        while step is not None:
            path = [*step.prompt_ids, *step.output_ids, *path]
            step = by_id.get(step.parent_turn_id)
        assert path == seen[turn.turn_id]
    return [turn.branch_cause for turn in turns]


@pytest.mark.parametrize(
    "agent",
    [
        *(f"openai-agents:{mode}" for mode in ("responses", "responses-stream")),
        *(f"openai-agents:{mode}" for mode in ("chat", "chat-stream")),
        *(f"pydantic-ai:{mode}" for mode in ("chat", "responses", "messages")),
        *(f"langgraph:{mode}" for mode in ("chat", "chat-stream", "responses", "responses-stream")),
        *(f"pydantic-ai:{mode}-stream" for mode in ("chat", "responses", "messages")),
    ],
)
async def test_an_agents_tool_loop_is_one_exact_branch(make_stage, agent: str) -> None:
    """Reasoning, text and a call, handed back in the agent's own way, continue the branch."""
    stage = await make_stage(model={"max_context_tokens": 100_000})
    call = CALL % ("calculator", '{"expression": "12 * 7"}')
    script_policy(stage, THOUGHT + call, "The answer is 84.")
    episode = await stage.open()
    said = await run_program(PYTHON, str(PROGRAMS), agent, episode["base_url"], episode["api_key"])
    assert said.strip().endswith("The answer is 84.")
    assert check_exact(stage, episode) == ONE_BRANCH


async def test_an_agent_that_retells_its_history_branches_exactly(make_stage) -> None:
    """smolagents hands calls and results back as text: a branch with its cause, exact each."""
    stage = await make_stage(model={"max_context_tokens": 100_000})
    call = CALL % ("calculator", '{"expression": "12 * 7"}')
    script_policy(stage, call, CALL % ("final_answer", '{"answer": "84"}'))
    episode = await stage.open()
    said = await run_program(
        PYTHON, str(PROGRAMS), "smolagents", episode["base_url"], episode["api_key"]
    )
    assert said.strip().endswith("84")
    assert check_exact(stage, episode) == ["root", "history_rewritten"]


async def test_mini_swe_agent_plays_an_episode(make_stage, tmp_path: Path) -> None:
    """Its shell runs what the policy says, and the loop up to its submission is one branch."""
    stage = await make_stage(model={"max_context_tokens": 200_000})
    script_policy(
        stage,
        THOUGHT + CALL % ("bash", '{"command": "echo $((12 * 7)) > answer"}'),
        CALL % ("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"}'),
    )
    episode = await stage.open()
    said = await run_program(
        *(PYTHON, str(PROGRAMS), "mini-swe-agent", episode["base_url"], episode["api_key"]),
        HOME=str(tmp_path),
    )
    assert said.strip().endswith("Submitted 84")
    assert (tmp_path / "answer").read_text() == "84\n"
    assert check_exact(stage, episode) == ONE_BRANCH


async def test_codex_plays_an_episode(make_stage, tmp_path: Path) -> None:
    """Its tool runs, its output comes back, and the loop is one branch."""
    stage = await make_stage(model={"max_context_tokens": 200_000})
    call = CALL % ("exec_command", '{"cmd": "echo $((12 * 7)) > answer"}')
    script_policy(stage, THOUGHT + call, "The answer is 84.")
    episode = await stage.open()
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX_CONFIG % episode["base_url"])
    said = await run_program(
        *(CODEX, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        "What is 12 * 7?",
        HOME=str(tmp_path),
        CODEX_HOME=str(tmp_path / ".codex"),
        OPENAI_API_KEY=episode["api_key"],
    )
    assert said.strip().endswith("The answer is 84.")
    assert (tmp_path / "answer").read_text() == "84\n"
    assert check_exact(stage, episode) == ONE_BRANCH


async def test_qwen_code_plays_an_episode(make_stage, tmp_path: Path) -> None:
    """Its tool runs, the loop is one branch; its side requests are branches of their own."""
    stage = await make_stage(model={"max_context_tokens": 400_000})
    call = CALL % ("run_shell_command", '{"command": "echo $((12 * 7)) > answer"}')
    script_policy(stage, THOUGHT + call, "The answer is 84.")
    episode = await stage.open()
    said = await run_program(
        *(QWEN, "--auth-type", "openai", "-y", "-p", "What is 12 * 7?"),
        HOME=str(tmp_path),
        OPENAI_API_KEY=episode["api_key"],
        OPENAI_BASE_URL=episode["base_url"],
        OPENAI_MODEL="policy",
    )
    assert "The answer is 84." in said
    assert (tmp_path / "answer").read_text() == "84\n"
    assert check_exact(stage, episode)[:2] == ONE_BRANCH
