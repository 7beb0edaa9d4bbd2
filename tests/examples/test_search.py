"""Search over a small corpus: the index takes any query, the agent finds names, two steps."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def tasks(load_example: Callable[..., ModuleType]) -> ModuleType:
    """The example's corpus and questions."""
    return load_example("search", "tasks")


def test_questions_are_in_one_split_and_can_be_found(tasks: ModuleType) -> None:
    """Training questions are not held out, and one search finds most names."""
    train, held_out = tasks.train_tasks(), tasks.eval_tasks()
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    assert len(train) > 500
    assert 0.8 < tasks.reward_of(tasks.searching_player) < 1
    assert 0.2 < tasks.reward_of(tasks.scripted_player) < 0.5


@pytest.mark.medium
def test_the_warm_start_answers_no_question(tasks: ModuleType) -> None:
    """It is asked for mixed words, and its calls and results are those of the tool."""
    asked = {row["question"] for row in tasks.train_tasks() + tasks.eval_tasks()}
    corpus, num_searches = tasks.Corpus(), 0
    for row in tasks.conversations()[:200]:
        _, question, *rest = row["messages"]
        assert question["content"] not in asked
        if len(rest) == 3:
            call, found, answer = rest
            query = json.loads(call["tool_calls"][0]["function"]["arguments"])["query"]
            assert set(query.split()) <= set(question["content"].split())
            assert found["content"] == corpus.search(query)
            assert answer["content"] in found["content"]
            num_searches += 1
    assert 80 < num_searches < 160


@pytest.mark.parametrize(
    "query", ["", '"', "NEAR(", "* OR", "name:median", "a" * 100_000, "\x00 median", "é ü -- ;"]
)
def test_any_text_is_a_query(tasks: ModuleType, query: str) -> None:
    """No syntax of the index reaches it, whatever a policy writes."""
    assert tasks.Corpus().search(query)


async def test_an_agent_searches_and_answers(
    load_example: Callable[..., ModuleType], open_episode: Callable[..., Any], router: Any
) -> None:
    """What the tool finds comes back, a broken call is answered, and the name is what counts."""
    rollout = load_example("search", "rollout")
    shown: list[str] = []
    asked = ["", '{"query": "median middle value of data"}']

    def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
        shown[:] = [one["content"] for one in messages if one["role"] == "tool"]
        if len(shown) == len(asked):
            return {"role": "assistant", "content": said}
        function = {"name": "search", "arguments": asked[len(shown)]}
        call = {"id": f"c{len(shown)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    router.answer = answer
    rewards = []
    for name in ("statistics.median", "median"):
        said = name
        task, episode = open_episode({"question": "Which one?", "answer": "statistics.median"})
        rewards.append(await rollout.play(task, episode))
    assert rewards == [1.0, 0.0]
    assert shown[0].startswith("error: ")
    assert "statistics.median: Return the median" in shown[1]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_it_trains(train_example: Callable[..., list[dict[str, Any]]]) -> None:
    """From nothing: two steps."""
    rows = [row for row in train_example("search") if "train/loss" in row]
    assert [row["train/episodes"] for row in rows] == [12, 12]
    assert all(row["train/failed_share"] == 0 for row in rows)
