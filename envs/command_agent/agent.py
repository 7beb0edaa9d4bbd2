"""Plays episodes with an agent program (`env.agent_command`): one process tree for each episode.

It makes the episode's folder and environment, and classifies how the program ended; `command` and
`process_reaper` run it, `verifier` scores it. When `play` returns, the program's processes and its
folder are gone, however it ended, and its output is in the result.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from outloop.buffer.errors import EnvironmentFailure, RecordError, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.records import Outcome, Reward, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent import command
from outloop.envs.command_agent.confinement import open_confinement
from outloop.envs.command_agent.verifier import (
    VerifierTimeout,
    deadline_share,
    load_verifier,
    verify,
)
from outloop.envs.rollout.episode import Episode
from outloop.envs.rollout.episode_result import EpisodeResult, failed, without_reward
from outloop.envs.rollout.rollout_function import Rollout, load_rollout
from outloop.envs.verifiers.result import Result

_SETTING = "env.agent_command"
_READY_S = 5.0
_OWN_PLACEHOLDERS = (
    *("task_file", "episode_dir", "project_dir"),
    *("episode_id", "task_id", "base_url"),
)
_MAX_OUTPUT_CHARS = 8000


class AgentFailed(Exception):
    """An agent program did not end as it should."""


def load_player(env: EnvSettings, hidden: Sequence[Path]) -> Rollout:
    """Load what plays the run's episodes: the rollout function, or the agent command.

    Args:
        hidden: what an agent program must not see; see `confinement.hidden_paths`.

    Raises:
        SettingsError: neither or both are given, or the given one cannot be used.
    """
    if env.agent_command is None:
        return load_rollout(env)
    if env.rollout_function_path is not None:
        raise SettingsError(
            f"{_SETTING}={env.agent_command!r} and env.rollout_function_path="
            f"{env.rollout_function_path!r} are both given; leave one out"
        )
    agent = CommandAgent(env, hidden)
    return Rollout(
        kind="async", call=agent.play, name=f"{_SETTING}={env.agent_command!r}", owner=agent
    )


class CommandAgent:
    """Plays an episode by starting the program."""

    def __init__(self, env: EnvSettings, hidden: Sequence[Path]) -> None:
        assert env.agent_command is not None
        command.check_agent_environment(env.agent_environment)
        line = command.CommandLine(env.agent_command, setting=_SETTING, import_dir=env.import_dir)
        self._line = line.at_home()
        own = {Path(word) for word in self._line.words_given}
        self._confinement = open_confinement(env, [path for path in hidden if path not in own])
        self._verifier = load_verifier(env)
        self._env = env
        self._folder: OwnedFolder | None = None

    async def tear_down(self) -> None:
        """End what the verifier started, and remove the folder of its episodes."""
        await self._verifier.tear_down()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def check_tasks(self, tasks: tuple[Task, ...]) -> None:
        """Refuse placeholders that no task fills.

        Raises:
            SettingsError: names the nearest field.
        """
        fields: set[str] = set(tasks[0].payload) if tasks else set()
        for task in tasks:
            fields &= task.payload.keys()
        self._line.check([*_OWN_PLACEHOLDERS, *sorted(fields - set(self._env.hidden_task_fields))])

    async def play(self, task: Task, episode: Episode) -> EpisodeResult:
        """Run the program to its end or a limit, and score what it left."""
        if self._folder is None:
            self._folder = OwnedFolder("outloop-episodes")
        root = Path(tempfile.mkdtemp(prefix="episode-", dir=self._folder.path))
        folder, temporary = root / "episode", root / "tmp"
        folder.mkdir()
        temporary.mkdir()
        try:
            ran = await self._run(task, episode, folder, temporary)
            return await self._judge(task, episode, ran, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    async def _run(
        self, task: Task, episode: Episode, folder: Path, temporary: Path
    ) -> command.CompletedProgram:
        env = self._env
        shown = {k: v for k, v in task.payload.items() if k not in env.hidden_task_fields}
        task_file = folder / "task.json"
        task_file.write_text(json.dumps({"task_id": task.task_id, **shown}))
        files = {
            "task_file": str(task_file),
            "episode_dir": str(folder),
            "project_dir": str(self._line.folder),
        }
        words = self._line.words(
            {
                **shown,
                **files,
                "episode_id": episode.episode_id,
                "task_id": task.task_id,
                "base_url": episode.base_url,
            }
        )
        variables = {
            **episode.environ(),
            "OUTLOOP_TASK_FILE": files["task_file"],
            "OUTLOOP_EPISODE_DIR": files["episode_dir"],
            "OUTLOOP_PROJECT_DIR": files["project_dir"],
        }
        if self._line.is_module:
            variables["PYTHONPATH"] = files["project_dir"]
        if self._confinement is not None:
            words = self._confinement.argv(words, folder, temporary)
            variables |= self._confinement.environment(folder)
        return await command.run(
            words,
            command.Limits(
                deadline_share(env, episode.deadline),
                env.agent_memory_mb,
                env.max_output_bytes,
                env.max_kept_bytes,
            ),
            env=command.agent_environment(env.agent_environment, variables),
            folder=folder,
            is_confined=self._confinement is not None,
        )

    async def _judge(
        self, task: Task, episode: Episode, ran: command.CompletedProgram, folder: Path
    ) -> EpisodeResult:
        output = f"{ran.stdout}\n{ran.stderr}".strip()[-_MAX_OUTPUT_CHARS:]
        outcome: Outcome = "completed"
        error: AgentFailed | None = None
        if ran.reason:
            error, outcome = AgentFailed(_limit_sentence(ran, self._env)), "truncated"
        elif ran.exit_code != 0:
            if not await _is_router_ready(episode.base_url):
                lost = ConnectionError(
                    f"the agent ended with exit_code={ran.exit_code} while the router was away"
                )
                return failed(lost, "infrastructure", output=output)
            last = ran.stderr.strip().splitlines()[-1:] or [""]
            error = AgentFailed(f"the agent ended with exit_code={ran.exit_code}: {last[0][:300]}")
            outcome = "failed"
        result = Result(
            answer=ran.stdout.strip(),
            exit_code=ran.exit_code,
            reason=ran.reason,
            stdout=ran.stdout,
            stderr=ran.stderr,
            folder=folder,
        )
        try:
            reward = await verify(
                self._verifier,
                task,
                result,
                timeout_s=self._env.verifier_timeout_s,
                deadline=episode.deadline,
            )
        except VerifierTimeout as late:
            worst = Reward(value=self._env.failure_reward)
            return failed(error or late, "agent", reward=worst, outcome="failed", output=output)
        except (RecordError, EnvironmentFailure) as bad:
            if error is not None:
                worst = Reward(value=self._env.failure_reward)
                return failed(error, "agent", reward=worst, outcome=outcome, output=output)
            if isinstance(bad, RecordError):
                return without_reward(bad, output=output)
            return failed(bad, "environment", output=output)
        if error is not None:
            return failed(error, "agent", reward=reward, outcome=outcome, output=output)
        return EpisodeResult(outcome="completed", reward=reward, output=output)


def _limit_sentence(ran: command.CompletedProgram, env: EnvSettings) -> str:
    setting = {
        "time": "it took too long; raise env.episode_deadline_s",
        "memory": f"it held {ran.memory_mb:.0f} MB; raise env.agent_memory_mb="
        f"{env.agent_memory_mb:g}",
        "output": f"it wrote more than env.max_output_bytes={env.max_output_bytes}",
    }
    return f"the agent was ended: {setting[ran.reason]}"


async def _is_router_ready(base_url: str) -> bool:
    """True if the episode's endpoint is up; if not, the failure is not the agent's."""
    parts = urlsplit(base_url)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_READY_S)) as session,
            session.get(f"{parts.scheme}://{parts.netloc}/health") as answer,
        ):
            return answer.status < 500
    except (aiohttp.ClientError, TimeoutError):
        return False
