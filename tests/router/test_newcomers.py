"""What somebody tries first with the SDKs."""

from pathlib import Path

import anthropic
import msgspec
import openai
import pytest
from tokenizers import Tokenizer, decoders, models

from outloop.router.dialects import chat_request, responses_request
from outloop.router.rendering.tokenizer import PolicyTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def anthropic_client(stage, base_url: str, key: str, **options) -> anthropic.AsyncAnthropic:
    """Anthropic's client, closed with the stage."""
    client = anthropic.AsyncAnthropic(base_url=base_url, api_key=key, **options)
    stage.stack.push_async_callback(client.close)
    return client


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_models_are_listed_and_found_by_both_sdks(make_stage, sdk: str) -> None:
    """One list for both, names with slashes too; what is not served is their own 404."""
    judge = {"base_url": "http://127.0.0.1:1"}
    stage = await make_stage(model={"name": "org/policy"}, router={"upstreams": {"judge": judge}})
    episode = await stage.open()
    library = {"openai": openai, "anthropic": anthropic}[sdk]
    client = (
        await stage.client(episode)
        if sdk == "openai"
        else anthropic_client(stage, episode["base_url"], episode["api_key"])
    )
    assert [model.id async for model in client.models.list()] == ["org/policy", "judge"]
    for name in ("org/policy", "org/policy@0", "judge"):
        assert (await client.models.retrieve(name)).id == name
    with pytest.raises(library.NotFoundError, match="served: 'org/policy'"):
        await client.models.retrieve("org")


async def test_a_model_is_shown_to_its_episode_only(stage) -> None:
    """Finding one takes the same key as asking it."""
    for path in ("/v1/models", "/v1/models/policy", "/v1/v1/models/policy"):
        answer = await stage.get(path, key="sk-other")
        assert answer.status_code == 401
        assert answer.headers["x-should-retry"] == "false"
        assert (await stage.post(path, {}, key="sk-other")).status_code == 405


@pytest.mark.medium
async def test_a_client_whose_key_is_fixed_has_its_episodes_in_the_path(stage) -> None:
    """The path alone names the episode, in every dialect; nothing short of the key opens it."""
    one, other = await stage.open(), await stage.open()
    stage.server.answer = lambda request: stage.script("fine")
    url = f"{stage.url}/episodes/{one['api_key']}/v1"
    fixed = openai.AsyncOpenAI(base_url=url, api_key="EMPTY")
    stage.stack.push_async_callback(fixed.close)
    await fixed.chat.completions.create(model="policy", messages=MESSAGES)
    await fixed.responses.create(model="policy", input="hi")
    await fixed.models.retrieve("policy")
    own = anthropic_client(stage, url.removesuffix("/v1"), "sk-ant-fixed")
    await own.messages.create(model="policy", messages=MESSAGES, max_tokens=5)
    assert len(stage.turns(one)) == 3
    body = {"model": "policy", "messages": MESSAGES}
    for episode_id, key, status in (
        (one["api_key"], one["api_key"], 200),
        (one["api_key"], other["api_key"], 401),
        (one["api_key"][:-1] + "x", "EMPTY", 401),
        (one["episode_id"], "EMPTY", 401),
        (one["api_key"], "ol-ep-x-0", 401),
    ):
        path = f"/episodes/{episode_id}/v1/chat/completions"
        assert (await stage.post(path, body, key)).status_code == status
    assert len(stage.turns(one)) == 4
    assert not stage.turns(other)
    # What is the runner's stays the runner's.
    path = f"/episodes/{one['api_key']}"
    assert (await stage.get(path, key="EMPTY")).status_code == 401


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_of_logprobs_are_those_of_the_answer(stage, stream: bool) -> None:
    """A token that is a part of a character has its own bytes; joined, they are the text."""
    text = "caf\u00e9 \u4e2d\u6587 \U0001f600"
    stage.server.answer = lambda request: stage.script(text)
    client = await stage.client(await stage.open())
    wish = {"model": "policy", "stream": stream}
    stop = b"<|im_end|>"
    chat = await client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=1, **wish
    )
    choices = [c async for x in chat for c in x.choices] if stream else chat.choices
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert len(tokens) > len(text)
    assert b"".join(bytes(t.bytes) for t in tokens) == text.encode() + stop
    assert [t.top_logprobs[0].bytes for t in tokens] == [t.bytes for t in tokens]
    asked = {"model": "policy", "input": "hi", "include": ["message.output_text.logprobs"]}
    if stream:
        async with client.responses.stream(**asked) as events:
            history = await events.get_final_response()
    else:
        history = await client.responses.create(**asked)
    part = history.output[0].content[0]
    assert b"".join(bytes(t.bytes) for t in part.logprobs) == text.encode() + stop
    raw = await client.completions.create(prompt="hi", logprobs=3, **wish)
    choices = [c async for x in raw for c in x.choices] if stream else raw.choices
    (found,) = (choice.logprobs for choice in choices if choice.logprobs)
    assert found.tokens[:3] == ["c", "a", "f"]
    assert found.tokens[3:5] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found.text_offset[:6] == [0, 1, 2, 3, 3, 4]
    assert found.text_offset[-1] == len(text)
    assert [len(top) for top in found.top_logprobs] == [3] * len(found.tokens)


