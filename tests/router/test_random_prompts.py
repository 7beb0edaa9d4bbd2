"""Raw prompts of which everything is random, without any template: text, ids, forks and edits."""

import itertools

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fakes.fake_server import Script

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["begin", "ids", "ids", "text", "text", "edit", "repeat", "same"]),
        st.integers(0, 7),
        st.text(alphabet="ab <\n\u00e9\U0001f600", min_size=1, max_size=6),
        st.sampled_from([1, 2, 3]),
        st.booleans(),
    ),
    min_size=2,
    max_size=9,
)


def path_of(turn, turns) -> list[int]:
    """Ids from the root to the end of a turn."""
    by_id, ids = {one.turn_id: one for one in turns}, []
    while turn is not None:
        ids = [*turn.prompt_ids.tolist(), *turn.output_ids.tolist(), *ids]
        turn = by_id.get(turn.parent_turn_id)
    return ids


def parents_and_causes(ids: list[int], turns) -> dict[str | None, str]:
    """Of all that is recorded, the longest paths that `ids` go on with, and the cause with each."""
    paths = {turn.turn_id: path_of(turn, turns) for turn in turns}
    able = [one for one, path in paths.items() if len(path) < len(ids) and ids[: len(path)] == path]
    if not able:
        return {None: "new_conversation" if turns else "root"}
    longest = max(len(paths[one]) for one in able)
    begun = {turn.parent_turn_id for turn in turns}
    return {
        one: "resampled" if one in begun else "extension"
        for one in able
        if len(paths[one]) == longest
    }


@pytest.mark.medium
@given(moves=MOVES)
@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
async def test_a_random_prompt_continues_all_that_it_repeats(stage, moves) -> None:
    """The server sees the prompt as it is, and its turn the longest recorded path as its parent,
    also where one answer begins as another does, or is another."""
    numbers, tokenizer = itertools.count(), stage.renderer.tokenizer

    def answer(request: dict) -> Script:
        number = next(numbers)
        ids = tokenizer.encode(f" said {number}." if number % 4 == 0 else " a" * (1 + number % 3))
        return Script(ids=ids, finish={"type": "length"})

    stage.server.answer = answer
    episode = await stage.open()
    prompts: list[str | list[int]] = []
    for kind, pick, more, num_choices, stream in moves:
        turns = list(stage.turns(episode))
        last = path_of(turns[-1 - pick % len(turns)], turns) if turns else []
        prompt: str | list[int] = f"begin {next(numbers)}{more}"
        if turns and kind == "ids":
            prompt = [*last, *tokenizer.encode(more)]
        elif turns and kind == "text":
            prompt = tokenizer.decode(last) + more
        elif turns and kind == "same":
            prompt = last
        elif turns and kind == "edit":
            where = pick % len(last)
            prompt = [*last[:where], (last[where] + 1) % 256, *last[where + 1 :]]
        elif turns and kind == "repeat":
            prompt = prompts[pick % len(prompts)]
        prompts.append(prompt)
        body = {"model": "policy", "prompt": prompt, "n": num_choices, "stream": stream}
        answered = await stage.post("/v1/completions", body, episode["api_key"])
        assert answered.status_code == 200, answered.text
        new = stage.turns(episode)[len(turns) :]
        seen = [one["input_ids"] for one in stage.server.requests[-num_choices:]]
        assert [turn.choice_index for turn in new] == list(range(num_choices))
        assert all(ids == seen[0] for ids in seen)
        given = tokenizer.decode(seen[0]) if isinstance(prompt, str) else seen[0]
        assert given == prompt
        causes = parents_and_causes(seen[0], turns)
        for turn in new:
            assert turn.parent_turn_id == new[0].parent_turn_id
            cause = causes[turn.parent_turn_id]
            assert turn.branch_cause == (cause if turn.choice_index == 0 else "choice")
            before = path_of(turn, [*turns, turn])
            assert before[: len(before) - len(turn.output_ids)] == seen[0]
            assert turn.loss_spans == ((0, len(turn.output_ids)),)
