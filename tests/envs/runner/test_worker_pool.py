"""Worker processes: what one episode does to its process harms nobody else."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.envs.runner.runner import run
from outloop.envs.runner.worker_pool import WorkerPool

PlayWith = Callable[..., Any]

BARRIER = """
import asyncio, ctypes, os, threading, time
from pathlib import Path


def deep(depth):
    time.sleep(60) if depth == 0 else deep(depth - 1)


async def others_wait(task, episode):
    Path(f"here-{episode.episode_id}").touch()
    await asyncio.sleep(600)


async def play(task, episode):
    # The first episode waits for three others in its process, then does its worst.
    if Path("gone").exists():
        return 1.0
    if int(episode.episode_id[3:]) != 0:
        return await others_wait(task, episode)
    while len(list(Path(".").glob("here-*"))) < 3:
        await asyncio.sleep(0.02)
    Path("gone").touch()
    # In a task of its own, as an agent's tool call might be.
    await asyncio.gather(worst())


async def worst():
"""


def died(router: Any) -> tuple[list[str], list[str]]:
    """Ids of the episodes that failed as the agent's, and as the infrastructure's."""
    closes = router.closes.items()
    return tuple(
        sorted(name for name, close in closes if close["failure_kind"] == kind)
        for kind in ("agent", "infrastructure")
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os._exit(3)", "exit_code=3"),
        ("ctypes.string_at(0)", "SIGSEGV at "),
        ("time.sleep(60)", "blocked its event loop"),
        ("while True: pass", "blocked its event loop"),
        (
            "[threading.Thread(target=deep, args=(200,), daemon=True).start() for _ in range(99)]\n"
            "    time.sleep(60)",
            "blocked its event loop",
        ),
    ],
)
async def test_who_ends_or_blocks_its_process_is_distinguished_from_its_neighbours(
    body: str, words: str, router: Any, play_with: PlayWith, folder: Path
) -> None:
    """That episode is the agent's failure, those beside it are repeated, later ones are played."""
    router.num_episodes = 8
    router.deadline_s = 100.0
    await play_with(
        router,
        BARRIER + f"    {body}\n",
        timeout_s=100,
        num_workers=1,
        max_concurrent_episodes=4,
        max_stall_s=1.0,
        failure_reward=-1.0,
    )
    guilty, innocent = died(router)
    assert guilty == ["ep-0"]
    assert innocent == ["ep-1", "ep-2", "ep-3"]
    assert words in router.closes["ep-0"]["error"]
    if "at " in words or "blocked" in words:
        num_lines = (BARRIER + body).count("\n") + 1
        assert f"user.py:{num_lines}" in router.closes["ep-0"]["error"]
    assert router.closes["ep-0"]["reward"]["value"] == -1.0
    assert all(router.closes[name]["reward"] is None for name in innocent)
    assert [router.closes[f"ep-{n}"]["outcome"] for n in range(4, 8)] == ["completed"] * 4


