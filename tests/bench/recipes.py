"""The trainer's own loop on a bandit of two turns and two lengths, for `learning_table`.

The policy decides how long its first answer is, up to six tokens, and its second, of one token,
pulls one of two arms; length earns nothing. Model, buffer scripts and loop are those of any run;
servers and agent are in memory. With exchanged rewards every episode has that of another.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

with warnings.catch_warnings():
    # megatron-core announces at import what it falls back to without Transformer Engine.
    warnings.simplefilter("ignore")
    from fakes.bandit_run import Answer, Server, Setup, arm, join
    from fakes.twin import Twin
    from outloop.buffer.records import Sampling, Turn, VersionSpan
    from outloop.buffer.run import create_run
    from outloop.buffer.settings import Settings
    from outloop.engine.train.megatron import model_and_optimizer
    from outloop.engine.train.ranks.controller import RankController
    from outloop.engine.train.ranks.rank_worker import RankWorker
    from outloop.engine.train.ranks.watchdog import Watchdog

MAX_LENGTH = 6
POOL_SIZE = 128


@dataclass(frozen=True)
class Curve:
    """One run: by step."""

    rewards: list[float]
    lengths: list[float]


def two_turns(server: Server) -> tuple[list[Answer], float]:
    """An episode: a first answer that ends at its first even token, then an arm."""
    ids, logprobs = [1, 2], list[float]()
    while len(logprobs) < MAX_LENGTH and (not logprobs or ids[-1] % 2):
        token, logprob = server.sample(ids)
        ids.append(token)
        logprobs.append(logprob)
    first = ([1, 2], ids[2:], list(logprobs))
    token, logprob = server.sample([*ids, 7])
    return [first, ([7], [token], [logprob])], arm(token)


def exchanging(
    play: Callable[[Server], tuple[list[Answer], float]], *, seed: int
) -> Callable[[Server], tuple[list[Answer], float]]:
    """`play` with a reward out of those of the last episodes; its own is one in POOL_SIZE of them,
    from the first episode on: the pool begins full, of what chance gives."""
    chosen = random.Random(seed)
    pool = deque((float(chosen.random() < 0.5) for _ in range(POOL_SIZE)), maxlen=POOL_SIZE)

    def play_and_exchange(server: Server) -> tuple[list[Answer], float]:
        answers, reward = play(server)
        pool.append(reward)
        return answers, chosen.choice(pool)

    return play_and_exchange


def make_turn(
    turn_id: str,
    *,
    prompt: list[int],
    output: list[int],
    logprobs: list[float],
    version: int,
) -> Turn:
    """A turn as the router would record it."""
    return Turn(
        turn_id=turn_id,
        episode_id="",
        parent_turn_id=None,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        behavior_logprobs=np.array(logprobs, np.float32),
        version_spans=(VersionSpan(policy_version=version, start=0, end=len(output)),),
        loss_spans=((0, len(output)),),
        sampling=Sampling(temperature=1.0),
        finish_reason="stop",
        branch_cause="root",
        started_at=0.0,
        finished_at=0.0,
    )


def train(folder: Path, trainer: dict[str, Any], *, seed: int, is_shuffled: bool) -> Curve:
    """One run with these settings of [trainer]."""
    run_dir = Path(tempfile.mkdtemp(prefix="recipes-"))
    settings = Settings(model={"path": folder}, run={"seed": seed}, trainer=trainer)
    run = create_run(settings, run_dir / "run", "unix:///nowhere")
    server = Server(folder, [], seed=seed)
    buffer = join(run, Twin(), server, make_turn)
    buffer.episode = exchanging(two_turns, seed=seed) if is_shuffled else two_turns
    config = model_and_optimizer.read_config(folder, {}, dtype="float32")
    watchdog = Watchdog(run.dir, rank=0, num_ranks=1, hang_timeout_s=600.0)
    worker = RankWorker(run, config, watchdog)
    ranks = RankController(worker, watchdog, num_ranks=1, timeout_s=600.0)
    ranks.run(RankWorker.build, num_updates=settings.trainer.num_updates)
    rows = Setup(run, buffer, server, ranks).train()
    buffer.close()
    watchdog.close()
    shutil.rmtree(run_dir)
    return Curve(
        [row["train/reward_mean"] for row in rows],
        [row["train/generated_tokens_mean"] for row in rows],
    )
