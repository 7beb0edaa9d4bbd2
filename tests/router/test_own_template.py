"""Models that are rendered by the chat template in their folder, and what auto chooses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outloop.buffer.chat_format import chat_format_of, end_ids_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import build_settings
from outloop.router.dialects.base import Message, ToolCall
from outloop.router.errors import Refusal
from outloop.router.rendering.renderer import PolicyRenderer

# In the manner of Qwen2.5: a system message of its own, tools in it, results as a user's message.
TEMPLATE = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- else %}{% set system = 'You help.' %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
CHATML = ("<|im_start|>", "<|im_end|>")
CALLS = ("<tool_call>", "</tool_call>")
DEEPSEEK = tuple(f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant"))
TOOLS = ({"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}},)
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A folder of a model type, with markers and a chat template."""

    def make(model_type: str, markers: tuple[str, ...], template: str | None = TEMPLATE) -> Path:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in markers])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if markers[:2] == CHATML:
            facts["eos_token"] = "<|im_end|>"
        if template is not None:
            facts["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
        return tmp_path

    return make


def renderer_of(folder: Path, name: str = "auto") -> PolicyRenderer:
    """What the router renders with."""
    model = {"path": str(folder), "renderer": name}
    return PolicyRenderer(build_settings({"model": model}, source="test").model)


@pytest.mark.parametrize(
    ("model_type", "markers", "template", "chosen"),
    [
        ("qwen2", (*CHATML, *CALLS), TEMPLATE, "default"),
        ("qwen3", (*CHATML, *CALLS, "<think>"), None, "qwen3"),
        ("qwen3_moe", (*CHATML, *CALLS, "<think>"), None, "qwen3"),
        ("llama", ("<|start_header_id|>", "<|eot_id|>"), None, "llama-3"),
        ("llama", CHATML, TEMPLATE, "default"),
        ("llama", (*DEEPSEEK, "<think>"), None, "deepseek-r1"),
        ("qwen2", (*DEEPSEEK, "<think>"), None, "deepseek-r1"),
        ("glm4_moe", ("<|assistant|>", "<|observation|>"), None, "glm-4.5"),
        ("deepseek_v3", DEEPSEEK, None, "deepseek-v3"),
        ("deepseek_v3", DEEPSEEK, f"x{DEEPSEEK[1]}<think>", "deepseek-r1"),
        ("gpt_oss", ("<|channel|>", "<|message|>"), None, "gpt-oss"),
    ],
)
def test_auto_chooses_by_model_and_tokenizer(
    model_type, markers, template, chosen, make_folder: MakeFolder
) -> None:
    """A Llama or Qwen2 is told by its markers, DeepSeek's two by their template."""
    assert chat_format_of(make_folder(model_type, markers, template)) == chosen


@pytest.mark.parametrize(
    ("model_type", "markers", "template", "words"),
    [
        (
            "newcomer",
            (*CHATML, *CALLS, "<think>"),
            TEMPLATE,
            ['"qwen3", whose', '"default", which'],
        ),
        ("newcomer", ("<x>",), None, ["a family of the renderers package"]),
        ("llama", CHATML, None, ["model_type='llama'", "no chat template"]),
        ("deepseek_v3", DEEPSEEK, "{% if thinking %}", ['to "default", which follows']),
    ],
)
def test_an_unknown_model_is_a_sentence_with_the_nearest(
    model_type, markers, template, words, make_folder: MakeFolder
) -> None:
    """And not a guess: a wrong format trains on text that the model never saw."""
    with pytest.raises(SettingsError) as caught:
        chat_format_of(make_folder(model_type, markers, template))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.medium
def test_a_conversation_is_what_transformers_renders(make_folder: MakeFolder) -> None:
    """Its ids are those of apply_chat_template, tools and calls included."""
    import transformers

    folder = make_folder("qwen2", (*CHATML, *CALLS))
    call = ToolCall("call-0", "look_up", '{"word": "oak \u00e9"}')
    conversation = [
        Message("user", "Look\nit up."),
        Message("assistant", "Yes.", tool_calls=(call,)),
        Message("tool", "a tree", tool_call_id="call-0"),
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    plain = [
        {"role": "user", "content": "Look\nit up."},
        {
            "role": "assistant",
            "content": "Yes.",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call-0",
                    "function": {"name": "look_up", "arguments": {"word": "oak \u00e9"}},
                }
            ],
        },
        {"role": "tool", "content": "a tree", "tool_call_id": "call-0"},
    ]
    ours = renderer_of(folder)
    for tools in ((), TOOLS):
        wanted = theirs.apply_chat_template(
            plain, tools=list(tools) or None, add_generation_prompt=True
        )
        assert ours.render(conversation, tools) == wanted