@pytest.mark.medium
async def test_a_worker_that_somebody_kills_blames_nobody(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """Its episodes are infrastructure failures, without a reward; a new worker goes on."""
    router.num_episodes = 6
    router.deadline_s = 100.0
    playing = asyncio.create_task(
        play_with(
            router,
            BARRIER + "    await asyncio.sleep(60)\n",
            timeout_s=100,
            num_workers=1,
            max_concurrent_episodes=4,
        )
    )
    async with asyncio.timeout(30):
        while not (folder / "gone").exists():
            await asyncio.sleep(0.02)
    workers = [
        child
        for child in psutil.Process().children()
        if "outloop.envs.runner.worker_main" in child.cmdline()
    ]
    assert len(workers) == 1
    os.kill(workers[0].pid, signal.SIGKILL)
    await playing
    guilty, innocent = died(router)
    assert guilty == []
    assert innocent == ["ep-0", "ep-1", "ep-2", "ep-3"]
    assert "SIGKILL" in router.closes["ep-0"]["error"]
    assert [router.closes[f"ep-{n}"]["outcome"] for n in (4, 5)] == ["completed"] * 2


FRAGILE = """
import os, time

for name in ("bad-0", "bad-1"):
    try:
        os.rename(name, name + "-taken")
    except OSError:
        continue
    os._exit(3)
time.sleep(0.5)


async def play(task, episode):
    return 1.0


def tasks():
    return [{"question": "?"}]
"""


def worker_processes() -> list[psutil.Process]:
    """The workers of this process that are alive."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and "outloop.envs.runner.worker_main" in child.cmdline()
    ]


@pytest.mark.medium
async def test_a_worker_that_does_not_come_up_costs_no_other(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Three are killed, and two of those started in their place die too: then there are three."""
    (folder / "user.py").write_text(FRAGILE)
    pool = WorkerPool(make_settings(num_workers=3, max_concurrent_episodes=6), lambda: None)
    await pool.start()
    assert pool.num_free() == 6
    for name in ("bad-0", "bad-1"):
        (folder / name).touch()
    for worker in worker_processes():
        worker.kill()
    async with asyncio.timeout(60):
        while not (folder / "bad-1-taken").exists() or pool.num_free() < 6:
            await asyncio.sleep(0.05)
    # Time for one too many to come up.
    await asyncio.sleep(3)
    assert len(worker_processes()) == 3
    assert pool.num_free() == 6
    await pool.close()
    assert worker_processes() == []


@pytest.mark.medium
async def test_workers_share_the_cores(router: Any, play_with: PlayWith) -> None:
    """What verifiers start in each worker is together no more than the machine has cores."""
    source = """
from outloop.envs.verifiers.task_fields import num_cores


async def play(task, episode):
    return float(num_cores())
"""
    router.num_episodes = 4
    cores = len(os.sched_getaffinity(0))
    await play_with(router, source, num_workers=2)
    shares = {reward["value"] for reward in router.closed("reward")}
    assert shares == {float(max(1, cores // 2))}


@pytest.mark.slow
async def test_memory_is_limited_and_a_growing_worker_is_replaced(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """An episode that takes too much at once fails alone; a slow leak costs no episode."""
    router.num_episodes = 120
    source = """
import asyncio
import os
LEAK = []


async def play(task, episode):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if episode.episode_id == "ep-0":
        bytearray(2**30)
    LEAK.append(bytearray(b"x" * 2 * 2**20))
    await asyncio.sleep(0.1)
    return 1.0
"""
    await play_with(
        router,
        source,
        timeout_s=100,
        num_workers=1,
        max_concurrent_episodes=1,
        worker_memory_mb=320,
    )
    assert died(router) == (["ep-0"], [])
    assert "MemoryError" in router.closes["ep-0"]["error"]
    assert router.closed("outcome").count("completed") == 119
    assert len(set((folder / "pids").read_text().split())) > 1


@pytest.mark.medium
async def test_blocking_functions_play_at_the_same_time(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """A plain function is played in threads, with its own client, and cannot hold up the others."""
    router.num_episodes = 12
    source = """
import threading
together = threading.Barrier(4, timeout=20)


def play(task, episode):
    if int(episode.episode_id[3:]) < 4:
        together.wait()
    messages = [{"role": "user", "content": task.payload["question"]}]
    answer = episode.blocking_client.chat.completions.create(model="policy", messages=messages)
    return float(bool(answer.choices[0].message.tool_calls))
"""
    await play_with(router, source, timeout_s=100, num_workers=1, max_blocking_episodes=4)
    assert [reward["value"] for reward in router.closed("reward")] == [1.0] * 12
    assert router.most_open <= 4


@pytest.mark.slow
async def test_blocking_calls_that_hang_are_truncated_and_left_behind(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """At the deadline they are scored; the process that holds them is replaced."""
    router.num_episodes = 60
    # In which the process that comes in its place is up.
    router.deadline_s = 10.0
    source = """
import os
import time


def play(task, episode):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if int(episode.episode_id[3:]) < 3:
        time.sleep(600)
    time.sleep(0.3)
    return 1.0
"""
    await play_with(
        router, source, timeout_s=110, num_workers=1, max_blocking_episodes=4, failure_reward=-1.0
    )
    assert router.closed("outcome").count("truncated") == 3
    assert router.closed("outcome").count("completed") == 57
    assert len(set((folder / "pids").read_text().split())) == 2


@pytest.mark.medium
async def test_a_class_is_set_up_once_per_process_and_torn_down(
    router: Any, play_with: PlayWith, folder: Path
) -> None:
    """State lives from set_up to tear_down, in each worker for itself."""
    router.num_episodes = 8
    source = """
import os
from pathlib import Path


class Player:
    async def set_up(self):
        self.number = 0
        Path(f"up-{os.getpid()}").touch()

    async def play(self, task, episode):
        self.number += 1
        return float(self.number)

    def tear_down(self):
        Path(f"down-{os.getpid()}").write_text(str(self.number))
"""
    await play_with(
        router,
        source,
        timeout_s=100,
        num_workers=2,
        max_concurrent_episodes=4,
        rollout_function_path="user:Player",
    )
    assert len(list(folder.glob("up-*"))) == 2
    downs = [int(path.read_text()) for path in folder.glob("down-*")]
    assert len(downs) == 2
    assert sum(downs) == 8
    assert str(os.getpid()) not in {path.name[3:] for path in folder.glob("up-*")}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "class Player:\n    def set_up(self):\n        raise OSError('no data')\n"
            "    async def play(self, task, episode):\n        return 1.0\n",
            "set_up raised OSError: no data",
        ),
        ("async def Player(task):\n    return 1.0\n", "cannot be called with"),
    ],
)
async def test_code_that_cannot_be_used_stops_the_runner_with_a_sentence(
    source: str, words: str, router: Any, play_with: PlayWith
) -> None:
    """Nothing is claimed before a worker is ready."""
    with pytest.raises(SettingsError, match=words):
        await play_with(router, source, rollout_function_path="user:Player", num_workers=1)
    assert router.claim_keys == []


@pytest.mark.medium
async def test_a_worker_holds_no_key_but_its_episodes(
    router: Any, play_with: PlayWith, folder: Path, fake_module: ModuleType
) -> None:
    """The runner key is neither in its environment, nor its command line, nor its memory."""
    source = """
import gc
from pathlib import Path


async def play(task, episode):
    words = [Path("/proc/self/environ").read_text(), Path("/proc/self/cmdline").read_text()]
    words += [one for one in gc.get_objects() if isinstance(one, str)]
    for one in gc.get_objects():
        if isinstance(one, dict):
            words += [value for value in one.values() if isinstance(value, str)]
    assert any("ol-ep-" in word for word in words)
    return float(any("ol-" + "runner" in word for word in words))
"""
    await play_with(router, source, num_workers=1)
    assert [reward["value"] for reward in router.closed("reward")] == [0.0] * 4


@pytest.mark.medium
async def test_nothing_outlives_the_runner(
    router: Any,
    folder: Path,
    make_settings: Callable[..., Settings],
    fake_module: ModuleType,
) -> None:
    """Stopping cancels what plays, closes it as aborted, and ends every worker."""
    (folder / "user.py").write_text(
        "import time\n\n\ndef play(task, episode):\n    time.sleep(600)\n\n\n"
        "def tasks():\n    return [{'question': 'q'}]\n"
    )
    stop = asyncio.Event()
    settings = make_settings(num_workers=2)
    playing = asyncio.create_task(
        run(
            settings,
            router_url=router.url,
            runner_key=fake_module.RUNNER_KEY,
            stop=stop,
            drain_s=0.2,
        )
    )
    async with asyncio.timeout(30):
        while len(router.claims) < 4:
            await asyncio.sleep(0.01)
    assert len(psutil.Process().children()) >= 2
    stop.set()
    await asyncio.wait_for(playing, 20)
    assert router.closed("outcome") == ["aborted"] * 4
    assert [
        c for c in psutil.Process().children() if "outloop.envs.runner.worker_main" in c.cmdline()
    ] == []


RUNNER = """
import asyncio, sys
from outloop.buffer.settings import build_settings
from outloop.envs.runner.runner import run
from outloop.envs.runner.worker_pool import WorkerPool

env = {"tasks": "user:tasks", "rollout_function_path": "user:play"}
settings = build_settings({"model": {"path": "."}, "env": env}, source="test")
asyncio.run(
    run(settings, router_url=sys.argv[1], runner_key=sys.argv[2], stop=asyncio.Event())
)
"""


@pytest.mark.medium
async def test_a_blocked_worker_dies_with_its_runner(
    router: Any, folder: Path, fake_module: ModuleType
) -> None:
    """kill -9 of the runner while user code holds the worker's event loop."""
    (folder / "user.py").write_text(
        "import os\nimport time\n\n\nasync def play(task, episode):\n"
        "    with open('pid', 'w') as file:\n        file.write(f'{os.getpid()} ')\n"
        "    time.sleep(600)\n\n\ndef tasks():\n    return [{'question': 'q'}]\n"
    )
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, router.url, fake_module.RUNNER_KEY
    )
    path = folder / "pid"
    async with asyncio.timeout(60):
        while not path.exists() or not path.read_text().endswith(" "):
            await asyncio.sleep(0.02)
    worker = psutil.Process(int(path.read_text()))
    runner.kill()
    await runner.wait()
    _, alive = psutil.wait_procs([worker], timeout=20)
    assert not alive
