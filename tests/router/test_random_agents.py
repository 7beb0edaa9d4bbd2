"""Agents of which every move is random: exact ids, one loss per token, causes, episodes apart."""

import asyncio
import itertools
import json
import shutil
from dataclasses import dataclass, field
from itertools import cycle, zip_longest

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from fakes.random_agent import KINDS, SAYINGS, Move, RandomAgent, RandomPolicy
from fakes.records import trajectory_of as trajectory_with
from outloop.buffer.records import Trajectory
from outloop.engine.train.data.samples import build_samples
from outloop.router.rendering.renderer import PolicyRenderer

LLAMA = ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text", "eom_id")
MOVES = st.lists(
    st.builds(
        Move,
        kind=st.sampled_from(KINDS),
        pick=st.integers(0, 11),
        style=st.integers(0, 3),
        num_choices=st.sampled_from((1, 1, 1, 2, 3)),
        stream=st.booleans(),
    ),
    min_size=2,
    max_size=9,
)
PLAYS = st.lists(
    st.tuples(MOVES, st.lists(st.sampled_from(SAYINGS), min_size=1, max_size=8)),
    min_size=1,
    max_size=3,
)
# Making a failing play smaller would outlast the test's timeout.
BOUNDED = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def qwen_calls(calls: list[str]) -> str:
    """Calls of the calculator as Qwen3 writes them."""
    return "So: " + "\n".join(
        f'<tool_call>\n{{"name": "calculator", "arguments": {one}}}\n</tool_call>' for one in calls
    )


def llama_call(calls: list[str]) -> str:
    """The one call that Llama 3's format has room for."""
    return f'{{"name": "calculator", "parameters": {calls[0]}}}'


@dataclass(frozen=True)
class Format:
    """A chat format: what the run's settings say of it, and how its policy writes calls."""

    renderer: str
    calls: object
    options: dict = field(default_factory=dict)
    breaks_at_user: bool = False
    """The template leaves earlier reasoning out once the user speaks."""


FORMATS = {
    "qwen3": Format("qwen3", qwen_calls, {"enable_thinking": False}),
    "qwen3_thinking": Format("qwen3", qwen_calls, breaks_at_user=True),
    "llama": Format("llama-3", llama_call),
}


@pytest.fixture
async def format_and_stage(request, make_stage, model_folder, tmp_path):
    """A router for a chat format."""
    chosen = FORMATS[request.param]
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    marks = [f"<|{name}|>" for name in (*LLAMA, "python_tag")]
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(model_folder / "config.json", tmp_path)
    model = {
        "path": str(tmp_path),
        "renderer": chosen.renderer,
        "renderer_options": chosen.options,
        "max_context_tokens": 100_000,
    }
    stage = await make_stage(model=model)
    stage.renderer = PolicyRenderer(stage.run.settings.model)
    return chosen, stage


async def play(chosen: Format, agent: RandomAgent, move: Move) -> None:
    """Make a move; hold what its turns must go on with, and the cause."""
    kind, style = (move.kind if agent.talks else "begin"), move.style
    num_before, num_leaves = len(agent.turns), count_leaves(agent)
    parents = {turn.parent_turn_id for turn in agent.turns}
    if kind == "retry":
        await retry(agent, move)
        return
    if kind == "begin":
        _, turns = await agent.ask(agent.opening(style), agent.tools(), move)
        allowed = {"new_conversation" if num_before else "root"}
        assert turns[0].parent_turn_id is None
    elif kind == "repeat":
        asked = agent.asked[move.pick % len(agent.asked)]
        _, turns = await agent.send(asked.body)
        allowed = BREAKS
        assert turns[0].parent_turn_id == asked.parent
    else:
        talk = agent.talks[-1 - move.pick % len(agent.talks)]
        if kind == "go_on":
            messages = [*agent.echo(talk, style), *agent.reply(talk, style)]
            _, turns = await agent.ask(messages, talk.tools, move)
            # What was generated after a stop cannot stand before a user's words in any format.
            may_break = talk.saying == "after"
            if chosen.breaks_at_user and messages[-1]["role"] == "user":
                # Rendered again, only plain text is sure to become the ids that were generated.
                may_break |= agent.sayings_before(talk) != {"text"}
                # So is not an answer that goes on from the client's own beginning.
                may_break |= any(
                    one["role"] == other["role"] == "assistant"
                    for one, other in itertools.pairwise(messages)
                )
            allowed = {"extension" if talk.turn_id not in parents else "resampled"}
            if turns[0].parent_turn_id != talk.turn_id:
                # Rendered again, it may also extend an earlier turn.
                assert may_break
                allowed = {"template", "extension", "resampled"}
        elif kind == "retools":
            messages = [*agent.echo(talk, style), *agent.reply(talk, style)]
            _, turns = await agent.ask(messages, agent.tools(), move)
            allowed = {"tools_changed"}
            assert turns[0].parent_turn_id is None
        elif kind == "prefill":
            replies = {"role": "assistant", "content": agent.user()["content"]}
            _, turns = await agent.ask([*talk.messages[:-1], replies], talk.tools, move)
            allowed = {"prefill", "resampled"}
        else:
            messages = agent.edited(kind, talk, style)
            _, turns = await agent.ask(messages, talk.tools, move)
            allowed = causes_of_edit(kind, talk)
    assert turns[0].branch_cause in allowed, (move, turns[0].branch_cause)
    assert {turn.branch_cause for turn in turns[1:]} <= {"choice"}
    is_extension = turns[0].branch_cause == "extension"
    assert count_leaves(agent) == num_leaves + len(turns) - is_extension


