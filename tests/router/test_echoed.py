"""What an answer of `/v1/responses` repeats of its request, as OpenAI's do."""

import pytest
from openai.types.responses import Response

ASKED = {
    "model": "policy",
    "input": "hi",
    "instructions": "Be short.",
    "metadata": {"user": "u", "step": "3"},
    "store": False,
    "temperature": 0.5,
    "top_p": 0.25,
    "max_output_tokens": 40,
    "max_tool_calls": 2,
    "parallel_tool_calls": False,
    "tool_choice": {"type": "function", "name": "f"},
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "g"},
        {"type": "web_search"},
    ],
    "text": {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
        "verbosity": "low",
    },
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "auto",
    "service_tier": "flex",
    "user": "someone",
    "safety_identifier": "safe",
    "prompt_cache_key": "cache",
}
REPEATED = (
    *("instructions", "metadata", "store", "max_tool_calls", "parallel_tool_calls", "tool_choice"),
    *("text", "reasoning", "top_logprobs", "user", "safety_identifier", "prompt_cache_key"),
)
SAMPLING = ("temperature", "top_p", "max_output_tokens")
OWN = {"truncation": "disabled", "service_tier": "default", "background": False}
"""What is in force here, whatever is asked."""
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def answered(stage, **asked: object) -> list[dict]:
    """Every response object of a plain answer and of a streamed one, as it stands on the wire."""
    episode = await stage.open()
    client = await stage.client(episode)
    stage.server.answer = lambda request: stage.script(CALL)
    plain = await client.responses.with_raw_response.create(**asked)
    streamed = await client.responses.create(**asked, stream=True)
    events = [event async for event in streamed if hasattr(event, "response")]
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.completed"),
    ]
    return [plain.http_response.json(), *(event.response.to_dict() for event in events)]


async def test_what_was_asked_is_repeated(make_stage) -> None:
    """From the first event of a stream on; the SDK's type takes every value as it is."""
    stage = await make_stage(sampling={"governance": "record"})
    for body in await answered(stage, **ASKED):
        for name in (*REPEATED, *SAMPLING):
            assert body[name] == ASKED[name], name
        assert {name: body[name] for name in OWN} == OWN
        assert [(tool["name"], tool["strict"]) for tool in body["tools"]] == [
            ("f", True),
            ("g", None),
        ]
        assert body["tools"][1] == {
            "type": "function",
            "name": "g",
            "description": None,
            "parameters": None,
            "strict": None,
        }
        Response.model_validate(body, strict=True)


async def test_what_was_left_out_has_the_defaults_of_the_api(stage) -> None:
    """Nothing is missing that OpenAI's answers have."""
    for body in await answered(stage, model="policy", input="hi"):
        assert {name: body[name] for name in REPEATED} == {
            "instructions": None,
            "metadata": {},
            "store": True,
            "max_tool_calls": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": None, "summary": None},
            "top_logprobs": 0,
            "user": None,
            "safety_identifier": None,
            "prompt_cache_key": None,
        }
        assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (1.0, 1.0, None)
        assert {name: body[name] for name in OWN} == OWN
        is_over = body["status"] == "completed"
        assert (body["completed_at"] is not None) == is_over
        Response.model_validate(body, strict=True)


@pytest.mark.medium
async def test_what_a_run_enforces_is_what_answers_say(make_stage) -> None:
    """Sampling and the format of the text as they are in force, not as they were asked."""
    stage = await make_stage(
        sampling={
            "temperature": 0.75,
            "max_new_tokens": 30,
            "governance_by_parameter": {"response_format": "enforce"},
        }
    )
    for body in await answered(stage, **ASKED):
        assert [body[name] for name in SAMPLING] == [0.75, 1.0, 30]
        assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"a": 1}},
        {"metadata": "x"},
        {"store": "yes"},
        {"instructions": 5},
        {"user": 5},
        {"reasoning": {"effort": 1}},
        {"text": {"verbosity": {}}},
        {"max_tool_calls": "2"},
    ],
)
async def test_what_cannot_be_repeated_is_refused_by_name(stage, wrong: dict) -> None:
    """A value of another type than the API's would make an answer that no SDK reads."""
    episode = await stage.open()
    body = {"model": "policy", "input": "hi", **wrong}
    answer = await stage.post("/v1/responses", body, episode["api_key"])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(wrong)))
