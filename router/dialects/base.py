"""The request and the result that every dialect is translated to and from.

Invariant: a dialect knows these types and nothing behind them; the rest of the router knows no
dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from outloop.buffer.records import Sampling, Turn


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A function call by the assistant; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation, normalised: text only, every field present."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an earlier answer that a request gives by its id instead of repeating it."""

    item_id: str
    """As the client wrote it."""
    param: str
    message: int
    """Index of the assistant message that it is a part of."""
    turn_id: str
    """The turn that answered it; empty where the id is not one of ours."""
    part: Literal["reasoning", "text", "call"]
    call: int = 0
    """Which of the answer's calls."""
    position: int = 0
    """Where among the message's calls it stands."""


def is_echo(sent: Message, answer: Message) -> bool:
    """True if the client's assistant message `sent` is our `answer` handed back.

    Clients leave reasoning out, some re-serialise arguments, some strip the text, which may end in
    white space where a call was cut off, and some leave out the text beside calls, whose ids name
    the turn; none of it makes it another answer.
    """
    text = sent.text.strip()
    if sent.role != "assistant" or (text != answer.text.strip() and (text or not sent.tool_calls)):
        return False
    if sent.reasoning and sent.reasoning != answer.reasoning:
        return False
    if len(sent.tool_calls) != len(answer.tool_calls):
        return False
    return all(
        one.name == other.name
        and one.id == other.id
        and (one.arguments == other.arguments or _same_json(one.arguments, other.arguments))
        for one, other in zip(sent.tool_calls, answer.tool_calls, strict=True)
    )


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for, in any dialect; None means that the client left it out."""

    model: str
    messages: tuple[Message, ...]
    prompt: str | tuple[int, ...] | None = None
    """Text or ids to continue as they are, instead of messages."""
    prefill: str = ""
    """The beginning of the answer, written by the client; the policy continues it."""
    references: tuple[Reference, ...] = ()
    """Parts of `messages` that are filled in from answers of this episode."""
    after: str | None = None
    """The turn that `messages` continue; a system message replaces that of its conversation."""
    tools: tuple[dict[str, Any], ...] = ()
    num_tool_bytes: int = 0
    """As the client wrote the tools."""
    tool_choice: str = "auto"
    """auto, none, required, or the name of a function after `function:`."""
    parallel_tool_calls: bool = True
    num_choices: int = 1
    policy_version: int | None = None
    """Only weights of this version may be sampled; None: those that the run is at."""
    is_any_frozen: bool = False
    """The client left it to the router which of the versions that servers keep it is."""
    max_new_tokens: int | None = None
    asked: dict[str, float] = {}
    """Sampling parameters that the client set, by the names of `Sampling`."""
    has_logit_bias: bool = False
    json_schema: str | None = None
    """The schema, as JSON, that the answer must fit."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    wants_token_ids: bool = False
    wants_reasoning: bool = True
    """False: reasoning is generated and recorded but not shown."""
    stream: bool = False
    wants_usage: bool = False
    traceparent: str | None = None
    tracestate: str | None = None
    """The client's OpenTelemetry context."""
    echoed: dict[str, Any] = {}
    """Other fields of the request that the dialect's answers repeat."""

    @property
    def forces_call(self) -> bool:
        """True if the client leaves no choice but to call a function."""
        return bool(self.tools) and self.tool_choice not in ("auto", "none")


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token as text and bytes, with its behavior logprob."""

    text: str
    """U+FFFD for a part of a character."""
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most probable tokens in its place, where the client asked for them."""


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """One answered choice: the recorded turn and the message that the client gets."""

    turn: Turn
    message: Message
    num_prompt_tokens: int
    stop_text: str | None = None
    """The stop string that ended it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    """Every id that the server was given, where the client asked for ids."""
    num_reasoning_tokens: int = 0
    """Output ids up to the end of the reasoning; 0 also where the format has no ids around it."""


class CallPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which call of a choice a piece belongs to."""

    number: int
    id: str
    name: str


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a choice while it is generated; with `call`, a piece of its arguments."""

    choice_index: int
    text: str
    is_reasoning: bool = False
    call: CallPlace | None = None
    """The first piece of a call may be empty; all text comes before the first call's."""


def call_id_of(turn_id: str, number: int) -> str:
    """The id of a turn's call."""
    return f"call_{turn_id}_{number}"


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before it is complete."""

    turn_id: str
    started_at: float
    num_prompt_tokens: int
    sampling: Sampling | None = None
    """The parameters in force."""


class AnswerStream(Protocol):
    """Server-sent events of one streamed answer, in one dialect."""

    def open(self) -> bytes:
        """Events that come before any text."""

    def delta(self, delta: Delta) -> bytes:
        """Events of a piece of text or of a call."""

    def close(self, results: Sequence[TurnResult]) -> bytes:
        """What has not been shown, and the end."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A wire format as a pair of pure translations."""

    decode: Callable[[bytes], TurnRequest]
    encode: Callable[[Sequence[TurnResult], TurnRequest], bytes]
    stream: Callable[[AnswerHead, TurnRequest], AnswerStream]
