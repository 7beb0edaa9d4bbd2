"""Answers that the client begins itself, as Anthropic's do: the policy goes on from there."""

from pathlib import Path

import anthropic
import pytest
from tokenizers import AddedToken, Tokenizer

from fakes.fake_server import Script

PREFILL = "Here it is:\n```json\n{"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
ASK = {"role": "user", "content": "Some JSON, please."}


@pytest.fixture
def ask(stage):
    """What an answer to a begun conversation says, from Anthropic's client."""

    async def asked(
        episode: dict, messages: list, *, stream: bool, **fields
    ) -> anthropic.types.Message:
        client = anthropic.AsyncAnthropic(
            base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0
        )
        stage.stack.push_async_callback(client.close)
        words = {"model": "policy", "messages": messages, "max_tokens": 99, **fields}
        if not stream:
            return await client.messages.create(**words)
        async with client.messages.stream(**words) as events:
            pieces = [text async for text in events.text_stream]
            message = await events.get_final_message()
        assert "".join(pieces) == "".join(b.text for b in message.content if b.type == "text")
        return message

    return asked


def stopped(stage, text: str, stop: str) -> None:
    """The policy says `text`, which a stop string ends."""
    ids = stage.renderer.tokenizer.encode(text)
    stage.server.answer = lambda request: Script(ids=ids, finish={"type": "stop", "matched": stop})


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 100])
async def test_the_policy_goes_on_where_the_client_stopped(stage, ask, stream, chunk) -> None:
    """The beginning is prompt, in the answer's place; a stop string in it stops nothing; the whole
    answer handed back continues the branch."""
    stage.server.chunk = chunk
    stopped(stage, ' "a": 1}\n```', "```")
    episode = await stage.open()
    begun = [ASK, {"role": "assistant", "content": PREFILL}]
    beginning = await ask(episode, begun, stream=stream, stop_sequences=["```"])
    assert [block.text for block in beginning.content] == [' "a": 1}']
    assert (beginning.stop_reason, beginning.stop_sequence) == ("stop_sequence", "```")
    prompt = stage.renderer.tokenizer.decode(stage.server.requests[0]["input_ids"])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n" + PREFILL)
    stage.says("Welcome.")
    whole = {"role": "assistant", "content": PREFILL + beginning.content[0].text}
    thanks = [ASK, whole, {"role": "user", "content": "Thanks."}]
    assert (await ask(episode, thanks, stream=stream)).content[0].text == "Welcome."
    first, second = stage.turns(episode)
    assert (first.branch_cause, second.branch_cause) == ("root", "extension")
    assert first.loss_spans == ((0, len(first.output_ids)),)
    seen = stage.server.requests[1]["input_ids"]
    own = [*first.prompt_ids, *first.output_ids, *second.prompt_ids]
    assert seen == own


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prefill", "generated", "texts", "calls"),
    [
        ("The answer is", " 42.", [" 42."], 0),
        ("  The answer is ", "42.", ["42."], 0),
        ("Let me see.", "\n" + CALL, [], 1),
        ("Let me see.", " Yes.\n" + CALL + "\n" + CALL, [" Yes."], 2),
        ("So", "", [""], 0),
        ("caf", "\u00e9 \u4e2d", ["\u00e9 \u4e2d"], 0),
    ],
)
async def test_what_follows_is_read_as_any_answer(
    make_stage, stage, ask, stream: bool, prefill: str, generated: str, texts: list, calls: int
) -> None:
    """White space and calls after the beginning too; a retry, also elsewhere, says the same."""
    stage.says(generated)
    episode = await stage.open()
    begun = [ASK, {"role": "assistant", "content": prefill}]
    beginning = await ask(episode, begun, stream=stream, tools=TOOLS)
    assert [b.text for b in beginning.content if b.type == "text"] == texts
    assert [b.input for b in beginning.content if b.type == "tool_use"] == [{"x": 1}] * calls
    retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
    other = await make_stage(beside=stage)
    elsewhere = {**episode, "base_url": f"{other.url}/v1"}
    again = await ask(elsewhere, begun, stream=stream, tools=TOOLS, **retry)
    assert [block.model_dump() for block in again.content] == [
        b.model_dump() for b in beginning.content
    ]
    assert len(stage.server.requests) == 1


async def test_tokens_are_counted_as_they_are_generated(stage, ask) -> None:
    """count_tokens counts what the server is given."""
    stage.says("x")
    episode = await stage.open()
    body = {"model": "policy", "messages": [ASK, {"role": "assistant", "content": PREFILL}]}
    counted = await stage.post("/v1/messages/count_tokens", body, episode["api_key"])
    await ask(episode, body["messages"], stream=False)
    assert counted.json()["input_tokens"] == len(stage.server.requests[0]["input_ids"])


async def test_an_answer_that_was_cut_is_gone_on_with(stage, ask) -> None:
    """A client that hands the first half back gets the second; the cause is recorded."""
    stage.server.answer = lambda request: Script(
        ids=stage.renderer.tokenizer.encode("one two"), finish={"type": "length"}
    )
    episode = await stage.open()
    half = (await ask(episode, [ASK], stream=False)).content[0].text
    stage.says(" three")
    begun = [ASK, {"role": "assistant", "content": half}]
    assert (await ask(episode, begun, stream=False)).content[0].text == " three"
    assert [turn.branch_cause for turn in stage.turns(episode)] == ["root", "prefill"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_chat_completions_go_on_when_asked_to(stage, goes_on: bool) -> None:
    """As SGLang and vLLM have it; otherwise the answer is a message of its own."""
    stage.says(" 42.")
    episode = await stage.open()
    client = await stage.client(episode)
    messages = [ASK, {"role": "assistant", "content": "The answer is"}]
    answer = await client.chat.completions.create(
        model="policy", messages=messages, extra_body={"continue_final_message": goes_on}
    )
    assert answer.choices[0].message.content == (" 42." if goes_on else "42.")
    prompt = stage.renderer.tokenizer.decode(stage.server.requests[0]["input_ids"])
    assert prompt.endswith("The answer is") is goes_on


@pytest.fixture
def thinking_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with what else the format of Qwen3.5, which opens a thought, asks for."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    return tmp_path


async def test_a_policy_that_thinks_first_does_so(make_stage, ask, thinking_folder) -> None:
    """Where the format opens a thought, the client's words are a message before it."""
    model = {"path": str(thinking_folder), "renderer": "qwen3.5", "renderer_options": {}}
    stage = await make_stage(model=model)
    stage.says("Hm.\n</think>\n\nIt is 42.")
    episode = await stage.open()
    begun = [ASK, {"role": "assistant", "content": "The answer is"}]
    assert (await ask(episode, begun, stream=True)).content[0].text == "It is 42."
    prompt = stage.renderer.tokenizer.decode(stage.server.requests[0]["input_ids"])
    assert "The answer is<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
