"""Ordinary agents' conversations over real SDKs, one class per dialect, all with one face."""

import json
from dataclasses import dataclass, field

import anthropic
import openai

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}


@dataclass
class Said:
    """An answer as the agent has it, and what it hands back in its next request."""

    text: str
    calls: list[tuple[str, str, str]]
    """(id, name, arguments)"""
    finish: str
    handed_back: list = field(default_factory=list)

    @property
    def plain_calls(self) -> list[tuple[str, object]]:
        """Calls without their ids, arguments decoded."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


class _Talker:
    def __init__(self, client, tools: tuple[str, ...]) -> None:
        self.client = client
        self.tool_names = tools
        self.history: list = []

    def tell(self, text: str) -> None:
        """The user speaks."""
        self.history.append({"role": "user", "content": text})

    def hand_back(self, said: Said) -> None:
        """The answer becomes history."""
        self.history += said.handed_back


class ChatTalker(_Talker):
    """openai, chat.completions."""

    path = "/v1/chat/completions"

    @property
    def options(self) -> dict:
        """What every request says."""
        tools = [
            {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
            for name in self.tool_names
        ]
        return {"model": "policy", "messages": self.history, "tools": tools}

    async def ask(self, *, stream: bool, **extra) -> Said:
        """One turn."""
        api = self.client.chat.completions
        if stream:
            async with api.stream(**self.options, **extra) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await api.create(**self.options, **extra)
        message = answer.choices[0].message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []]
        handed_back = message.model_dump(include={"role", "content", "tool_calls"})
        for call in handed_back["tool_calls"] or []:
            call["function"].pop("parsed_arguments", None)
        return Said(message.content or "", calls, answer.choices[0].finish_reason, [handed_back])

    def hand_results(self, results: list[tuple[str, str]]) -> None:
        """Tools answer."""
        self.history += (
            {"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results
        )


class ResponsesTalker(_Talker):
    """openai, responses."""

    path = "/v1/responses"

    @property
    def options(self) -> dict:
        """What every request says."""
        tools = [
            {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
            for name in self.tool_names
        ]
        return {"model": "policy", "input": self.history, "tools": tools}

    async def ask(self, *, stream: bool, **extra) -> Said:
        """One turn."""
        if stream:
            answer, shown = None, ""
            async with self.client.responses.stream(**self.options, **extra) as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        shown += event.delta
                    elif event.type in ("response.completed", "response.incomplete"):
                        answer = event.response
            text = "".join(
                part.text for i in answer.output if i.type == "message" for part in i.content
            )
            assert shown == text
        else:
            answer = await self.client.responses.create(**self.options, **extra)
            text = answer.output_text
        calls = [(i.call_id, i.name, i.arguments) for i in answer.output if i.type[0] == "f"]
        handed_back = [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments": True})
            for item in answer.output
        ]
        for item in handed_back:
            for part in item.get("content", ()):
                part.pop("parsed", None)
        return Said(text, calls, answer.status, handed_back)

    def hand_results(self, results: list[tuple[str, str]]) -> None:
        """Tools answer."""
        self.history += (
            {"type": "function_call_output", "call_id": call_id, "output": text}
            for call_id, text in results
        )


class MessagesTalker(_Talker):
    """anthropic, messages."""

    path = "/v1/messages"

    @property
    def options(self) -> dict:
        """What every request says."""
        tools = [{"name": name, "input_schema": PARAMETERS} for name in self.tool_names]
        return {"model": "policy", "messages": self.history, "tools": tools, "max_tokens": 256}

    async def ask(self, *, stream: bool, **extra) -> Said:
        """One turn."""
        if stream:
            async with self.client.messages.stream(**self.options, **extra) as events:
                shown = "".join([text async for text in events.text_stream])
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**self.options, **extra)
        text = "".join(block.text for block in answer.content if block.type == "text")
        if stream:
            assert shown == text
        calls = [
            (block.id, block.name, json.dumps(block.input))
            for block in answer.content
            if block.type == "tool_use"
        ]
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        return Said(text, calls, answer.stop_reason, [{"role": "assistant", "content": blocks}])

    def hand_results(self, results: list[tuple[str, str]]) -> None:
        """Tools answer."""
        blocks = [
            {"type": "tool_result", "tool_use_id": call_id, "content": text}
            for call_id, text in results
        ]
        self.history.append({"role": "user", "content": blocks})


TALKERS = {"chat": ChatTalker, "responses": ResponsesTalker, "messages": MessagesTalker}


class Meeting:
    """Opens conversations of one dialect with one shared client."""

    def __init__(self, dialect: str, url: str) -> None:
        self._kind = TALKERS[dialect]
        self.path = self._kind.path
        if dialect == "messages":
            self._client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        else:
            self._client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    def begin(self, episode: dict, tools: tuple[str, ...] = ("calculator",)) -> _Talker:
        """A conversation of an episode."""
        base_url, api_key = episode["base_url"], episode["api_key"]
        if self._kind is MessagesTalker:
            base_url = base_url.removesuffix("/v1")
        return self._kind(self._client.with_options(base_url=base_url, api_key=api_key), tools)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()