BREAKS = {
    *("new_conversation", "resampled", "tools_changed", "history_rewritten", "system_changed"),
    *("prefill", "template"),
}


def causes_of_edit(kind: str, talk) -> set[str]:
    """What an edit may be called: where nothing but a system message is left, nothing of it."""
    users = [m for m in talk.messages if m["role"] == "user"]
    if kind == "edit_system" and talk.messages[0]["role"] != "user":
        return {"system_changed"}
    if kind == "edit_user" and len(users) == 1:
        # An answer that was kept tells which conversation it was, unless nothing was said in it.
        return {"history_rewritten", "new_conversation"}
    return {"history_rewritten", "tools_changed", "resampled"}


async def retry(agent: RandomAgent, move: Move) -> None:
    """A request that says it is a retry gets the newest answer to it that nothing went on from, and
    nothing is generated."""
    asked = agent.asked[move.pick % len(agent.asked)]
    continued = {turn.parent_turn_id for turn in agent.turns}
    same = [
        one
        for one in agent.asked
        if json.dumps(one.body) == json.dumps(asked.body) and continued.isdisjoint(one.turn_ids)
    ]
    if not same:
        return
    num_turns, num_sampled = len(agent.turns), agent.num_sampled
    turn_id, replies = await agent.post(asked.body, **{"x-stainless-retry-count": "1"})
    assert turn_id == same[-1].turn_ids[0]
    assert replies == same[-1].answer
    assert (len(agent.turns), agent.num_sampled) == (num_turns, num_sampled)


def count_leaves(agent: RandomAgent) -> int:
    """Branches of the episode so far."""
    parents = {turn.parent_turn_id for turn in agent.turns}
    return sum(turn.turn_id not in parents for turn in agent.turns)


def trajectory_of(agent: RandomAgent) -> Trajectory:
    """The episode as the trainer gets it."""
    return trajectory_with(agent.turns, episode_id=agent.episode["episode_id"], reward=None)


def check_records(agent: RandomAgent) -> set[str]:
    """Hold branches, losses and logprobs against what the server saw; the turns' ids."""
    generated, trajectory = agent.policy.generated, trajectory_of(agent)
    for turn in agent.turns:
        one = generated[turn.turn_id]
        assert one.marks == {agent.mark}
        assert turn.output_ids.tolist() == one.output_ids
        assert turn.loss_spans == ((0, one.num_trained),)
        expected = [-0.125 * (1 + index % 7) for index in range(len(one.output_ids))]
        assert turn.behavior_logprobs.tolist() == expected
    for branch in trajectory.branches():
        path: list[int] = []
        for turn in branch:
            path += turn.prompt_ids.tolist()
            assert path == generated[turn.turn_id].input_ids
            path += turn.output_ids.tolist()
    ids = {turn.turn_id for turn in agent.turns}
    assert len(ids) == len(agent.turns)
    num_trained = 0
    leaves = [branch[-1] for branch in trajectory.branches()]
    for sample in build_samples(trajectory):
        leaf = generated[leaves[sample.branch].turn_id]
        assert sample.token_ids.tolist() == leaf.input_ids + leaf.output_ids
        assert np.all(sample.behavior_logprobs[sample.loss_mask] < 0)
        num_trained += sample.num_trained_tokens
    assert num_trained == sum(generated[turn_id].num_trained for turn_id in ids)
    return ids


@pytest.mark.medium
@pytest.mark.parametrize("format_and_stage", FORMATS, indirect=True)
@given(plays=PLAYS, chunk=st.integers(1, 9))
@BOUNDED
async def test_whatever_agents_do_ids_losses_and_causes_hold(
    format_and_stage, plays, chunk
) -> None:
    """Branches are what the server saw, each generated token is trained once, an echoed answer is
    continued, an edit opens a branch, and no episode holds another's."""
    chosen, stage = format_and_stage
    policy = RandomPolicy(stage.renderer, chosen.calls)
    stage.server.answer, stage.server.chunk = policy.answer, chunk
    agents = [
        RandomAgent(stage, await stage.open(), policy, mark=f"e{index}", says=cycle(says))
        for index, (_, says) in enumerate(plays)
    ]
    for moves in zip_longest(*(moves for moves, _ in plays)):
        together = zip(agents, moves, strict=True)
        await asyncio.gather(*(play(chosen, *one) for one in together if one[1] is not None))
    ids = [check_records(agent) for agent in agents]
    assert sum(len(own) for own in ids) == len(policy.generated) == len(set().union(*ids))
