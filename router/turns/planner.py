"""From a request to the ids that the server is given.

Owns: finding what a request goes on with, also after another router process recorded it, and the
beginning of an answer that the client forces or writes. Does not own: matching (branches),
rendering, sampling. Invariant: a plan's ids come after recorded ids; what cannot go on is rendered
in full or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from msgspec.structs import replace

from outloop.buffer.settings import SamplingSettings
from outloop.router.dialects.base import Message, TurnRequest
from outloop.router.episodes.episode import Episodes, LiveEpisode
from outloop.router.episodes.turn_tree import Node, Plan
from outloop.router.errors import Refusal
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.turns.sampling import is_honoured

_LONG_CHARS = 64 * 1024
"""To encode more would hold up the event loop for tens of milliseconds."""
_CHARS_PER_ITEM = 128
"""A message, a call or a tool costs as much to render as so many characters to encode."""


class Planner:
    """Plans turns of all episodes."""

    def __init__(
        self,
        renderer: PolicyRenderer,
        episodes: Episodes,
        sampling: SamplingSettings,
        long_texts: Executor,
    ) -> None:
        """`long_texts`: one thread, in which they are rendered one at a time."""
        self._long_texts = long_texts
        self._renderer = renderer
        self._episodes = episodes
        self._sampling = sampling

    async def plan(self, episode: LiveEpisode, request: TurnRequest) -> tuple[TurnRequest, Plan]:
        """The plan of a request, and the request with its whole conversation.

        Raises:
            Refusal: 400, the conversation cannot be rendered, or names a turn that is not known.
        """
        if request.references:
            request = await self._fill_in(episode, request)
        if request.after is not None:
            request, plan = await self._go_on(episode, request, request.after)
        else:
            plan = await self._match(episode, request)
        if request.prefill:
            if self._renderer.begins_in_reasoning(plan.prompt_ids):
                # The format has the policy think first: what was begun is no thought.
                begun = (*request.messages, Message("assistant", request.prefill))
                request = replace(request, messages=begun, prefill="")
                return request, await self._match(episode, request)
            ids = await self._encode(request.prefill)
            plan = replace(plan, cause="prefill") if plan.is_break else plan
            plan = replace(plan, prompt_ids=plan.prompt_ids + ids, num_forced=len(ids))
        elif request.forces_call and is_honoured("tool_choice", episode.opening, self._sampling):
            ids = self._renderer.forced_ids(request.tools, request.tool_choice)
            plan = replace(plan, prompt_ids=plan.prompt_ids + ids, num_forced=len(ids))
        return request, plan

    def find_forced(self, plan: Plan, request: TurnRequest) -> Plan:
        """The plan of a recorded turn, with the beginning of its answer marked again."""
        if request.prefill:
            ids = self._renderer.tokenizer.encode(request.prefill)
        elif request.forces_call:
            ids = self._renderer.forced_ids(request.tools, request.tool_choice)
        else:
            return plan
        is_begun = plan.prompt_ids[-len(ids) :] == ids
        return replace(plan, num_forced=len(ids)) if is_begun else plan

    async def _fill_in(self, episode: LiveEpisode, request: TurnRequest) -> TurnRequest:
        """The request with what it names in place of the names."""
        if any(one.turn_id not in episode.tree.nodes for one in request.references):
            await self._episodes.refresh(episode)
        messages = list(request.messages)
        for one in request.references:
            node = episode.tree.nodes.get(one.turn_id)
            answer = self._answer_of(node, request) if node is not None else None
            if answer is None or (one.part == "call" and one.call >= len(answer.tool_calls)):
                raise Refusal(
                    400,
                    "item_not_found",
                    f"{one.param}={one.item_id!r} is no item of an answer of this episode; send "
                    "the item itself",
                    param=one.param,
                )
            message = messages[one.message]
            if one.part == "reasoning":
                message = replace(message, reasoning=message.reasoning + answer.reasoning)
            elif one.part == "text":
                message = replace(message, text=answer.text)
            else:
                calls = list(message.tool_calls)
                calls[one.position] = answer.tool_calls[one.call]
                message = replace(message, tool_calls=tuple(calls))
            messages[one.message] = message
        return replace(request, messages=tuple(messages), references=())

    def _answer_of(self, node: Node, request: TurnRequest) -> Message:
        """What a turn answered; read from its ids where another process recorded it."""
        if node.answer is not None:
            return node.answer
        turn = node.turn
        found = self._renderer.parse(
            turn.output_ids.tolist(),
            prompt_ids=turn.prompt_ids.tolist(),
            tools=request.tools,
            call_prefix=f"call_{turn.turn_id}_",
            with_calls=bool(request.tools) and request.tool_choice != "none",
        )
        return found.message

    async def _match(self, episode: LiveEpisode, request: TurnRequest) -> Plan:
        def plan() -> Plan:
            if request.prompt is not None:
                return episode.tree.plan_prompt(request.prompt)
            return episode.tree.plan(request.messages, request.tools)

        found = await self._plan(episode, request, plan)
        # Another router process may have recorded the turn that this continues: the whole history
        # is known here only where it ends in an answer of ours.
        is_sure = not found.is_root if request.prompt is not None else found.previous is not None
        if not is_sure and _has_history(request) and await self._episodes.refresh(episode):
            found = await self._plan(episode, request, plan)
        return found

    async def count(self, request: TurnRequest) -> int:
        """How many ids a conversation has, rendered in full."""

        def render() -> list[int]:
            return self._renderer.render(request.messages, request.tools)

        if _num_chars(request) <= _LONG_CHARS:
            ids = render()
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._long_texts, render)
        return len(ids) + len(await self._encode(request.prefill))

    async def _plan(
        self, episode: LiveEpisode, request: TurnRequest, plan: Callable[[], Plan]
    ) -> Plan:
        """Plan here, or long conversations in another thread, while the event loop goes on."""
        if _num_chars(request) <= _LONG_CHARS:
            return plan()
        async with episode.tree_lock:
            return await asyncio.get_running_loop().run_in_executor(self._long_texts, plan)

    async def _encode(self, text: str) -> list[int]:
        encode = self._renderer.tokenizer.encode
        if len(text) <= _LONG_CHARS:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode, text)

    async def _go_on(
        self, episode: LiveEpisode, request: TurnRequest, turn_id: str
    ) -> tuple[TurnRequest, Plan]:
        tree = episode.tree
        if turn_id not in tree.nodes:
            await self._episodes.refresh(episode)
        node = tree.nodes.get(turn_id)
        before = tree.conversation_after(node) if node is not None else None
        new = request.messages
        if before is not None:
            if new[0].role == "system" and before[0].role == "system":
                before, new = [new[0], *before[1:]], new[1:]
            whole = replace(request, messages=(*before, *new))
            return whole, await self._match(episode, whole)
        plan = tree.plan_after(node, new, request.tools) if node is not None else None
        if plan is None:
            raise Refusal(
                400,
                "previous_response_not_found",
                f"previous_response_id={turn_id!r} is no answer of this episode, or the messages "
                "before it are not known here any more; send the whole conversation as `input`",
                param="previous_response_id",
            )
        return request, plan


def _has_history(request: TurnRequest) -> bool:
    return request.prompt is not None or any(
        message.role == "assistant" for message in request.messages
    )


def _num_chars(request: TurnRequest) -> int:
    """Estimate the work of rendering, in characters to encode."""
    number = len(request.prompt) if request.prompt is not None else 0
    number += request.num_tool_bytes
    number += _CHARS_PER_ITEM * (len(request.messages) + len(request.tools))
    for message in request.messages:
        number += len(message.text) + len(message.reasoning)
        for call in message.tool_calls:
            number += len(call.arguments) + _CHARS_PER_ITEM
    return number
