"""Unmodified agents of other projects against router and torch server, with a scripted policy.

They live in an environment of their own, which `make test-clients` makes and names by
OUTLOOP_CLIENTS_PYTHON, OUTLOOP_NODE_MODULES, OUTLOOP_CODEX, OUTLOOP_QWEN and OUTLOOP_CLAUDE; other
runs leave these tests out.
"""

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from fakes.fake_server import serving
from fakes.scripted_torch import playing, scripted_server, write_policy_for
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import create_run

PYTHON = os.environ.get("OUTLOOP_CLIENTS_PYTHON", "")
NODE_MODULES = os.environ.get("OUTLOOP_NODE_MODULES", "")
QWEN = os.environ.get("OUTLOOP_QWEN", "")
CODEX = os.environ.get("OUTLOOP_CODEX", "")
CLAUDE = os.environ.get("OUTLOOP_CLAUDE", "")
PROGRAMS = Path(__file__).resolve().parents[1] / "fakes" / "agent_programs.py"
JAVASCRIPT = PROGRAMS.with_suffix(".mjs")
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
BARE = ("--bare", "--tools", "Bash")
"""Without this, Claude Code sends some 75 KB of tools and advice."""
CONTEXT = 65_536
QUESTION = "What is 12 * 7?"
ONE_BRANCH = ["root", "extension"]

