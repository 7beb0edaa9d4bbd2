"""Scores by a model behind HTTP: a score or an environment failure, never a made-up reward."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from outloop.buffer.errors import EnvironmentFailure, SettingsError
from outloop.envs.verifiers.judge import Judge, RewardModel
from outloop.envs.verifiers.result import Result
from outloop.envs.verifiers.text import Exact
from outloop.envs.verifiers.weighted_sum import Weighted

Call = Callable[..., Any]


class Model:
    """An HTTP server that gives the replies it was told to, one after the other."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, str]] = []
        self.asked: list[Any] = []
        self.is_stuck = False
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        """The next reply; the last one for ever."""
        self.asked.append(await request.json())
        if self.is_stuck:
            await asyncio.Event().wait()
        status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return web.Response(status=status, text=text, content_type="application/json")


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    """A running server."""
    made = Model()
    app = web.Application()
    app.router.add_post("/{tail:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    yield made
    await runner.cleanup()


def chat(text: str) -> str:
    """A chat completion with that message."""
    return json.dumps({"choices": [{"message": {"content": text}}]})


async def test_a_judge_grades_what_it_is_shown(judge: Call, model: Model) -> None:
    """Task and answer are in the request, the answer behind a fence."""
    model.replies = [(200, chat('{"score": 0.75}'))]
    verifier = Judge(model.url, "grader")
    assert await judge(verifier, "Say 1.", question="Why?") == 0.75
    text = model.asked[0]["messages"][0]["content"]
    assert "Why?" in text
    assert text.count("----") >= 6
    assert model.asked[0]["model"] == "grader"
    await verifier.tear_down()


@pytest.mark.medium
async def test_what_a_judge_got_wrong_is_asked_again(judge: Call, model: Model) -> None:
    """Errors, rubbish and scores out of range are tried again, and then a score is a score."""
    model.replies = [(503, "{}"), (200, chat("hm")), (200, chat('{"score": 7}'))]
    model.replies += [(200, chat('{"score": 1}'))]
    verifier = Judge(model.url, "grader", num_tries=4, timeout_s=30)
    assert await judge(verifier, "x") == 1.0
    assert len(model.asked) == 4
    await verifier.tear_down()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("status", "reply"),
    [(500, "{}"), (200, "rubbish"), (200, "[]"), (200, '{"choices": [{"message": null}]}')],
)
async def test_a_failing_judge_is_never_a_reward(
    judge: Call, model: Model, status: int, reply: str
) -> None:
    """Without a score there is an environment failure that names the endpoint."""
    model.replies = [(status, reply)]
    verifier = Judge(model.url, "grader", num_tries=2)
    with pytest.raises(EnvironmentFailure, match=f"{model.url}.*no score in 2 tries"):
        await judge(verifier, "x")
    await verifier.tear_down()


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 1e-3}', 0.001),
        ('{"score": 0.5, "reason": "half"}', 0.5),
        ('```json\n{"score": 1}\n```', 1.0),
        ('<think>{"score": 0}</think>\n{"score": 1}', 1.0),
        ('{"score": 0.1} no: {"score": 0.75}', None),
        ('{"score": 0.1, "score": 1}', None),
        ('{"score": 1} if it were so', None),
        ('the answer says {"score": 1}', None),
        ('[{"score": 1}]', None),
        ('{"score": "1"}', None),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ('{"scores": {"score": 1}}', None),
    ],
)
async def test_a_reply_is_one_score_or_none(
    judge: Call, model: Model, reply: str, score: float | None
) -> None:
    """A reply is read as JSON, whole; what holds several scores, or other text, is asked again."""
    model.replies = [(200, chat(reply)), (200, chat('{"score": 0.25}'))]
    verifier = Judge(model.url, "grader", num_tries=2)
    assert await judge(verifier, "x") == (0.25 if score is None else score)
    await verifier.tear_down()


@pytest.mark.parametrize("kind", ["refused", "confusing"])
async def test_an_answer_that_alone_has_no_score_gets_the_lowest(
    judge: Call, model: Model, kind: str
) -> None:
    """A control answer tells the answer's fault from the endpoint's; one part frees no sum."""
    bad = (400, "{}") if kind == "refused" else (200, chat("I cannot say"))
    num_tries = 1 if kind == "refused" else 2
    verifier = Judge(model.url, "grader", num_tries=2, low=-1.0)
    weighted = Weighted({"judge": (verifier, 1.0), "exact": (Exact(), 0.5)})
    good = (200, chat('{"score": 0.5}'))
    model.replies = [bad] * num_tries + [good]
    reward = await judge(weighted, "x", answer="x")
    assert (reward.value, reward.components["judge"]) == (-0.5, -1.0)
    assert len(model.asked) == num_tries + 1
    model.replies = [bad]
    with pytest.raises(EnvironmentFailure, match="control answer"):
        await judge(verifier, "x")
    for status in (401, 403, 404, 408, 429, 500):
        model.replies = [(status, "{}"), (status, "{}"), good]
        with pytest.raises(EnvironmentFailure, match=f"status={status}"):
            await judge(verifier, "x")
    await verifier.tear_down()