def test_bytes_of_a_tokenizer_with_a_fallback_to_bytes(tmp_path: Path) -> None:
    """Its tokens name the byte; a token of text is its text."""
    names = ["<unk>", "a", "\u00e9", "<0xE4>", "<0xB8>", "<0xAD>", "<0xff>"]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    policy = PolicyTokenizer(tmp_path)
    found = b"".join(policy.bytes_of(i) for i in range(1, 6))
    assert found == "a\u00e9\u4e2d".encode()
    assert policy.bytes_of(6) == b"<0xff>"


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ALLOWED = [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "allowed_tools", "mode": "required", "tools": ALLOWED}, "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}, "auto"),
        ({"type": "allowed_tools"}, "auto"),
        ({"type": "custom", "name": "shell"}, "auto"),
        ({"type": "web_search"}, "auto"),
        ({"type": "function", "name": "g"}, "function:g"),
    ],
)
def test_every_form_of_tool_choice_is_read(choice: dict, meant: str) -> None:
    """Both of OpenAI's dialects; what names tools of other kinds leaves the policy its choice."""
    inner = {name: value for name, value in choice.items() if name != "type"}
    nested = {"type": choice["type"], choice["type"]: inner} if inner else choice
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    chat = {"model": "policy", "messages": MESSAGES, "tools": TOOLS, "tool_choice": nested}
    history = {"model": "policy", "input": "hi", "tools": flat, "tool_choice": choice}
    assert chat_request.decode(msgspec.json.encode(chat)).tool_choice == meant
    assert responses_request.decode(msgspec.json.encode(history)).tool_choice == meant


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_counted(stage, stream: bool) -> None:
    """Both of OpenAI's dialects say how many of an answer's tokens were thoughts."""
    thought, text = "<think>\nLet me see.\n</think>", "\n\nfine"
    stage.server.answer = lambda request: stage.script(thought + text)
    client = await stage.client(await stage.open())
    chat = await client.chat.completions.create(
        model="policy",
        messages=MESSAGES,
        n=2,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    usage = [x.usage async for x in chat][-1] if stream else chat.usage
    if stream:
        async with client.responses.stream(model="policy", input="hi") as events:
            history = await events.get_final_response()
    else:
        history = await client.responses.create(model="policy", input="hi")
    num = len(stage.renderer.tokenizer.encode(thought))
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num
    assert history.usage.output_tokens_details.reasoning_tokens == num
    assert history.usage.output_tokens == num + len(stage.renderer.tokenizer.encode(text)) + 1
    stage.server.answer = lambda request: stage.script("fine")
    chat = await client.chat.completions.create(model="policy", messages=MESSAGES)
    assert chat.usage.completion_tokens_details is None


async def test_functions_are_not_left_out_unsaid(stage) -> None:
    """An agent of the time before tools gets an error that says what to send."""
    client = await stage.client(await stage.open())
    functions = [{"name": "f", "parameters": {"type": "object"}}]
    with pytest.raises(openai.BadRequestError, match="in tools"):
        await client.chat.completions.create(model="policy", messages=MESSAGES, functions=functions)
    stage.says("fine")
    await client.chat.completions.create(
        model="policy", messages=MESSAGES, extra_body={"functions": []}
    )
