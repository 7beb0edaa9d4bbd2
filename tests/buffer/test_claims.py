"""Who may play what, and when: admission, order, evaluations, deadlines."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from outloop.buffer.errors import Conflict, DeadlineExceeded, NotFound, RecordError
from outloop.buffer.records import Opening, Reward, Task, Turn


@pytest.mark.parametrize(
    ("max_staleness", "depth", "limit"),
    [(0, 0, 2), (1, 1, 4), (2, 2, 6), (2, 0, 2), (2, 0.5, 3), (1, 4, 4), (0, 4, 2)],
)
async def test_admission_bounds_the_groups_in_flight(
    start: Callable[..., Any], max_staleness: int, depth: float, limit: int
) -> None:
    """At most (1 + pipeline_depth) * groups_per_step groups are started and not trained, and no
    more than max_staleness leaves time for."""
    loop = await start(buffer__max_staleness=max_staleness, buffer__pipeline_depth=depth)
    claims = await loop.play_all()
    assert {claim.group_id for claim in claims} == {f"g{i}-{i + 1}" for i in range(limit)}
    assert (await loop.claim()).reason == "admission"
    leases = loop.take()
    assert (await loop.claim()).reason == "admission"
    loop.train(leases, 1)
    assert len({claim.group_id for claim in (await loop.claim()).claims}) == 2


async def test_synchronous_means_synchronous(start: Callable[..., Any]) -> None:
    """At max_staleness 0 the next batch is claimed only once its version is acknowledged."""
    loop = await start()
    await loop.play_all()
    leases = loop.take()
    loop.reader.announce_version(1, 0)
    ids = [lease.group.group_id for lease in leases]
    with pytest.raises(Conflict, match="policy_version=1 is not acknowledged"):
        loop.reader.mark_trained(ids, fence=loop.fence, policy_version=1)
    assert (await loop.claim()).reason == "not_ready"
    loop.reader.acknowledge_version(1)
    assert (await loop.claim()).reason == "admission"
    loop.reader.mark_trained(ids, fence=loop.fence, policy_version=1)
    assert len((await loop.claim()).claims) == 4


async def test_a_drop_by_the_trainer_starts_nothing_of_the_next_batch_early(
    start: Callable[..., Any],
) -> None:
    """The credit of a group dropped after take returns with mark_trained, not before."""
    loop = await start()
    await loop.play_all()
    first, second = loop.take()
    loop.reader.drop(first.group.group_id, "no_signal", fence=loop.fence)
    loop.reader.drop(first.group.group_id, "no_signal", fence=loop.fence)
    assert (await loop.claim()).reason == "admission"
    loop.train([second], 1)
    assert len((await loop.claim()).claims) == 4
    assert loop.reader.stats()["buffer/dropped/no_signal"] == 1


async def test_a_run_whose_every_first_group_is_dropped_goes_on(
    start: Callable[..., Any],
) -> None:
    """Level 0: credits of dropped groups return with the next take at the latest."""
    loop = await start()
    for _ in range(3):
        await loop.play_all()
        for lease in loop.take():
            loop.reader.drop(lease.group.group_id, "no_signal", fence=loop.fence)
        with pytest.raises(DeadlineExceeded, match="0 open, 0 attempts in flight"):
            loop.take()
    assert len(await loop.play_all()) == 4
    assert [lease.group.slot for lease in loop.take()] == [6, 7]


async def test_the_same_key_gets_the_same_claims(start: Callable[..., Any]) -> None:
    """A claim whose answer was lost may be repeated; an empty answer is not remembered."""
    loop = await start()
    first = await loop.writer.claim(key="a", count=3)
    assert await loop.writer.claim(key="a", count=3) == first
    rest = await loop.writer.claim(key="b", count=3)
    assert len(rest.claims) == 1
    assert not (await loop.writer.claim(key="c", count=3)).claims
    for claim in (*first.claims, *rest.claims):
        await loop.play(claim)
    loop.train(loop.take(), 1)
    assert len((await loop.writer.claim(key="c", count=3)).claims) == 3


async def test_the_oldest_open_group_is_filled_first(start: Callable[..., Any]) -> None:
    """Places of open groups come before new groups, in the order of slots."""
    loop = await start(buffer__max_staleness=1)
    claims = (await loop.claim(5)).claims
    assert [(c.group_id, c.attempt) for c in claims] == [
        ("g0-1", 0),
        ("g0-1", 1),
        ("g1-2", 0),
        ("g1-2", 1),
        ("g2-3", 0),
    ]
    await loop.close(await loop.open(claims[1]), None, failure_kind="infrastructure")
    again = (await loop.claim(2)).claims
    assert [(c.group_id, c.attempt) for c in again] == [("g0-1", 2), ("g2-3", 1)]
    assert again[0].task == claims[0].task


async def test_every_task_is_played_once_per_epoch(start: Callable[..., Any]) -> None:
    """The slots of an epoch are a permutation of the tasks."""
    loop = await start(num_tasks=5, trainer__groups_per_step=10)
    tasks = [claim.task.task_id for claim in (await loop.claim()).claims[::2]]
    assert sorted(tasks[:5]) == sorted(tasks[5:]) == [f"t{i}" for i in range(5)]


async def test_reasons_for_giving_nothing(join: Callable[..., Any]) -> None:
    """not_ready, no_tasks, paused and finished are told apart."""
    writer, reader = await join()

    async def reason() -> str:
        return (await writer.claim(key="k", count=1)).reason

    assert await reason() == "not_ready"
    reader.announce_version(0, None)
    assert await reason() == "not_ready"
    reader.acknowledge_version(0)
    assert await reason() == "no_tasks"
    await writer.register_tasks([Task(task_id="a", payload={})], [])
    await writer.set_paused(True)
    assert await reason() == "paused"
    await writer.set_paused(False)
    reader.set_run_state("finished")
    assert await reason() == "finished"
    reader.set_run_state("running")
    assert await reason() == ""
    await writer.close()


async def test_a_supervised_run_gives_no_claims(start: Callable[..., Any]) -> None:
    """Mode sft has nothing to play."""
    loop = await start(trainer__mode="sft")
    assert (await loop.claim()).reason == "no_tasks"


async def test_other_tasks_are_refused(start: Callable[..., Any]) -> None:
    """A run keeps its tasks; the same ones again change nothing."""
    loop = await start(num_tasks=3, num_eval_tasks=0)
    same = [Task(task_id=f"t{i}", payload={"n": i}) for i in range(3)]
    await loop.writer.register_tasks(same, [])
    with pytest.raises(Conflict, match="other tasks"):
        await loop.writer.register_tasks(same[:2], [])
    with pytest.raises(RecordError, match="task_id='t0' is used twice"):
        await loop.writer.register_tasks([*same, same[0]], [])
    with pytest.raises(RecordError, match="must not be trained on"):
        await loop.writer.register_tasks(same, [Task(task_id="x", payload={"n": 1})])


async def test_an_attempt_past_its_deadline_is_replaced_then_lost(
    start: Callable[..., Any], clock: Any
) -> None:
    """Each place is given out again up to max_replacements; then the group has to do without."""
    loop = await start(
        env__max_replacements=1,
        env__episode_deadline_s=10,
        buffer__group_size=3,
        trainer__groups_per_step=1,
    )
    first, second, third = (await loop.claim()).claims
    await loop.play(first)
    await loop.play(second)
    episode_id = await loop.open(third)
    clock.advance(14.9)
    assert not (await loop.claim()).claims
    clock.advance(0.2)
    (again,) = (await loop.claim()).claims
    assert (again.group_id, again.attempt) == (third.group_id, 3)
    late = await loop.close(episode_id, 5.0)
    assert not late.counted
    clock.advance(15.1)
    (lease,) = loop.take(1)
    assert [t.episode.attempt for t in lease.group.trajectories] == [0, 1]
    stats = loop.reader.stats()
    assert stats["buffer/replaced/infrastructure"] == stats["buffer/lost_attempts"] == 1
    assert stats["buffer/late_rewards"] == 1


@pytest.mark.parametrize(("num_scored", "is_ready"), [(2, True), (1, False)])
async def test_a_group_past_its_deadline_seals_or_fails(
    start: Callable[..., Any], clock: Any, num_scored: int, is_ready: bool
) -> None:
    """Two scored attempts make a group; fewer are dropped as failed and free their credit."""
    loop = await start(
        buffer__group_size=3,
        trainer__groups_per_step=1,
        buffer__group_deadline_s=50,
        buffer__cuts_slow_episodes=True,
    )
    claims = (await loop.claim()).claims
    for claim in claims[:num_scored]:
        await loop.play(claim)
    clock.advance(51)
    if is_ready:
        (lease,) = loop.take(1)
        assert len(lease.group.trajectories) == num_scored
        assert lease.group.group_size == 3
        assert not (await loop.claim()).claims
    else:
        (new, *_) = (await loop.claim()).claims
        assert new.group_id == "g1-2"
        assert loop.reader.stats()["buffer/dropped/failed"] == 1


async def test_evaluations_come_first_and_need_no_admission(start: Callable[..., Any]) -> None:
    """Eval claims carry their own sampling, cycle through the tasks and join no group."""
    loop = await start()
    await loop.play_all()
    sampling = {"temperature": 0.0}
    for _ in range(2):
        loop.reader.request_eval("0:greedy", policy_version=0, num_episodes=3, sampling=sampling)
    claims = (await loop.claim()).claims
    assert [claim.task.task_id for claim in claims] == ["e0", "e1", "e0"]
    assert {(c.purpose, c.group_id, c.eval_name) for c in claims} == {("eval", None, "0:greedy")}
    assert claims[0].sampling == sampling
    await loop.play(claims[2], value=0.25)
    await loop.close(await loop.open(claims[0]), None, failure_kind="agent", outcome="failed")
    await loop.close(await loop.open(claims[1]), None, failure_kind="infrastructure")
    progress = loop.reader.eval_progress("0:greedy")
    assert (progress.num_done, progress.num_total, progress.rewards) == (2, 3, (0.0, 0.25))
    (again,) = (await loop.claim()).claims
    assert (again.purpose, again.attempt) == ("eval", 1)
    await loop.close(await loop.open(again, "second"), 0.5)
    assert loop.reader.eval_progress("0:greedy").rewards == (0.0, 0.5, 0.25)
    assert len(loop.take()) == 2
    with pytest.raises(Conflict, match="other values"):
        loop.reader.request_eval("0:greedy", policy_version=0, num_episodes=4, sampling=sampling)
    with pytest.raises(NotFound, match="request it first"):
        loop.reader.eval_progress("1:greedy")


async def test_a_lost_evaluation_attempt_is_requeued_at_its_deadline(
    start: Callable[..., Any], clock: Any
) -> None:
    """A runner that dies delays an evaluation and does not shrink it, up to max_replacements."""
    loop = await start(env__max_replacements=1)
    await loop.play_all()
    loop.reader.request_eval("v", policy_version=0, num_episodes=1, sampling={})
    for _ in range(2):
        (claim,) = (await loop.claim()).claims
        assert claim.purpose == "eval"
        clock.advance(1000)
    assert not (await loop.claim()).claims
    progress = loop.reader.eval_progress("v")
    assert (progress.num_done, progress.rewards) == (1, ())


async def test_the_test_split_is_played_when_asked_for_alone(join: Callable[..., Any]) -> None:
    """Both splits are registered in one list; each evaluation cycles through its own."""
    writer, reader = await join()
    held_out = [Task(task_id=f"e{i}", payload={"n": -1 - i}) for i in range(5)]
    await writer.register_tasks(
        [Task(task_id="t", payload={})], held_out, suites={"validation": 3, "test": 2}
    )
    reader.recover(None, fence=reader.acquire_fence())
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    for split, number in (("validation", 4), ("test", 3)):
        reader.request_eval(
            split,
            policy_version=0,
            num_episodes=number,
            sampling={},
            suite=split,
            blocks_training=True,
        )
    claims = (await writer.claim(key="k", count=7)).claims
    assert [claim.task.task_id for claim in claims] == ["e0", "e1", "e2", "e0", "e3", "e4", "e3"]
    await writer.close()


async def test_the_episodes_of_an_evaluation_are_read_with_task_source_and_answer(
    join: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    """Three samples of each of the first two tasks of a suite of three; a suite with fewer tasks
    than were asked for is played whole, and the evaluation is done with that."""
    writer, reader = await join()
    hard = [Task(task_id=f"h{i}", payload={"n": i}, source="ab"[i % 2]) for i in range(3)]
    held_out = [Task(task_id="v", payload={"n": -1}), *hard]
    suites = {"validation": 1, "hard": 3}
    await writer.register_tasks([Task(task_id="t", payload={})], held_out, suites=suites)
    reader.recover(None, fence=reader.acquire_fence())
    reader.announce_version(0, None)
    reader.acknowledge_version(0)
    for name, number, samples in (("two", 6, 3), ("all", 20, 2)):
        reader.request_eval(
            name,
            policy_version=0,
            num_episodes=number,
            sampling={},
            suite="hard",
            samples_per_task=samples,
            blocks_training=True,
        )
    claims = (await writer.claim(key="k", count=12)).claims
    assert [claim.task.task_id for claim in claims] == ["h0", "h1"] * 3 + ["h0", "h1", "h2"] * 2
    for claim in claims:
        name = f"{claim.eval_name}-{claim.attempt}"
        await writer.open_episode(
            Opening(
                episode_id=name,
                task_id=claim.task.task_id,
                group_id=None,
                attempt=claim.attempt,
                purpose="eval",
                deadline_at=1e10,
                sampling={},
                eval_name=claim.eval_name,
                opened_at=0.0,
            )
        )
        await writer.append_turn(structs.replace(make_turn(name), episode_id=name))
        reward = Reward(value=float(claim.attempt), answer=claim.task.task_id[-1])
        await writer.close_episode(
            name, outcome="completed", failure_kind=None, reward=reward, error="", key="c"
        )
    assert (await writer.claim(key="none", count=1)).claims[0].purpose == "train"
    found = reader.eval_episodes("two")
    assert [(one.task_id, one.source, one.reward.answer) for one in found[:2]] == [
        ("h0", "a", "0"),
        ("h1", "b", "1"),
    ]
    assert [one.reward.value for one in found] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert {(one.num_turns, one.outcome) for one in found} == {(1, "completed")}
    assert found[0].num_tokens > 0
    progress = reader.eval_progress("all")
    assert (progress.num_done, progress.num_total) == (6, 6)
    with pytest.raises(RecordError, match="consist of their suites"):
        await writer.register_tasks([], held_out, suites={"validation": 5})
    await writer.close()


async def test_an_old_evaluation_makes_room_when_it_is_over(start: Callable[..., Any]) -> None:
    """What is left of one that newer ones displaced expires, but not before its last attempt."""
    loop = await start()
    reader = loop.reader
    for number in range(9):
        reader.request_eval(f"{number}", policy_version=0, num_episodes=2, sampling={})
    await loop.play_all()
    assert reader.eval_progress("0").num_done == 2
    for number in range(9, 12):
        reader.request_eval(f"{number}", policy_version=0, num_episodes=2, sampling={})

    def lifetime_s(name: str) -> float:
        return float(reader.client.pttl(reader.key(name))) / 1000

    for name in ("eval:0", "eval:0:rewards", "eval:1", "eval:3:rewards"):
        assert 3590 < lifetime_s(name) <= 3600, name
    assert lifetime_s("eval:4") < 0
    assert not reader.eval_episodes("0")
    assert len(reader.eval_episodes("4")) == 2
    (late, *_) = (await loop.claim(1)).claims
    for number in range(12, 20):
        reader.request_eval(f"{number}", policy_version=0, num_episodes=2, sampling={})
    assert late.eval_name == "9"
    assert lifetime_s("eval:9") < 0
    await loop.play(late)
    await loop.play_all()
    assert reader.eval_progress("9").num_done == 2
    assert 3590 < lifetime_s("eval:9") <= 3600
    assert not reader.client.exists(reader.key("eval:9:episodes"))
    assert lifetime_s("eval:19") < 0


async def test_an_evaluation_without_tasks_is_refused(start: Callable[..., Any]) -> None:
    """It would never finish."""
    loop = await start(num_eval_tasks=0)
    with pytest.raises(NotFound, match="no validation tasks"):
        loop.reader.request_eval("v", policy_version=0, num_episodes=1, sampling={})
    with pytest.raises(RecordError, match="sampling"):
        loop.reader.request_eval(
            "v", policy_version=0, num_episodes=1, sampling={"t": float("nan")}
        )
    with pytest.raises(RecordError, match="num_episodes=0"):
        loop.reader.request_eval("v", policy_version=0, num_episodes=0, sampling={})


async def test_evaluations_use_capacity_that_training_leaves(start: Callable[..., Any]) -> None:
    """Training goes first, unless it waits for the evaluation or a later version is served; and the
    evaluation says which of its episodes have later tokens."""
    loop = await start(buffer__max_staleness=1, buffer__pipeline_depth=0)
    request = partial(loop.reader.request_eval, policy_version=0, num_episodes=2, sampling={})
    request("spare")
    *trained, evaluated = (await loop.claim(5)).claims
    assert [claim.purpose for claim in (*trained, evaluated)] == ["train"] * 4 + ["eval"]
    for claim in (*trained, evaluated):
        await loop.play(claim)
    request("awaited", blocks_training=True)
    leases = loop.take()
    loop.reader.announce_version(1, 0)
    (old,) = (await loop.claim(1)).claims
    assert (old.purpose, old.eval_name) == ("eval", "spare")
    loop.reader.acknowledge_version(1)
    loop.reader.mark_trained(
        [lease.group.group_id for lease in leases], fence=leases[0].fence, policy_version=1
    )
    assert [claim.eval_name for claim in (await loop.claim(3)).claims] == ["awaited", "awaited", ""]
    assert loop.reader.eval_progress("spare").num_mixed == 0
    await loop.play(old, version=1)
    progress = loop.reader.eval_progress("spare")
    assert (progress.newest_version, progress.num_mixed, progress.num_done) == (1, 1, 2)


async def test_claims_go_on_during_a_publish_unless_synchronous(start: Callable[..., Any]) -> None:
    """What starts is by the version before then, and that is what it counts as."""
    for staleness, found in ((0, ("not_ready", 0)), (1, ("", 1))):
        loop = await start(buffer__max_staleness=staleness, run__name=f"k{staleness}")
        loop.reader.announce_version(1, 0)
        answer = await loop.claim(1)
        assert (answer.reason, len(answer.claims)) == found


async def test_a_take_during_a_publish_starts_nothing(start: Callable[..., Any]) -> None:
    """Credit of what was dropped returns when servers hold the trainer's version: what started by
    the one before would become too old before its turn."""
    loop = await start(buffer__max_staleness=1, buffer__pipeline_depth=1)
    await loop.play_all()
    leases = loop.take()
    loop.reader.drop(leases[0].group.group_id, "no_signal", fence=leases[0].fence)
    loop.reader.announce_version(1, 0)
    again = loop.take(version=1)
    assert len(again) == 2
    assert (await loop.claim(1)).claims == ()
    loop.reader.acknowledge_version(1)
    loop.reader.mark_trained([leases[1].group.group_id], fence=leases[0].fence, policy_version=1)
    assert len((await loop.claim(9)).claims) == 4


async def test_an_evaluation_knows_the_versions_that_sampled_it(
    start: Callable[..., Any], make_turn: Callable[..., Turn]
) -> None:
    """The oldest and the newest of all its turns, trained or not; an episode without turns has
    none, and training episodes do not count."""
    loop = await start(buffer__max_staleness=3)
    for version in range(1, 4):
        loop.publish(version, version - 1)
    loop.reader.request_eval("x", policy_version=1, num_episodes=3, sampling={})
    progress = loop.reader.eval_progress("x")
    assert (progress.oldest_version, progress.newest_version) == (None, None)
    claims = [one for one in (await loop.claim(20)).claims if one.purpose == "eval"]
    for claim, versions in zip(claims, ([2, 3], [3, 3, 2], []), strict=True):
        episode_id = await loop.open(claim)
        for index, version in enumerate(versions):
            turn = make_turn(episode_id, index, version=version, trained=False)
            await loop.writer.append_turn(turn)
        await loop.close(episode_id)
    progress = loop.reader.eval_progress("x")
    assert (progress.oldest_version, progress.newest_version) == (2, 3)
    assert (progress.num_done, progress.num_mixed) == (3, 2)
