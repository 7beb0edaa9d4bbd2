"""An agent whose every move is drawn, a policy that says anything, and what was recorded of both.

    policy = DrawnPolicy(stage.renderer, written_calls)
    stage.server.answer = policy.answer
    agent = DrawnAgent(stage, await stage.open(), policy, says=["text", "call"])
    await agent.play(Move("begin", pick=0, style=0, num_choices=1, stream=True))

Each user message bears its agent's mark, each answer a number of its own.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fakes.fake_server import Script
from outloop.buffer.records import Turn

KINDS = (
    *("go_on", "go_on", "go_on", "go_on", "begin", "repeat", "retry", "retools", "prefill"),
    *("edit_answer", "edit_user", "edit_system", "compact"),
)
SAYINGS = ("text", "call", "calls", "broken", "padded", "wide", "bytes", "cut", "after", "thought")


class Move(NamedTuple):
    """What the agent does next; `pick` is among what it could do it with."""

    kind: str
    pick: int
    style: int
    num_choices: int
    stream: bool


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation up to an answer, and the turn that gave it."""

    messages: list[dict]
    tools: list[dict]
    turn_id: str
    saying: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request and its answer."""

    body: dict
    answer: list[dict]
    turn_ids: list[str]
    parent: str | None


@dataclass
class Drew:
    """What a server was given and drew for one turn."""

    input_ids: list[int]
    output_ids: list[int]
    num_trained: int
    saying: str
    marks: set[str]


class DrawnPolicy:
    """Answers each agent with what it is to hear next, and keeps what was drawn by turn id."""

    def __init__(self, renderer: Any, calls: Callable[[list[str]], str]) -> None:
        self._renderer = renderer
        self._calls = calls
        self._numbers = itertools.count()
        self.agents: dict[str, DrawnAgent] = {}
        self.drew: dict[str, Drew] = {}

    def answer(self, request: dict) -> Script:
        """What the server draws."""
        text = self._renderer.tokenizer.decode(request["input_ids"])
        marks = set(re.findall(r"@(\w+)@", text))
        saying = next(self.agents[min(marks)].says)
        script, num_trained = self._script(saying)
        turn_id = request["rid"].rpartition("-")[0]
        assert turn_id not in self.drew
        self.drew[turn_id] = Drew(request["input_ids"], script.ids, num_trained, saying, marks)
        return script

    def _script(self, saying: str) -> tuple[Script, int]:
        number, stop = next(self._numbers), self._renderer.stop_ids[0]
        arguments = json.dumps({"expression": f"{number} * 7"})
        texts = {
            "call": self._calls([arguments]),
            "calls": self._calls([arguments, json.dumps({"z": None, "y": "\u00e9"})]),
            "broken": self._calls([f"{{'expression': {number}"]),
            "padded": f"  two\n lines {number} \n",
            "wide": f"caf\u00e9 \u4e2d\u6587 {number} \U0001f600",
            "bytes": f" {number}",
            "thought": f"<think>\nhm\n</think>\n\nfine {number}",
        }
        ids = self._renderer.tokenizer.encode(texts.get(saying, f"The answer is {number}."))
        if saying == "bytes":
            ids = [(number * 37 + index * 101) % 256 for index in range(9)] + ids
        if saying == "cut":
            return Script(ids=ids, finish={"type": "length"}), len(ids)
        # A server that runs on may meet every stop id there is.
        after = [*ids, *self._renderer.stop_ids[::-1]] if saying == "after" else []
        finish = {"type": "stop", "matched": stop}
        return Script(ids=[*ids, stop, *after], finish=finish), len(ids) + 1


@dataclass
class DrawnAgent:
    """One episode's agent; `play` makes a move and returns the turns that came of it."""

    stage: Any
    episode: dict
    policy: DrawnPolicy
    mark: str
    says: Any
    talks: list[Talk] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.policy.agents[self.mark] = self

    @property
    def turns(self) -> list[Turn]:
        """What is recorded of this episode."""
        return self.stage.turns(self.episode)

    @property
    def num_drawn(self) -> int:
        """How often a server was asked for this episode."""
        return sum(self.mark in one.marks for one in self.policy.drew.values())

    def sayings_before(self, talk: Talk) -> set[str]:
        """What was said along the branch that the conversation's answer ends."""
        by_id, said = {turn.turn_id: turn for turn in self.turns}, set()
        turn = by_id.get(talk.turn_id)
        while turn is not None:
            said.add(self.policy.drew[turn.turn_id].saying)
            turn = by_id.get(turn.parent_turn_id)
        return said

    async def ask(
        self, messages: list[dict], tools: Sequence[dict], move: Move
    ) -> tuple[Asked, list[Turn]]:
        """One request; every choice of its answer can be gone on with."""
        body = {"model": "policy", "messages": messages, "tools": tools, "n": move.num_choices}
        return await self.send({**body, "stream": move.stream})

    async def send(self, body: dict) -> tuple[Asked, list[Turn]]:
        """One request as it is; returns it and the turns that it made."""
        num_before = len(self.turns)
        turn_id, said = await self.post(body)
        new = sorted(self.turns[num_before:], key=lambda turn: turn.choice_index)
        assert (
            [turn.choice_index for turn in new] == list(range(body["n"])) == list(range(len(said)))
        )
        assert new[0].turn_id == turn_id
        for message, turn in zip(said, new, strict=True):
            self.talks.append(
                Talk(
                    messages=[*body["messages"], message],
                    tools=body["tools"],
                    turn_id=turn.turn_id,
                    saying=self.policy.drew[turn.turn_id].saying,
                )
            )
        turn_ids = [turn.turn_id for turn in new]
        self.asked.append(
            Asked(body=body, answer=said, turn_ids=turn_ids, parent=new[0].parent_turn_id)
        )
        return self.asked[-1], new

    async def post(self, body: dict, **headers: str) -> tuple[str, list[dict]]:
        """The id of the first turn that answers, and the messages of every choice."""
        path = "/v1/chat/completions"
        answer = await self.stage.post(path, body, self.episode["api_key"], **headers)
        assert answer.status_code == 200, answer.text
        read = read_stream if body["stream"] else _read_plain
        answer_id, said = read(answer.text)
        return answer_id.removeprefix("chatcmpl-"), said

    def user(self, style: int = 0) -> dict:
        """Something that nobody has said before."""
        text = f"@{self.mark}@ asks {next(self.numbers)}"
        return {"role": "user", "content": [{"type": "text", "text": text}] if style % 2 else text}

    def opening(self, style: int) -> list[dict]:
        """The first messages of a new conversation."""
        role = ("system", "developer")[style // 2 % 2]
        before = [{"role": role, "content": "Be brief."}] if style % 3 else []
        return [*before, self.user(style)]

    def reply(self, talk: Talk, style: int) -> list[dict]:
        """What follows an answer: the results of its calls, and what the user says."""
        calls = talk.messages[-1].get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {style}"}
            for call in calls
        ]
        return [*results, *([self.user(style)] if not calls or style == 3 else [])]

    def echo(self, talk: Talk, style: int) -> list[dict]:
        """The conversation with its answer handed back as one of many clients does."""
        *before, said = talk.messages
        said = {key: value for key, value in said.items() if key != "reasoning_content"}
        if style % 2 and said.get("content"):
            said["content"] = [{"type": "text", "text": said["content"]}]
        if style >= 2 and said.get("tool_calls"):
            said["tool_calls"] = [_written_anew(call) for call in said["tool_calls"]]
        return [*before, said]

    def tools(self) -> list[dict]:
        """Tools that were not named together before."""
        names = ("calculator", f"tool_{next(self.numbers)}")
        return [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
            for name in names
        ]

    def edited(self, kind: str, talk: Talk, style: int) -> list[dict]:
        """The conversation with something else in it, and the user's next words."""
        history, number = list(talk.messages), next(self.numbers)
        users = [index for index, m in enumerate(history) if m["role"] == "user"]
        another = {"role": "assistant", "content": f"I said {number}."}
        if kind == "edit_answer":
            return [*history[:-1], another, self.user(style)]
        if kind == "edit_user":
            history[users[-1]] = self.user(style)
            return [*history, *self.reply(talk, style)]
        if kind == "edit_system" and history[0]["role"] != "user":
            history[0] = {**history[0], "content": f"Be number {number}."}
            return [*history, *self.reply(talk, style)]
        return [*history[: users[0] + 1], another, self.user(style)]


def _written_anew(call: dict) -> dict:
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"]), indent=1)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _read_plain(text: str) -> tuple[str, list[dict]]:
    answer = json.loads(text)
    return answer["id"], [_kept(choice["message"]) for choice in answer["choices"]]


def _kept(message: dict) -> dict:
    return {key: value for key, value in message.items() if value is not None}


def read_stream(text: str) -> tuple[str, list[dict]]:
    """A chat stream's id and the messages of its choices."""
    said: dict[int, dict] = {}
    answer_id = ""
    # What was said may hold other ends of lines than the events'.
    for line in text.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        answer_id = event["id"]
        for choice in event["choices"]:
            message = said.setdefault(choice["index"], {"role": "assistant", "content": ""})
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                function = piece["function"]
                if piece["index"] == len(calls):
                    calls.append({**piece, "function": dict(function)})
                else:
                    calls[piece["index"]]["function"]["arguments"] += function["arguments"]
    for message in said.values():
        for call in message.get("tool_calls", ()):
            call.pop("index")
    return answer_id, [said[index] for index in sorted(said)]
