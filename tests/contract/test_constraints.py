"""Constrained decoding and top logprobs: what servers of each kind promise (SGLang's contract)."""

import asyncio
import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]
# The tiny model's end of sequence is its quotation mark, so nothing here has strings.
SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 2,
    "maxItems": 3,
}


def text_of(server: Any, answer: dict[str, Any]) -> str:
    """The answer's text, without the id that ended it."""
    tokenizer = Tokenizer.from_file(str(server.folder / "tokenizer.json"))
    ids = answer["output_ids"]
    matched = answer.get("meta_info", {}).get("finish_reason", {}).get("matched")
    return tokenizer.decode(ids[:-1] if ids[-1:] == [matched] else ids)


@pytest.mark.medium
async def test_a_json_schema_is_kept(server: Any) -> None:
    """A policy of random weights writes what the schema describes, and ends after it."""
    for seed in range(4):
        answer = await server.generate(
            PROMPT,
            json_schema=json.dumps(SCHEMA),
            max_new_tokens=400,
            temperature=1.0,
            **({} if server.has_defect("seed") else {"sampling_seed": seed}),
        )
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            # White space has no end of its own; what is there still fits.
            assert re.fullmatch(r"\s*(\[[\s0-9,]*\]?)?\s*", text_of(server, answer))
            continue
        numbers = json.loads(text_of(server, answer))
        assert 2 <= len(numbers) <= 3
        assert all(type(number) is int and 0 <= number < 1000 for number in numbers)


@pytest.mark.medium
async def test_a_schema_is_kept_in_a_stream_and_beside_others(server: Any) -> None:
    """Rows with and without a schema do not touch each other; each has finite logprobs."""
    schema = json.dumps({"type": "integer", "minimum": 100, "maximum": 999})
    fields = {"json_schema": schema, "max_new_tokens": 40}
    events = [event async for event in server.stream(PROMPT, **fields)]
    ids = events[-1]["output_ids"]
    if len(ids) < events[-1]["meta_info"]["completion_tokens"]:
        # Pieces are the whole so far, or what is new.
        ids = [token for event in events for token in event["output_ids"]]
    assert re.fullmatch(r"\s*[0-9]{0,3}\s*", text_of(server, events[-1] | {"output_ids": ids}))
    constrained, free = await asyncio.gather(
        server.generate(PROMPT, **fields),
        server.generate(PROMPT, max_new_tokens=24, ignore_eos=True),
    )
    assert re.fullmatch(r"\s*[0-9]{0,3}\s*", text_of(server, constrained))
    assert len(free["output_ids"]) == 24
    assert all(entry[0] > -100 for entry in constrained["meta_info"]["output_token_logprobs"])


@pytest.mark.medium
async def test_a_schema_that_cannot_be_read_is_refused(server: Any) -> None:
    """400 or an aborted answer, with the reason; the server lives on."""
    status, answer = await server.post(
        "/generate", input_ids=PROMPT, sampling_params={"json_schema": '{"type": "nothing"}'}
    )
    is_aborted = status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert status == 400 or is_aborted
    assert (await server.generate(PROMPT, max_new_tokens=2))["output_ids"]


async def test_top_logprobs_are_the_most_probable(server: Any) -> None:
    """As many as asked for, in order; what was sampled greedily is the first of them."""
    status, answer = await server.post(
        "/generate",
        input_ids=PROMPT,
        sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=3,
    )
    assert status == 200
    meta = answer["meta_info"]
    assert len(meta["output_top_logprobs"]) == 6
    for sampled, top in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert len(top) == 3
        assert [entry[0] for entry in top] == sorted((entry[0] for entry in top), reverse=True)
        assert top[0][1] == sampled[1]
        assert top[0][0] == pytest.approx(sampled[0], abs=1e-4)