pytestmark = [pytest.mark.clients, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy whose tokenizer has read what the two long-winded agents say."""
    texts = asyncio.run(overheard(tmp_path_factory.mktemp("home")))
    folder = tmp_path_factory.mktemp("policy")
    write_policy_for(texts, folder, max_context_tokens=CONTEXT)
    return folder


@pytest.fixture(scope="module")
def scripted(policy: Path, start_torch_server):
    """One server for the module."""
    options = {"max_context_tokens": CONTEXT, "max_running_requests": 2}
    with scripted_server(start_torch_server, policy, **options) as server:
        yield server


@pytest.fixture
async def scene(scripted, policy: Path, make_run, tmp_path: Path):
    """A run in a Redis of its own."""
    model = {"path": str(policy), "max_context_tokens": CONTEXT}
    with EmbeddedRedis(tmp_path / "redis", max_memory_mb=64) as redis:
        run = create_run(make_run(model=model).settings, tmp_path / "run", redis.url)
        init_run(run)
        async with playing(run, scripted) as found:
            yield found


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


async def run_codex(home: Path, base_url: str, api_key: str) -> str:
    """What codex says to the question."""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG % base_url)
    command = (CODEX, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION)
    environment = {"CODEX_HOME": str(home / ".codex"), "OPENAI_API_KEY": api_key}
    return await run_program(*command, HOME=str(home), **environment)


async def run_qwen_code(home: Path, base_url: str, api_key: str) -> str:
    """What qwen-code says to the question."""
    return await run_program(
        *(QWEN, "--auth-type", "openai", "-y", "-p", QUESTION),
        HOME=str(home),
        OPENAI_API_KEY=api_key,
        OPENAI_BASE_URL=base_url,
        OPENAI_MODEL="policy",
    )


async def run_claude_code(home: Path, base_url: str, api_key: str, *options: str) -> str:
    """What Claude Code says to the question; it wants to write into its home."""
    command = (CLAUDE, *options, "-p", QUESTION, "--model", "policy", "--allowedTools", "Bash")
    return await run_program(
        *command,
        HOME=str(home),
        ANTHROPIC_API_KEY=api_key,
        ANTHROPIC_BASE_URL=base_url.removesuffix("/v1"),
        # No updates, telemetry, or request for a title of the session.
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


async def overheard(home: Path) -> list[str]:
    """Every text in the requests of agents whose server refuses them."""
    app, bodies = FastAPI(), []

    @app.post("/{path:path}")
    async def refuse(request: Request) -> JSONResponse:
        bodies.append(await request.json())
        return JSONResponse({"error": {"message": "not now", "code": "no"}}, status_code=400)

    async with serving(app) as url:
        for run in (run_codex, run_qwen_code, run_claude_code):
            with suppress(AssertionError):
                await run(home, f"{url}/v1", "none")
    assert len(bodies) >= 3
    texts = []
    for body in bodies:
        reply = [*body.get("messages", []), *body.get("input", []), body.get("instructions") or ""]
        reply += [block["text"] for block in body.get("system", [])]
        for one in reply:
            content = one if isinstance(one, str) else one.get("content") or ""
            texts += [content] if isinstance(content, str) else [p["text"] for p in content]
        texts += map(json.dumps, body.get("tools", []))
    return texts


@pytest.mark.parametrize(
    "agent",
    [
        *(f"openai-agents:{mode}" for mode in ("responses", "responses-stream")),
        *(f"openai-agents:{mode}" for mode in ("chat", "chat-stream")),
        *(f"pydantic-ai:{mode}" for mode in ("chat", "responses", "messages")),
        *(f"langgraph:{mode}" for mode in ("chat", "chat-stream", "responses", "responses-stream")),
        *(f"pydantic-ai:{mode}-stream" for mode in ("chat", "responses", "messages")),
        *("anthropic-runner", "litellm:openai", "litellm:anthropic"),
    ],
)
async def test_an_agents_tool_loop_is_one_exact_branch(scene, agent: str) -> None:
    """Reasoning, text and a call, handed back in the agent's own way, continue the branch."""
    call = CALL % ("calculator", '{"expression": "12 * 7"}')
    scene.says(THOUGHT + call, "The answer is 84.")
    episode = await scene.open()
    reply = await run_program(PYTHON, str(PROGRAMS), agent, episode["base_url"], episode["api_key"])
    assert reply.strip().endswith("The answer is 84.")
    assert scene.check_exact(episode) == ONE_BRANCH


@pytest.mark.parametrize(
    "agent",
    [
        *(f"vercel:{mode}" for mode in ("responses", "chat", "messages")),
        *(f"vercel:{mode}-stream" for mode in ("responses", "chat", "messages")),
        *("anthropic-runner", "openai-runner", "langchain:chat", "langchain:responses"),
    ],
)
async def test_a_javascript_agents_tool_loop_is_one_exact_branch(scene, agent: str) -> None:
    """The same in JavaScript; Vercel's SDK hands reasoning and text back by their ids."""
    call = CALL % ("calculator", '{"expression": "12 * 7"}')
    scene.says(THOUGHT + call, "The answer is 84.")
    episode = await scene.open()
    reply = await run_program(
        *("node", str(JAVASCRIPT), NODE_MODULES, agent),
        *(episode["base_url"], episode["api_key"]),
    )
    assert reply.strip().endswith("The answer is 84.")
    assert scene.check_exact(episode) == ONE_BRANCH


async def test_clients_know_an_ended_episode_and_a_full_context_as_final(scene) -> None:
    """By whatever they look at: status, type or the words of a refusal."""
    episode = await scene.open()

    async def refused(num_words: int) -> dict[str, list[str]]:
        reply = await run_program(
            *(PYTHON, str(PROGRAMS), f"refusals:{num_words}"),
            *(episode["base_url"], episode["api_key"]),
        )
        return json.loads(reply.splitlines()[-1])

    full = await refused(CONTEXT)
    assert {name for name, kinds in full.items() if "BadRequestError" in kinds} == full.keys()
    for name in ("langchain-openai", "langchain-anthropic"):
        assert "ContextOverflowError" in full[name], full[name]
    for name in ("litellm-openai", "litellm-anthropic"):
        assert "ContextWindowExceededError" in full[name], full[name]
    path = f"/episodes/{episode['episode_id']}/close"
    await scene.http.post(path, json={"outcome": "truncated", "reward": {"value": 0}, "key": "c"})
    ended = await refused(1)
    assert len(ended) == 6
    assert {name for name, kinds in ended.items() if "NotFoundError" in kinds} == ended.keys()


async def test_mini_swe_agent_asks_an_ended_episode_once(scene, tmp_path: Path) -> None:
    """It repeats ten times, over minutes, what it does not know as final."""
    episode = await scene.open()
    path = f"/episodes/{episode['episode_id']}/close"
    await scene.http.post(path, json={"outcome": "truncated", "reward": {"value": 0}, "key": "c"})
    with pytest.raises(AssertionError, match="NotFoundError"):
        await run_program(
            *(PYTHON, str(PROGRAMS), "mini-swe-agent", episode["base_url"], episode["api_key"]),
            HOME=str(tmp_path),
            MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="2",
        )
    metrics = (await scene.http.get("/metrics")).text
    assert 'router_refusals_total{code="episode_closed"} 1.0' in metrics


async def test_an_agent_that_retells_its_history_branches_exactly(scene) -> None:
    """smolagents hands calls and results back as text: a branch with its cause, exact each."""
    call = CALL % ("calculator", '{"expression": "12 * 7"}')
    scene.says(call, CALL % ("final_answer", '{"answer": "84"}'))
    episode = await scene.open()
    reply = await run_program(
        PYTHON, str(PROGRAMS), "smolagents", episode["base_url"], episode["api_key"]
    )
    assert reply.strip().endswith("84")
    assert scene.check_exact(episode) == ["root", "history_rewritten"]


async def test_mini_swe_agent_plays_an_episode(scene, tmp_path: Path) -> None:
    """Its shell runs what the policy says, and the loop up to its submission is one branch."""
    scene.says(
        THOUGHT + CALL % ("bash", '{"command": "echo $((12 * 7)) > answer"}'),
        CALL % ("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"}'),
    )
    episode = await scene.open()
    reply = await run_program(
        *(PYTHON, str(PROGRAMS), "mini-swe-agent", episode["base_url"], episode["api_key"]),
        HOME=str(tmp_path),
    )
    assert reply.strip().endswith("Submitted 84")
    assert (tmp_path / "answer").read_text() == "84\n"
    assert scene.check_exact(episode) == ONE_BRANCH


async def test_codex_plays_an_episode(scene, tmp_path: Path) -> None:
    """Its tool runs, its output comes back, and the loop is one branch."""
    call = CALL % ("exec_command", '{"cmd": "echo $((12 * 7)) > answer"}')
    scene.says(THOUGHT + call, "The answer is 84.")
    episode = await scene.open()
    reply = await run_codex(tmp_path, episode["base_url"], episode["api_key"])
    assert reply.strip().endswith("The answer is 84.")
    assert (tmp_path / "answer").read_text() == "84\n"
    assert scene.check_exact(episode) == ONE_BRANCH


async def test_qwen_code_plays_an_episode(scene, tmp_path: Path) -> None:
    """Its tool runs, the loop is one branch; its side requests are branches of their own."""
    call = CALL % ("run_shell_command", '{"command": "echo $((12 * 7)) > answer"}')
    scene.says(THOUGHT + call, "The answer is 84.")
    episode = await scene.open()
    reply = await run_qwen_code(tmp_path, episode["base_url"], episode["api_key"])
    assert "The answer is 84." in reply
    assert (tmp_path / "answer").read_text() == "84\n"
    assert scene.check_exact(episode)[:2] == ONE_BRANCH


@pytest.mark.parametrize("options", [(), BARE], ids=["every tool", "bare"])
async def test_claude_code_plays_an_episode(
    scene, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Its tool runs, its output comes back, and the loop is one branch."""
    call = CALL % ("Bash", '{"command": "echo $((12 * 7)) > answer", "description": "Compute"}')
    scene.says(THOUGHT + call, "The answer is 84.")
    episode = await scene.open()
    where = episode["base_url"], episode["api_key"]
    reply = await run_claude_code(tmp_path, *where, *options)
    assert reply.strip().endswith("The answer is 84.")
    assert (tmp_path / "answer").read_text() == "84\n"
    assert scene.check_exact(episode) == ONE_BRANCH


async def test_dspy_asks_each_time_anew(scene) -> None:
    """A module's call is a conversation of its own: each step retells the steps before."""
    steps = (("calculator", '{"expression": "12 * 7"}'), ("finish", "{}"))
    thoughts = (fields(next_thought="So.", next_tool_name=n, next_tool_args=a) for n, a in steps)
    scene.says(*thoughts, fields(reasoning="So.", answer="The answer is 84."))
    episode = await scene.open()
    reply = await run_program(
        PYTHON, str(PROGRAMS), "dspy", episode["base_url"], episode["api_key"]
    )
    assert reply.strip().endswith("The answer is 84.")
    assert scene.check_exact(episode) == ["root", "new_conversation", "new_conversation"]


def fields(**values: str) -> str:
    """An answer as DSPy's chat adapter reads it."""
    return "\n\n".join(
        f"[[ ## {name} ## ]]\n{value}" for name, value in {**values, "completed": ""}.items()
    )
