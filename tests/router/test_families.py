"""Golden families: how many branches a tool conversation with reasoning has in each chat format."""

import base64
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from outloop.buffer.records import Sampling, Turn, VersionSpan
from outloop.buffer.settings import build_settings
from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.episodes.turn_tree import Plan, TurnTree
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.turns.answer_reader import AnswerReader

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>"),
    *("<|return|>", "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>"),
    "<|call|>",
)
MARKERS = {
    "gpt_oss": HARMONY,
    "qwen3": (*CHATML, *THINK, *CALLS),
    "llama": tuple(
        f"<|{name}|>"
        for name in (
            *("begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text"),
            *("eom_id", "python_tag"),
        )
    ),
    "glm4_moe": (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|endoftext|>", *THINK, *CALLS, "/nothink"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": tuple(
        f"<\uff5c{name}\uff5c>"
        for name in (
            *("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant"),
            *("tool\u2581calls\u2581begin", "tool\u2581calls\u2581end", "tool\u2581sep"),
            *("tool\u2581call\u2581begin", "tool\u2581call\u2581end"),
            *("tool\u2581outputs\u2581begin", "tool\u2581outputs\u2581end"),
            *("tool\u2581output\u2581begin", "tool\u2581output\u2581end"),
        )
    ),
}


def generated_text(model_type: str, reasoning: str, text: str, word: str | None) -> str:
    """What a policy of the family writes, its stop included."""
    arguments = json.dumps({"word": word})
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    if model_type == "qwen3":
        call = f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>'
        return f"{thought}{call if word else text}<|im_end|>"
    if model_type == "llama":
        call = f'{{"name": "look_up", "parameters": {arguments}}}'
        return f"{call if word else text}<|eot_id|>"
    if model_type == "glm4_moe":
        call = (
            f"<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>{word}</arg_value>\n"
            "</tool_call><|observation|>"
        )
        return f"\n<think>{reasoning}</think>\n{call if word else text + '<|user|>'}"
    if model_type == "gpt_oss":
        call = (
            "<|channel|>commentary to=functions.look_up <|constrain|>json"
            f"<|message|>{arguments}<|call|>"
        )
        said = call if word else f"<|channel|>final<|message|>{text}<|return|>"
        # The prompt ends where reasoning begins.
        return f"{reasoning}<|end|><|start|>assistant{said}"
    begin, call_begin, sep, call_end, end, eos = (
        f"<\uff5c{name}\uff5c>"
        for name in (
            *("tool\u2581calls\u2581begin", "tool\u2581call\u2581begin", "tool\u2581sep"),
            *("tool\u2581call\u2581end", "tool\u2581calls\u2581end"),
            "end\u2581of\u2581sentence",
        )
    )
    call = f"{begin}{call_begin}function{sep}look_up\n```json\n{arguments}\n```{call_end}{end}"
    return f"{thought}{call if word else text}{eos}"


_BYTES = (
    *range(0x21, 0x7F),
    *range(0xA1, 0xAD),
    *range(0xAE, 0x100),
    *range(0x21),
    *range(0x7F, 0xA1),
    0xAD,
)
"""Bytes in the order of the letters that stand for them: printable ones stand for themselves."""
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
)


