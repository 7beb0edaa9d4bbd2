"""The blocking side of the buffer, for the trainer and the launcher.

It takes and acknowledges groups, announces versions, requests evaluations, and reads SFT data. A
caller that lost the fence changes nothing; every wait has a deadline.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import redis
import structlog

from outloop.buffer import run_status
from outloop.buffer.archive import Archive
from outloop.buffer.codec import records_codec
from outloop.buffer.dead_letters import DeadLetters
from outloop.buffer.errors import (
    UNREADABLE,
    BufferLost,
    DeadlineExceeded,
    NotFound,
    OutloopError,
    RecordError,
)
from outloop.buffer.issued_version import IssuedVersion
from outloop.buffer.limits import AdmissionLimits
from outloop.buffer.records import (
    CheckpointMark,
    DropReason,
    EvalEpisode,
    EvalProgress,
    Lease,
    OpenEpisode,
    Trajectory,
)
from outloop.buffer.redis.client import connect_sync, translated
from outloop.buffer.redis.keys import key, prefix
from outloop.buffer.redis.outage import LOST_RUN, Continuity, Patience
from outloop.buffer.redis.refused_writes import folder_of, probe, write_obstacle
from outloop.buffer.redis.run_meta import check_joinable, init_run
from outloop.buffer.redis.scripts import Clock, SyncScripts
from outloop.buffer.registry import Registry
from outloop.buffer.run import Run
from outloop.buffer.runner_keys import RunnerKeys
from outloop.buffer.stats import stats_from
from outloop.buffer.store.episodes import Fields, load_sync
from outloop.buffer.store.leases import LeaseRow, leased_groups
from outloop.buffer.store.ledger import Ledger, ledger_from
from outloop.buffer.store.sft import sft_records
from outloop.buffer.tasks.source_weights import TaskWeights
from outloop.buffer.trajectories.queue import TrajectoryQueue

__all__ = ["BufferReader", "init_run"]

_WAKE_TIMEOUT_S = 0.5
_REMEMBERED_MARKS = 16
_KEPT_EVALS = 8
"""And four of each suite."""
_MAX_ERROR_CHARS = 2000

_log = structlog.get_logger()


class BufferReader:
    """One run, through a blocking client; may be used from several threads."""

    def __init__(
        self,
        run: Run,
        client: redis.Redis,
        clock: Clock | None,
        continuity: Continuity | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._issued: IssuedVersion | None = None
        if continuity is not None:
            self._issued = IssuedVersion(
                run.dir,
                max_full_s=run.settings.buffer.outage_s,
                on_full=lambda sentence: self.registry.report_status(
                    "trainer", {"warning": sentence}
                ),
            )
        self._client = client
        self._prefix = prefix(run.run_id)
        self._scripts = SyncScripts(
            client,
            key(run.run_id, "meta"),
            clock,
            min_replicas=run.settings.buffer.min_replicas,
            continuity=continuity,
            patience=patience,
        )
        self._redis_folder = None if run.settings.buffer.redis_url else run.dir.absolute() / "redis"
        self.registry = Registry(client, self._prefix, self._scripts)
        """The run's processes."""
        self.dead_letters = DeadLetters(client, self._prefix, self._scripts)
        """Groups that were dropped as failed or malformed."""
        self._take_token = ""
        """Token of a take that got no complete answer; the next take asks for the same groups."""
        self._taken: list[Lease] = []
        """Leases of a take that failed; the next take returns them first."""
        self.task_weights = TaskWeights(client, self._prefix, self._scripts)
        self._kept_evals = _KEPT_EVALS + 4 * len(run.settings.eval.suites)
        self.limits = AdmissionLimits(self._scripts)
        self.runner_keys = RunnerKeys(client, self._prefix)
        """How far ahead of the trainer episodes start, and how old a trained token may be."""
        self.archive = Archive(client, self._prefix, self._scripts)
        """Trajectories, to and from files."""
        self.trajectories = TrajectoryQueue(client, self._prefix, self._scripts)
        """Ended episodes that wait to be archived."""

    @classmethod
    def connect(
        cls,
        run: Run,
        *,
        clock: Clock | None = None,
        connect_client: Callable[[str], redis.Redis] = connect_sync,
    ) -> BufferReader:
        """Join `run`, by the client that `connect_client` makes for its URL.

        Raises:
            BufferUnavailable: Redis is unreachable or does not hold the run.
            SettingsError, SchemaMismatch: it was started with other settings, by another release.
        """
        reader = cls(run, connect_client(run.redis_url), clock)
        reader._join(run)
        return reader

    @classmethod
    def connect_patiently(
        cls, run: Run, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> BufferReader:
        """Join `run`, also where its Redis comes up within buffer.max_outage_s. Every call waits as
        long for one that went away or cannot write, and repeats itself, which changes nothing more.
        What it announces is noted in the run's folder too, for `recover` after a loss.

        Args:
            is_stopping: whether this process was asked to stop: then it waits for ten seconds.

        Raises:
            BufferUnavailable: Redis is unreachable, or was away for longer.
            WritesRefused: it could not write for longer.
            BufferLost: Redis does not hold the run.
            WritesLost: it lacks what it had acknowledged to this reader; so may every call.
            SettingsError, SchemaMismatch: it was started with other settings, by another release.
        """
        max_outage_s = run.settings.buffer.outage_s
        if not max_outage_s:
            return cls.connect(run)
        continuity = Continuity(key(run.run_id, "meta"), key(run.run_id, "state"))
        patience = Patience(max_outage_s, is_stopping)
        client = connect_sync(run.redis_url, retry=patience, on_connect=continuity.check)
        reader = cls(run, client, None, continuity, patience)
        reader._join(run)
        return reader

    def _join(self, run: Run) -> None:
        try:
            with translated(f"run_id={run.run_id}: joining"):
                meta: Any = self._client.hgetall(self._key("meta"))
            check_joinable(run, meta)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def acquire_fence(self) -> int:
        """Become the one trainer; every earlier fence is refused from now on."""
        (fence,) = self._scripts.call("acquire_fence", what="acquiring the fence")
        self._forget_take()
        return int(fence)

    def take(
        self,
        num_groups: int,
        *,
        fence: int,
        policy_version: int,
        timeout_s: float,
        on_wait: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> list[Lease]:
        """Lease `num_groups` ready groups, all at once, waiting until so many are ready.

        Those that become too old first are taken first. While it takes an open group in time to
        keep every group that was started within buffer.max_staleness, the call waits for that
        group. Attempts with tokens that are older than buffer.max_staleness publishes before
        `policy_version` leave their groups and are played again. A group with records that are
        damaged, or of another release, is dropped as malformed: it becomes a dead letter with its
        bytes unchanged, and the call waits for another group. `on_wait` gets a sentence about twice
        a second. If `should_stop` is true, the call returns the groups that it has, mostly none.
        The next call returns what a failed one had leased, also if only the answer of Redis was
        lost.

        Raises:
            DeadlineExceeded: `timeout_s` passed in which no attempt was in flight.
            BufferUnavailable: Redis did not answer, or lost the run.
            FenceExpired: another trainer took over, or the leases expired.
            TooManyReplaced: of at least 200 attempts since `recover`, a larger share than
                env.max_replaced_share ended without a result. Attempts that were in flight at
                `recover` do not count.
        """
        deadline = time.monotonic() + timeout_s
        leases = [lease for lease in self._taken if lease.fence == fence]
        self._taken = leases
        while len(leases) < num_groups and not should_stop():
            self._take_token = self._take_token or uuid.uuid4().hex
            taken, *answer = self._scripts.call(
                "take",
                fence,
                num_groups - len(leases),
                policy_version,
                self._take_token,
                what="taking groups",
            )
            if taken:
                rows: list[LeaseRow] = msgspec.msgpack.decode(answer[0])
                leases += self._load_leases(rows, answer[2:], fence, int(answer[1]) / 1000)
            self._take_token = ""
            if taken:
                continue
            ready, in_flight, num_open, is_held = answer
            sentence = (
                f"ready groups {ready + len(leases)}/{num_groups}, {num_open} open, "
                f"{in_flight} attempts in flight"
            )
            if is_held:
                sentence += "; slow groups would become too old"
            on_wait(sentence)
            if in_flight:
                deadline = time.monotonic() + timeout_s
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(
                    who="trainer",
                    phase=f"take: {sentence}",
                    peer="the runners",
                    after_s=timeout_s,
                )
            self._wait_for_wake(min(_WAKE_TIMEOUT_S, max(remaining_s, 0.01)))
        self._taken = []
        return leases

    def renew(self, fence: int) -> None:
        """Keep every lease of `fence` for another buffer.lease_s.

        Raises:
            FenceExpired: another trainer took over, or the leases had expired.
        """
        self._scripts.call("renew", fence, what="renewing leases")

    def mark_trained(self, group_ids: Sequence[str], *, fence: int, policy_version: int) -> None:
        """After the publish of `policy_version`: give the groups' admission credit back, once.

        Raises:
            FenceExpired: a group is not leased under `fence` any more.
            Conflict: `policy_version` is not acknowledged by the servers yet.
        """
        self._scripts.call(
            "mark_trained", fence, policy_version, *group_ids, what="marking groups trained"
        )

    def drop(self, group_id: str, reason: DropReason, *, fence: int, error: str = "") -> None:
        """Drop a leased group; a second call does nothing. failed, malformed: with a dead letter.

        Its admission credit returns with the next take or mark_trained, so that no episode of the
        next batch is sampled by this batch's weights.

        Raises:
            FenceExpired: the group is not leased under `fence` any more.
        """
        if reason in ("failed", "malformed"):
            error = error or "the trainer dropped it; its log says why"
        self._drop(group_id, reason, fence, error, holds_credit=True)

    def acknowledge(self, mark: CheckpointMark) -> None:
        """The checkpoint of `mark` is complete on disk: forget its groups, all or none.

        Raises:
            FenceExpired: a lease was lost; nothing was acknowledged.
        """
        self._scripts.call(
            "acknowledge",
            mark.fence,
            mark.policy_version,
            mark.next_slot,
            _REMEMBERED_MARKS,
            *mark.group_ids,
            what=f"acknowledging the checkpoint of policy_version={mark.policy_version}",
        )

    def recover(self, mark: CheckpointMark | None, *, fence: int) -> int:
        """Bring the buffer to the state of the checkpoint from which the trainer resumes.

        Groups of the mark are acknowledged. Groups with tokens of versions newer than the mark's
        are dropped as stale. Their slots are played again, and so are slots acknowledged by later
        marks. Other groups are ready or go on. Without a mark (None) every slot is played from the
        first on. No version is announced afterwards. Returns the highest policy_version ever
        issued, -1 if there was none.

        Raises:
            FenceExpired: another trainer took over.
        """
        self._forget_take()
        version, slot, ids = ("", 0, ()) if mark is None else _mark_words(mark)
        (highest,) = self._scripts.call("recover", fence, version, slot, *ids, what="recovering")
        return max(int(highest), -1 if self._issued is None else self._issued.read())

    def announce_version(self, policy_version: int, parent: int | None) -> None:
        """Announce the next weights.

        Nothing can be claimed until the first are acknowledged, at buffer.max_staleness 0 until
        these are.

        Raises:
            Conflict: the number was used before, or the parent was abandoned by a rollback.
        """
        if self._issued is not None:
            self._issued.note(policy_version)
        self._scripts.call(
            "announce_version",
            policy_version,
            "" if parent is None else parent,
            what=f"announcing policy_version={policy_version}",
        )

    def acknowledge_version(self, policy_version: int) -> None:
        """Note that every serving server holds `policy_version`.

        Raises:
            Conflict: it is not announced.
        """
        what = f"acknowledging policy_version={policy_version}"
        self._scripts.call("acknowledge_version", policy_version, what=what)

    def highest_version(self) -> int:
        """The highest policy_version ever issued, -1 if there was none."""
        with translated("reading the highest version"):
            value: Any = self._client.hget(self._key("state"), "highest")
        return -1 if value is None else int(value)

    def version_depths(self, versions: Collection[int]) -> dict[int, int]:
        """The number of publishes up to each of `versions`, without unknown and abandoned ones.

        When a resume publishes a checkpoint's weights again, they keep the checkpoint's depth.
        """
        if not versions:
            return {}
        ordered = list(versions)
        with translated("reading the depths of versions"):
            depths: Any = self._client.hmget(self._key("versions"), [str(v) for v in ordered])
        return {
            version: int(depth)
            for version, depth in zip(ordered, depths, strict=True)
            if depth is not None and depth != b"abandoned"
        }

    def request_eval(
        self,
        name: str,
        *,
        policy_version: int,
        num_episodes: int,
        sampling: dict[str, float],
        suite: str = "validation",
        samples_per_task: int = 0,
        blocks_training: bool = False,
    ) -> None:
        """Request evaluation episodes; the same request again changes nothing.

        They are played before training episodes if `blocks_training`, or once a later version than
        `policy_version` is served; until then in places that training leaves free.

        Args:
            suite: "validation", "test", or one of eval.suites that has tasks of its own.
            samples_per_task: how often each of the first num_episodes / samples_per_task tasks of
                the suite is played; if it has fewer tasks there are fewer episodes. 0: all of its
                tasks, again and again in the same order, until there are `num_episodes`.
            blocks_training: no update is made before its episodes are scored.

        Raises:
            NotFound: the run has no such tasks.
            Conflict: `name` was requested with other values.
        """
        if num_episodes < max(1, samples_per_task) or not 1 <= len(name) <= 256:
            raise RecordError(
                f"name={name!r}, num_episodes={num_episodes}, samples_per_task={samples_per_task}; "
                "a name of 1 to 256 characters, at least one episode, and no more samples than "
                "episodes are allowed"
            )
        try:
            text = json.dumps(sampling, sort_keys=True, allow_nan=False)
        except ValueError as error:
            raise RecordError(f"sampling={sampling}: finite numbers are allowed") from error
        arguments = (
            name,
            num_episodes,
            text,
            policy_version,
            self._kept_evals,
            suite,
            samples_per_task,
            int(blocks_training),
        )
        self._scripts.call("request_eval", *arguments, what=f"requesting evaluation name={name}")

    def eval_progress(self, name: str) -> EvalProgress:
        """The state of an evaluation; rewards in the order of its tasks.

        Raises:
            NotFound: there was no such request.
        """
        e = self._key(f"eval:{name}")
        with (
            translated(f"reading evaluation name={name}"),
            self._client.pipeline(transaction=True) as pipeline,
        ):
            pipeline.hmget(e, ["done", "total", "oldest_version", "newest_version", "mixed"])
            pipeline.hgetall(f"{e}:rewards")
            pipeline.hlen(self._key("attempts"))
            (done, total, *versions, num_mixed), rewards, num_in_flight = pipeline.execute()
        if total is None:
            raise NotFound(f"no evaluation name={name}; request it first")
        ordered = sorted(rewards.items(), key=lambda item: int(item[0]))
        oldest, newest = (None if one is None else int(one) for one in versions)
        return EvalProgress(
            num_done=int(done),
            num_total=int(total),
            rewards=tuple(float(value) for _, value in ordered),
            num_in_flight=num_in_flight,
            oldest_version=oldest,
            newest_version=newest,
            num_mixed=int(num_mixed or 0),
        )

    def is_evaluated(self, policy_version: int) -> bool:
        """True while an evaluation of this version has episodes that are not over."""
        what = f"looking for evaluations of policy_version={policy_version}"
        with translated(what):
            names: Any = self._client.lrange(self._key("evals"), 0, -1)
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hmget(
                        self._key(f"eval:{name.decode()}"), ["policy_version", "done", "total"]
                    )
                found = pipeline.execute()
        return any(
            int(version) == policy_version and int(done) < int(total)
            for version, done, total in found
            if version is not None and done is not None and total is not None
        )

    def eval_episodes(self, name: str) -> tuple[EvalEpisode, ...]:
        """The scored episodes of one of the last evaluations, in the order of their attempts.

        One that is damaged is logged and left out.
        """
        e = self._key(f"eval:{name}")
        with translated(f"reading the episodes of evaluation name={name}"):
            ids: Any = self._client.lrange(f"{e}:episodes", 0, -1)
            with self._client.pipeline(transaction=False) as pipeline:
                for episode_id in ids:
                    episode = self._key(f"episode:{episode_id.decode()}")
                    pipeline.hmget(episode, ["opening", "closure", "reward", "num_tokens"])
                    pipeline.llen(f"{episode}:turns")
                pipeline.hmget(e, ["suite", "samples", "requested"])
                *found, (suite, samples, requested) = pipeline.execute()
            rows: list[tuple[Any, ...]] = [
                (*fields, num_turns)
                for fields, num_turns in zip(found[::2], found[1::2], strict=True)
                if fields[0] is not None and fields[1] is not None and fields[2] is not None
            ]
            max_tasks = int(requested) // int(samples) if rows and int(samples) else None
            sources = self._eval_sources(suite.decode(), max_tasks) if rows else []
        episodes: dict[int, EvalEpisode] = {}
        for opening, closure, reward, num_tokens, num_turns in rows:
            try:
                began = records_codec.decode_opening(opening)
                scored = records_codec.decode_reward(reward)
                outcome = records_codec.decode_closure(closure).outcome
            except UNREADABLE as error:
                _log.error("episode_left_out", evaluation=name, error=str(error))
                continue
            episodes[began.attempt] = EvalEpisode(
                attempt=began.attempt,
                task_id=began.task_id,
                source=sources[began.attempt % len(sources)],
                reward=scored,
                outcome=outcome,
                num_turns=int(num_turns),
                num_tokens=int(num_tokens or 0),
            )
        return tuple(episodes[attempt] for attempt in sorted(episodes))

    def _eval_sources(self, suite: str, max_tasks: int | None) -> list[str]:
        """The source of each task that an evaluation plays, in their order."""
        place: Any = self._client.hget(self._key("state"), f"suite:{suite}")
        first, count = (int(number) for number in place.split())
        count = count if max_tasks is None else min(count, max_tasks)
        records: Any = self._client.hmget(
            self._key("eval_tasks"), [str(first + index) for index in range(count)]
        )
        return [records_codec.decode_task(record).source for record in records]

    def change_task_weights(self, weights: Mapping[str, float]) -> None:
        """Play the named lists of tasks so often, relative to the others, from the next group on.

        Raises:
            SettingsError: no such list.
        """
        self.task_weights.change(weights)

    def sft_progress(self) -> tuple[int, bool]:
        """(number of trajectories stored for supervised training, no more will come)."""
        with translated("counting trajectories"):
            number, final = self._state("sft_stored", "sft_final")
        return int(number or 0), final == b"1"

    def sft_trajectories(self) -> Iterator[Trajectory]:
        """The trajectories stored for supervised training, in order of arrival.

        One that is damaged, or of another release, is logged and left out; its bytes stay in Redis.
        """
        for number, record in enumerate(sft_records(self._client, self._prefix)):
            try:
                trajectory = records_codec.decode_trajectory(record)
            except UNREADABLE as error:
                _log.error("trajectory_left_out", key=f"sft:{number}", error=str(error))
            else:
                yield trajectory

    def set_steps_left(self, num_steps: int) -> None:
        """No more groups are started than `num_steps` more steps will train."""
        what = "setting the number of steps left"
        self._scripts.call("put_fields", "state", "steps_left", num_steps, what=what)

    def run_state(self) -> str:
        """`running`, `finished` or `failed`."""
        with translated("reading the run state"):
            (state,) = self._state("run_state")
        return "running" if state is None else str(state.decode())

    def check_run(self) -> None:
        """Return if Redis answers and holds the run.

        Raises:
            BufferUnavailable: it does not answer.
            BufferLost: it was emptied.
        """
        with translated("looking for the run"):
            has_run: Any = self._client.exists(self._key("meta"))
        if not has_run:
            raise BufferLost(LOST_RUN)

    def write_obstacle(self) -> str | None:
        """Why Redis would not write now, as a sentence for a person; None: it would.

        Raises:
            BufferUnavailable: it does not answer.
        """
        with translated("asking Redis whether it can write"):
            try:
                self._client.execute_command(*probe(self._key("nothing")))
            except redis.RedisError as error:
                return write_obstacle(error, self._redis_folder or folder_of(self._client))
        return None

    def run_status(self) -> dict[str, Any]:
        """How the run stands, as `outloop.buffer.run_status`; "redis": why it cannot write."""
        obstacle = self.write_obstacle()
        with translated("reading how the run stands"), self._client.pipeline() as pipeline:
            run_status.ask(pipeline, self._prefix)
            return run_status.read(pipeline.execute(), obstacle)

    def set_run_state(self, state: Literal["running", "finished", "failed"]) -> None:
        """Set the run's state; only a running run gives out claims."""
        self._scripts.call("put_fields", "state", "run_state", state, what="setting the run state")

    def stats(self) -> dict[str, float]:
        """Counters since the run began and sizes now; names as in `outloop.buffer.stats.STATS`."""
        return stats_from(self._client, self._prefix, self.ledger(), self.limits.read())

    def ledger(self) -> Ledger:
        """What happened to every attempt that started since the run began."""
        return ledger_from(self._scripts)

    def load_episode(self, episode_id: str) -> OpenEpisode | None:
        """The episode as it is now, without turns of those that it resumes; None if unknown."""
        return load_sync(self._client, self._prefix, episode_id)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _state(self, *names: str) -> list[Any]:
        values: Any = self._client.hmget(self._key("state"), list(names))
        return list(values)

    def _forget_take(self) -> None:
        """Whatever was leased is ready again."""
        self._take_token, self._taken = "", []

    def _wait_for_wake(self, timeout_s: float) -> None:
        with translated("waiting for ready groups"):
            self._client.blpop([self._key("wake")], timeout=timeout_s)

    def _drop(
        self, group_id: str, reason: DropReason, fence: int, error: str, *, holds_credit: bool
    ) -> None:
        arguments = (fence, group_id, reason, error[:_MAX_ERROR_CHARS], int(holds_credit))
        self._scripts.call("drop", *arguments, what=f"dropping group_id={group_id}")

    def _load_leases(
        self, rows: Sequence[LeaseRow], fields: Fields, fence: int, deadline: float
    ) -> list[Lease]:
        leases: list[Lease] = []
        damaged: dict[str, OutloopError] = {}
        with translated("reading leased groups"):
            groups = leased_groups(self._client, self._prefix, rows, fields)
            for row, (group_id, group) in zip(rows, groups, strict=True):
                if isinstance(group, OutloopError):
                    damaged[group_id] = group
                else:
                    lease = Lease(group=group, fence=fence, deadline=deadline, max_age=row[5])
                    leases.append(lease)
        for group_id, problem in damaged.items():
            _log.error("group_dropped", group_id=group_id, reason="malformed", error=str(problem))
            # Its replacement belongs to this batch, so no episode starts too early.
            self._drop(group_id, "malformed", fence, str(problem), holds_credit=False)
        return leases


def _mark_words(mark: CheckpointMark) -> tuple[int | str, int, tuple[str, ...]]:
    return mark.policy_version, mark.next_slot, mark.group_ids