def test_a_turn_goes_on_with_what_the_template_writes(make_folder: MakeFolder) -> None:
    """After an answer that the template would write differently; not after one that was cut off."""
    renderer = renderer_of(make_folder("qwen2", (*CHATML, *CALLS)))
    prompt = renderer.render([Message("user", "go")], TOOLS)
    wild = '<tool_call>\n{"name":"look_up",  "arguments":{}}\n</tool_call>'
    output = renderer.tokenizer.encode(f"{wild}<|im_end|>")
    parsed = renderer.parse(output, prompt_ids=prompt, tools=TOOLS, call_prefix="c").message
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("look_up", "{}")]
    result = Message("tool", "found", tool_call_id="c0")
    added = renderer.bridge(prompt, output, [result], TOOLS)
    assert added is not None
    assert renderer.tokenizer.decode(added) == (
        "\n<|im_start|>user\n<result>found</result><|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.bridge(prompt, output[:-1], [result], TOOLS) is None
    assert renderer.bridge(prompt, output, [Message("assistant", "x")], TOOLS) is None


def test_a_template_without_tools_refuses_them(make_folder: MakeFolder) -> None:
    """The policy would never see them."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = renderer_of(make_folder("llama", CHATML, template))
    with pytest.raises(Refusal, match="no place for tools"):
        renderer.render([Message("user", "go")], TOOLS)
    assert renderer.tokenizer.decode(renderer.render([Message("user", "go")], ())) == (
        "<|im_start|>go<|im_end|>"
    )
    broken = make_folder("llama", CHATML, "{% if %}")
    with pytest.raises(SettingsError, match="chat template"):
        renderer_of(broken)


def test_a_tool_conversation_is_one_branch(make_folder: MakeFolder) -> None:
    """Each turn continues the ids of the one before, though the policy writes its calls otherwise
    than the template does."""
    renderer = renderer_of(make_folder("qwen2", (*CHATML, *CALLS)))
    conversation = [Message("user", "Look these up.")]
    prompt = renderer.render(conversation, TOOLS)
    for number in range(3):
        wild = f'<tool_call>\n{{"name":"look_up",  "arguments":{{"n":{number}}}}}\n</tool_call>'
        output = renderer.tokenizer.encode(f"{wild}<|im_end|>")
        answered = renderer.parse(output, prompt_ids=prompt, tools=TOOLS, call_prefix=f"{number}_")
        assert json.loads(answered.message.tool_calls[0].arguments) == {"n": number}
        result = Message("tool", f"found {number}", tool_call_id=f"{number}_0")
        added = renderer.bridge(prompt, output, [result], TOOLS)
        assert added is not None
        prompt = [*prompt, *output, *added]
        conversation += [answered.message, result]
    again = renderer.tokenizer.decode(renderer.render(conversation, TOOLS))
    text = renderer.tokenizer.decode(prompt)
    assert text.count("<|im_start|>assistant\n") == again.count("<|im_start|>assistant\n") == 4
    headers = re.compile(r"<\|im_start\|>\w+")
    assert headers.findall(text) == headers.findall(again)


END = "<|endoftext|>"
OTHER = "<|done|>"


@pytest.mark.parametrize("configured", [(), (END,), ("<|im_end|>", END), (END, OTHER)])
@pytest.mark.parametrize("eos", ["<|im_end|>", END, None])
@pytest.mark.parametrize("name", ["default", "qwen3"])
@pytest.mark.parametrize("with_call", [False, True])
def test_no_end_of_an_answer_is_its_text(
    name, eos, configured, with_call, make_folder: MakeFolder
) -> None:
    """Neither the template's, the tokenizer's, nor one of those at which the server ends; the turn
    is continued after each."""
    markers = (*CHATML, *CALLS, END, OTHER, "<think>", "</think>")
    folder = make_folder("qwen2", (*markers, "<tool_response>", "</tool_response>"))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**facts, "eos_token": eos}))
    ids = [tokens.token_to_id(one) for one in configured]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    renderer = renderer_of(folder, name)
    ends = {"<|im_end|>", *configured, *([eos] if eos else []), *([END] if name == "qwen3" else [])}
    assert set(renderer.stop_ids) == {tokens.token_to_id(one) for one in ends}
    prompt = renderer.render([Message("user", "go")], TOOLS)
    said = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>' if with_call else "42"
    for end in ends:
        output = renderer.tokenizer.encode(said + end)
        found = renderer.parse(output, prompt_ids=prompt, tools=TOOLS, call_prefix="c").message
        assert found.text == ("" if with_call else "42")
        assert [call.name for call in found.tool_calls] == ["look_up"] * with_call
        added = renderer.bridge(prompt, output, [Message("tool", "found")], TOOLS)
        assert added is not None
        after = renderer.tokenizer.decode(added)
        assert after.removeprefix("<|im_end|>").startswith("\n<|im_start|>user\n<")
        assert (after.count("<|im_start|>"), after.count("found")) == (2, 1)


@pytest.mark.parametrize("folders", [(1, [2, 3]), ([1, 2], 3), (None, [1, 2, 3]), ([1], None)])
def test_server_and_router_end_an_answer_at_the_same_ids(folders, tmp_path: Path) -> None:
    """Those of config.json and of generation_config.json together."""
    for name, eos in zip(("config.json", "generation_config.json"), folders, strict=True):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": eos}))
    given = [[one] if isinstance(one, int) else one or [] for one in folders]
    assert end_ids_of(tmp_path) == (*given[0], *given[1])