def harmony_model(folder: Path) -> models.BPE:
    """OpenAI's o200k vocabulary out of the npm package js-tiktoken, as openai-harmony reads it."""
    script = Path(os.environ["OUTLOOP_JS_TIKTOKEN"]) / "dist" / "ranks" / "o200k_base.js"
    found = re.search(r'bpe_ranks"?:\s*("(?:[^"\\]|\\.)*")', script.read_text())
    assert found is not None
    compact = json.loads(found[1])
    ranks: dict[bytes, int] = {}
    for line in filter(None, compact.split("\n")):
        _, first, *tokens = line.split(" ")
        ranks |= {base64.b64decode(t): int(first) + n for n, t in enumerate(tokens)}
    ordered = sorted(ranks.items(), key=lambda pair: pair[1])
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ordered]
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    # Only read here: ids are generated byte by byte, so no merges are needed.
    letters = dict(zip(_BYTES, sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ordered}
    return models.BPE(vocab, [])


@pytest.fixture
def make_renderer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """The renderer of a family over a byte-level tokenizer with that family's markers."""

    def make(model_type: str, **options: object) -> PolicyRenderer:
        folder = tmp_path_factory.mktemp(model_type)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        )
        if model_type == "gpt_oss":
            monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
            tokenizer.model = harmony_model(folder)
        else:
            tokenizer.train_from_iterator(["the word means another word"], trainer)
        tokenizer.add_tokens(
            [AddedToken(t, special=False, normalized=False) for t in MARKERS[model_type]]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        model = {"path": str(folder), "renderer": "auto", "renderer_options": options}
        return PolicyRenderer(build_settings({"model": model}, source="test").model)

    return make


def turn_of(plan: Plan, generated: list[int], number: int, said: Message) -> Turn:
    """The record of a generated answer."""
    return Turn(
        turn_id=f"t{number}",
        episode_id="e",
        parent_turn_id=plan.parent.turn.turn_id if plan.parent is not None else None,
        prompt_ids=np.array(plan.prompt_ids, np.int32),
        output_ids=np.array(generated, np.int32),
        behavior_logprobs=np.zeros(len(generated), np.float32),
        version_spans=(VersionSpan(policy_version=0, start=0, end=len(generated)),),
        loss_spans=((0, len(generated)),),
        sampling=Sampling(temperature=1.0),
        finish_reason="tool_calls" if said.tool_calls else "stop",
        branch_cause=plan.cause,
        started_at=0.0,
        finished_at=0.0,
    )


def converse(
    renderer: PolicyRenderer, model_type: str, *, reasoning: str, hands_back: bool = False
) -> tuple[list[Turn], TurnTree]:
    """Two questions, each answered after a tool was called; reasoning is handed back or not."""
    tree = TurnTree(renderer)
    conversation: list[Message] = [Message("system", "Be brief.")]
    turns: list[Turn] = []

    def speak(text: str, word: str | None = None) -> Message:
        plan = tree.plan(tuple(conversation), TOOLS)
        generated = renderer.tokenizer.encode(generated_text(model_type, reasoning, text, word))
        said = renderer.parse(
            generated,
            prompt_ids=plan.prompt_ids,
            tools=TOOLS,
            call_prefix=f"call_{len(turns)}_",
        ).message
        turn = turn_of(plan, generated, len(turns), said)
        tree.add(turn, plan=plan, messages=tuple(conversation), answer=said, tools=TOOLS)
        turns.append(turn)
        wanted = [("look_up", json.dumps({"word": word}))] if word is not None else []
        assert [(call.name, call.arguments) for call in said.tool_calls] == wanted
        assert (said.text.strip(), said.reasoning) == ("" if word is not None else text, reasoning)
        return Message("assistant", said.text, reasoning if hands_back else "", said.tool_calls)

    for question in ("What is a lathe?", "And a chisel?"):
        conversation.append(Message("user", question))
        for word in ("tool", "wood"):
            conversation.append(speak("", word))
            call_id = conversation[-1].tool_calls[0].id
            conversation.append(
                Message("tool", f"{word}: found", tool_call_id=call_id, name="look_up")
            )
        conversation.append(speak("A tool for wood."))
    return turns, tree


ONE_BRANCH = ["root"] + ["extension"] * 5
BROKEN_BY_USER = ["root", "extension", "extension", "template", "extension", "extension"]
"""The format drops reasoning when the user speaks again, so that the second question is a break."""


def harmony(options: dict, causes: list[str]):
    """gpt-oss: its vocabulary comes out of an npm package, so this is for make test-clients."""
    return pytest.param("gpt_oss", options, "I should look.", causes, marks=pytest.mark.clients)


@pytest.mark.parametrize(
    ("model_type", "options", "reasoning", "causes"),
    [
        ("qwen3", {}, "I should look.", BROKEN_BY_USER),
        ("qwen3", {"thinking_retention": "all"}, "I should look.", ONE_BRANCH),
        ("qwen3", {"enable_thinking": False}, "", ONE_BRANCH),
        ("llama", {}, "", ONE_BRANCH),
        ("glm4_moe", {}, "I should look.", BROKEN_BY_USER),
        ("glm4_moe", {"thinking_retention": "all"}, "I should look.", ONE_BRANCH),
        ("deepseek_v3", {}, "I should look.", ONE_BRANCH),
        harmony({}, BROKEN_BY_USER),
        harmony({"thinking_retention": "all"}, ONE_BRANCH),
        harmony({"auto_drop_analysis": False}, ONE_BRANCH),
    ],
)
def test_branches_of_a_tool_conversation(
    make_renderer, model_type, options, reasoning, causes
) -> None:
    """One branch where the format allows it; otherwise the break that is stated, and no more,
    whether or not the agent hands reasoning back."""
    renderer = make_renderer(model_type, **options)
    for hands_back in (False, True):
        turns, tree = converse(renderer, model_type, reasoning=reasoning, hands_back=hands_back)
        assert [turn.branch_cause for turn in turns] == causes
        assert tree.num_branches == 1 + causes.count("template")


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize("word", ["wood", None])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "glm4_moe", "deepseek_v3"])
def test_a_stream_shows_what_the_plain_answer_says(make_renderer, model_type, word, cut) -> None:
    """In every format text is shown as it is parsed, and so are calls, character by character,
    where the format writes their arguments as JSON."""
    options = {"enable_thinking": False} if model_type == "qwen3" else {}
    renderer = make_renderer(model_type, **options)
    generated = generated_text(model_type, "", "{curly} text, in pieces.", word)
    ids = renderer.tokenizer.encode(generated)
    asked = TurnRequest(model="policy", messages=(Message("user", "go"),), tools=TOOLS, stream=True)
    plan = Plan(parent=None, previous=None, prompt_ids=[], cause="root")
    reader = AnswerReader(renderer)
    live, text, calls = reader.live(asked, plan), "", {}
    for start in range(0, len(ids), cut):
        shown = live.add(ids[start : start + cut])
        text += shown.text
        for piece in shown.calls:
            calls.setdefault(piece.number, [piece.name]).append(piece.arguments)
    said = reader.read(asked, ids, plan, "t", None, live.shown_calls).message
    assert said == reader.read(asked, ids, plan, "t", None).message
    assert said.text.startswith(text)
    shown_calls = [(name, "".join(pieces)) for name, *pieces in calls.values()]
    whole = [(call.name, call.arguments) for call in said.tool_calls]
    assert [name for name, _ in whole] == ([] if word is None else ["look_up"])
    assert shown_calls == ([] if model_type == "glm4_moe" else whole)
    if shown_calls and cut == 1:
        assert len(calls[0]) > 4


