"""Plays episodes with an agent program (`env.agent_command`): one process tree for each episode.

It makes the episode's folder and environment, and classifies how the program ended; `command` and
`process_reaper` run it, `left_files` makes harmless what it left, `verifier` scores it. When `play`
returns, the program's processes are gone and its folder is gone or being removed, however it ended,
and its output is in the result.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import structlog

from outloop.buffer import untrusted_tree
from outloop.buffer.errors import EnvironmentFailure, RecordError, SettingsError
from outloop.buffer.owned_folder import OwnedFolder
from outloop.buffer.records import Outcome, Reward, Task
from outloop.buffer.settings.env import EnvSettings
from outloop.envs.command_agent import command
from outloop.envs.command_agent.confinement import open_confinement
from outloop.envs.command_agent.left_files import TooManyFiles, make_harmless
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

_log = structlog.get_logger()
_SETTING = "env.agent_command"
_READY_S = 30.0
"""An endpoint that does not answer for so long is away; one that answers later was only busy."""
_REMOVAL_S = 10.0
"""How long an episode waits for the removal of its folder, which then goes on beside others."""
_MARGIN_S = 1.0
"""It waits no longer than until so long before its deadline, when its result would be lost."""
_OWN_PLACEHOLDERS = (
    *("task_file", "episode_dir", "project_dir"),
    *("episode_id", "task_id", "base_url"),
)
_MAX_OUTPUT_CHARS = 8000
_MAX_NAMED = 5
_SIGNS_OF_HIDDEN_FILES = (
    *("No such file", "ModuleNotFoundError", "Cannot find module", "ENOENT", "not found"),
    *("can't open", "cannot open", "Permission denied", "Read-only file system"),
)


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
        self._confinement = open_confinement(env, self._line, hidden)
        self._verifier = load_verifier(env)
        self._env = env
        self._folder: OwnedFolder | None = None
        self._making = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()

    async def tear_down(self) -> None:
        """End what the verifier started, and remove the folder of its episodes."""
        await self._verifier.tear_down()
        await asyncio.gather(*self._removals)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def check_tasks(self, tasks: tuple[Task, ...]) -> None:
        """Refuse names in the settings of which these tasks, or this machine, have nothing.

        Raises:
            SettingsError: a placeholder, a field or a folder; names the nearest field.
        """
        fields: set[str] = set(tasks[0].payload) if tasks else set()
        of_any: set[str] = set()
        for task in tasks:
            fields &= task.payload.keys()
            of_any |= task.payload.keys()
        for name in self._env.hidden_task_fields if tasks else ():
            if name not in of_any:
                near = difflib.get_close_matches(name, of_any, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise SettingsError(
                    f"env.hidden_task_fields={list(self._env.hidden_task_fields)!r}: no task has a "
                    f"field {name!r}; {hint}fields of tasks: {', '.join(sorted(of_any))}"
                )
        self._line.check([*_OWN_PLACEHOLDERS, *sorted(fields - set(self._env.hidden_task_fields))])
        if self._confinement is not None:
            self._confinement.check_named()
        self._verifier.check_tasks(tasks)

    async def play(self, task: Task, episode: Episode) -> EpisodeResult:
        """Run the program to its end or a limit, and score what it left."""
        async with self._making:
            if self._folder is None:
                # It removes what programs of killed processes left, which may be much.
                self._folder = await asyncio.to_thread(OwnedFolder, "outloop-episodes")
        root = Path(tempfile.mkdtemp(prefix="episode-", dir=self._folder.path))
        folder = root / "episode"
        folder.mkdir()
        try:
            ran = await self._run(task, episode, root, folder)
            return await self._judge(task, episode, ran, folder)
        finally:
            removal = asyncio.create_task(_remove(root))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            left_s = episode.deadline - time.time() - _MARGIN_S
            await asyncio.wait([removal], timeout=max(0.0, min(_REMOVAL_S, left_s)))

    async def _run(
        self, task: Task, episode: Episode, root: Path, folder: Path
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
        walls = None
        if self._confinement is not None:
            variables |= self._confinement.environment(folder)
            walls = self._confinement.walls(root, folder)
        return await command.run(
            words,
            command.Limits(
                deadline_share(env, episode.deadline),
                env.agent_memory_mb,
                env.max_output_bytes,
                env.max_kept_bytes,
                env.agent_disk_mb,
                str(root),
            ),
            env=command.agent_environment(env.agent_environment, variables),
            folder=folder,
            walls=walls,
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
            if not await _is_router_there(episode):
                lost = ConnectionError(
                    f"the agent ended with exit_code={ran.exit_code} while the router was away"
                )
                return failed(lost, "infrastructure", output=output)
            last = ran.stderr.strip().splitlines()[-1:] or [""]
            error = AgentFailed(
                f"the agent ended with exit_code={ran.exit_code}: {last[0][:300]}"
                f"{self._hint(ran.stderr)}"
            )
            outcome = "failed"
        try:
            await self._make_harmless(episode, folder)
        except (TooManyFiles, OSError) as bad:
            worst = Reward(value=self._env.failure_reward)
            return failed(error or bad, "agent", reward=worst, outcome="failed", output=output)
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

    async def _make_harmless(self, episode: Episode, folder: Path) -> None:
        removed = await asyncio.to_thread(make_harmless, folder)
        if removed:
            _log.warning(
                "agent_files_removed",
                episode=episode.episode_id,
                count=len(removed),
                files=removed[:_MAX_NAMED],
                note="no verifier sees links that leave the episode's folder, sockets, FIFOs and "
                "devices",
            )

    def _hint(self, stderr: str) -> str:
        """Say how to name files, to a program that misses some."""
        if self._confinement is None or not any(
            sign in stderr[-2000:] for sign in _SIGNS_OF_HIDDEN_FILES
        ):
            return ""
        return (
            " (in its sandbox an agent sees the files that its command names and imports; name "
            "others in env.agent_read_only)"
        )


def _limit_sentence(ran: command.CompletedProgram, env: EnvSettings) -> str:
    setting = {
        "time": "it took too long; raise env.episode_deadline_s",
        "memory": f"it held {ran.memory_mb:.0f} MB; raise env.agent_memory_mb="
        f"{env.agent_memory_mb:g}",
        "processes": "it had too many processes at once",
        "terminals": "it held too many pseudo-terminals at once",
        "disk": f"its files took more than env.agent_disk_mb={env.agent_disk_mb:g}",
        "output": f"it wrote more than env.max_output_bytes={env.max_output_bytes}",
    }
    return f"the agent was ended: {setting[ran.reason]}"


async def _remove(root: Path) -> None:
    left = await asyncio.to_thread(untrusted_tree.remove, root)
    if left is not None:
        _log.warning("folder_not_removed", folder=str(root), reason=str(left))


async def _is_router_there(episode: Episode) -> bool:
    """False if the episode's endpoint refuses connections, fails, or does not answer for long.

    An agent's own requests may keep the endpoint busy for a while after its end.
    """
    parts = urlsplit(episode.base_url)
    timeout_s = max(1.0, min(_READY_S, episode.deadline - time.time()))
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"{parts.scheme}://{parts.netloc}/health") as answer,
        ):
            return answer.status < 500
    except (aiohttp.ClientError, TimeoutError):
        return False