@pytest.mark.parametrize(
    "structure",
    [
        *("<|im_end|>", "<|im_start|>system", "<|eot_id|>", "</s>", "[INST]", "[/INST]", "<<SYS>>"),
        *(
            "<start_of_turn>",
            "<\uff5cUser\uff5c>",
            "</think>",
            "</answer>",
            "\nSystem:",
            "\nHuman:",
        ),
        "\n### Instruction:",
    ],
)
async def test_no_answer_reaches_the_judge_as_structure(
    judge: Call, model: Model, structure: str
) -> None:
    """What a chat template reads as a turn or a tag is text, and long answers are cut."""
    model.replies = [(200, chat('{"score": 1}'))]
    verifier = Judge(model.url, "grader")
    await judge(verifier, f"{'y' * 9000}4 {structure} 5 < 6", question="?")
    text = model.asked[0]["messages"][0]["content"]
    assert structure not in text
    assert "5 < 6" in text
    assert text.count("y") < 8100
    await verifier.tear_down()


async def test_a_part_that_raises_on_an_answer_frees_no_sum(judge: Call) -> None:
    """The part counts 0; a part that raises on any answer is a failure of the environment."""

    def first_word(task: object, result: Result) -> float:
        return float(result.answer.split()[0] == "yes")

    def broken(task: object, result: Result) -> float:
        raise KeyError("x")

    reward = await judge(Weighted({"a": (first_word, 1.0), "b": (Exact(), 1.0)}), "", answer="")
    assert reward.components == {"a": 0.0, "b": 1.0}
    with pytest.raises(EnvironmentFailure, match="KeyError"):
        await judge(Weighted({"a": (broken, 1.0)}), "")


@pytest.mark.medium
async def test_a_judge_that_hangs_is_left(judge: Call, model: Model) -> None:
    """The deadline is for all tries together."""
    model.is_stuck = True
    verifier = RewardModel(model.url, timeout_s=0.3)
    with pytest.raises(EnvironmentFailure, match="timeout_s=0.3 passed"):
        await judge(verifier, "x")
    await verifier.tear_down()


async def test_a_reward_model_gives_a_number(judge: Call, model: Model) -> None:
    """The number itself is the score; what is no number is none."""
    model.replies = [(200, '{"score": -2.5}')]
    verifier = RewardModel(model.url, num_tries=1)
    assert await judge(verifier, "x", question="?") == -2.5
    assert model.asked == [{"task": {"question": "?"}, "answer": "x"}]
    for reply in ('{"score": "1"}', '{"score": true}', '{"score": NaN}', "{}"):
        model.replies = [(200, reply)]
        with pytest.raises(EnvironmentFailure):
            await judge(verifier, "x")
    await verifier.tear_down()


async def test_a_missing_key_is_reported(judge: Call) -> None:
    """The variable is named before anything is sent."""
    verifier = RewardModel("http://127.0.0.1:9/", api_key_env="OUTLOOP_NO_SUCH_KEY")
    with pytest.raises(SettingsError, match="OUTLOOP_NO_SUCH_KEY"):
        await judge(verifier, "x")
    with pytest.raises(SettingsError, match="http"):
        RewardModel("localhost:9")


async def test_parts_add_up_by_their_weights(judge: Call) -> None:
    """The reward is the weighted sum, and every part is reported as it is."""

    def form(task: object, result: Result) -> dict[str, float]:
        return {"short": 1.0, "polite": 0.5}

    async def late(task: object, result: Result) -> float:
        return 3.0

    verifier = Weighted({"right": (Exact(), 1.0), "form": (form, 0.1), "late": (late, -0.5)})
    reward = await judge(verifier, "4", answer="4")
    assert reward.value == pytest.approx(1.0 + 0.15 - 1.5)
    assert reward.components == {
        "right": 1.0, "form": 1.5, "form/short": 1.0, "form/polite": 0.5, "late": 3.0
    }  # fmt: skip
    with pytest.raises(EnvironmentFailure):
        await judge(verifier, "4")
    with pytest.raises(SettingsError):
        Weighted({})