def generated_calls(model_type: str, words: list[str]) -> str:
    """Several calls at once as a policy of the family writes them, its stop included."""
    whole = [generated_text(model_type, "I should look.", "", word) for word in words]
    head = whole[0].index(
        "<tool_call>" if model_type != "deepseek_v3" else "<\uff5ctool\u2581call\u2581begin"
    )
    stop = {"qwen3": "<|im_end|>", "glm4_moe": "<|observation|>"}.get(model_type)
    end = stop or whole[0][whole[0].index("<\uff5ctool\u2581calls\u2581end") :]
    calls = [one[head:].removesuffix(end) for one in whole]
    return whole[0][:head] + "\n".join(calls) + end


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("model_type", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_calls_at_once_stay_one_branch(make_renderer, model_type: str, order) -> None:
    """Three calls in one answer, their results handed back in any order: the branch goes on, with
    every result in the place that the agent gave it, and the next such answer too."""
    renderer = make_renderer(model_type)
    tree = TurnTree(renderer)
    conversation: list[Message] = [Message("user", "Look these up.")]
    turns: list[Turn] = []
    for number in range(3):
        words = [f"{word}{number}" for word in ("oak", "elm", "ash")]
        plan = tree.plan(tuple(conversation), TOOLS)
        generated = renderer.tokenizer.encode(generated_calls(model_type, words))
        answer = renderer.parse(
            generated, prompt_ids=plan.prompt_ids, tools=TOOLS, call_prefix=f"call_{number}_"
        ).message
        assert [json.loads(call.arguments)["word"] for call in answer.tool_calls] == words
        assert answer.reasoning == "I should look."
        turn = turn_of(plan, generated, number, answer)
        tree.add(turn, plan=plan, messages=tuple(conversation), answer=answer, tools=TOOLS)
        turns.append(turn)
        conversation.append(Message("assistant", answer.text, "", answer.tool_calls))
        results = [
            Message("tool", f"found {words[at]}", tool_call_id=answer.tool_calls[at].id)
            for at in order
        ]
        conversation += results
        text = renderer.tokenizer.decode(tree.plan(tuple(conversation), TOOLS).prompt_ids)
        places = [text.index(result.text) for result in results]
        assert places == sorted(places)
    assert [turn.branch_cause for turn in turns] == ["root", "extension", "extension"]
