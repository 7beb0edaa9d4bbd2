"""Conversations from elsewhere as trajectories for SFT, rendered as if they had been played.

Invariant: prompt ids are those that the router would have sent, output ids those that the policy
should generate; nothing has logprobs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from outloop.buffer.records import Episode, Sampling, Trajectory, Turn
from outloop.router.dialects.base import Message
from outloop.router.dialects.chat_request import ChatMessage, to_messages, to_tools
from outloop.router.episodes.turn_tree import Tools, TurnTree
from outloop.router.errors import Refusal
from outloop.router.rendering.renderer import PolicyRenderer

_decoder = msgspec.json.Decoder(list[ChatMessage])
_SAMPLING = Sampling(temperature=1.0)


class ConversationRenderer:
    """Renders conversations for SFT."""

    def __init__(self, renderer: PolicyRenderer, *, max_context_tokens: int) -> None:
        self._renderer = renderer
        self._max_context_tokens = max_context_tokens

    def render_all(
        self, rows: Sequence[tuple[bytes, bytes, dict[str, str]]], key: str
    ) -> list[Trajectory]:
        """One trajectory per (messages, tools, metadata), named by `key` and position.

        Raises:
            Refusal: 400, naming the row that cannot be rendered.
        """
        trajectories = []
        for index, (messages, tools, metadata) in enumerate(rows):
            digest = hashlib.blake2b(f"{key}\0{index}".encode(), digest_size=12).hexdigest()
            try:
                turns = self.render(
                    to_messages(_decoder.decode(messages)),
                    to_tools(tools),
                    episode_id=f"sft-{digest}",
                )
            except (msgspec.DecodeError, Refusal) as error:
                raise Refusal(
                    400,
                    "invalid_value",
                    f"trajectories[{index}]: {error}",
                    param=f"trajectories[{index}]",
                ) from error
            now = time.time()
            episode = Episode(
                episode_id=f"sft-{digest}",
                task_id=f"sft-{digest}",
                group_id=None,
                attempt=0,
                purpose="sft",
                outcome="completed",
                failure_kind=None,
                reward=None,
                metadata=metadata,
                opened_at=now,
                closed_at=now,
            )
            trajectories.append(Trajectory(episode=episode, turns=turns))
        return trajectories

    def render(
        self, messages: tuple[Message, ...], tools: Tools, *, episode_id: str
    ) -> tuple[Turn, ...]:
        """One turn per assistant message, with loss on all its output ids.

        Raises:
            Refusal: 400, no assistant message, or one that the policy could not have generated.
        """
        tree = TurnTree(self._renderer)
        turns: list[Turn] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if index == 0:
                raise Refusal(
                    400,
                    "invalid_value",
                    "messages[0] is by the assistant; a message before it is needed",
                )
            before = messages[:index]
            plan = tree.plan(before, tools)
            output_ids = self._renderer.complete(before, message, tools)
            turn = Turn(
                turn_id=f"{episode_id}-{len(turns)}",
                episode_id=episode_id,
                parent_turn_id=plan.parent.turn.turn_id if plan.parent is not None else None,
                prompt_ids=np.asarray(plan.prompt_ids, dtype=np.int32),
                output_ids=np.asarray(output_ids, dtype=np.int32),
                behavior_logprobs=None,
                version_spans=(),
                loss_spans=((0, len(output_ids)),),
                sampling=_SAMPLING,
                finish_reason="tool_calls" if message.tool_calls else "stop",
                branch_cause=plan.cause,
                started_at=0.0,
                finished_at=0.0,
            )
            node = tree.add(turn, plan=plan, messages=before, answer=message, tools=tools)
            turns.append(turn)
            if node.end > self._max_context_tokens:
                raise Refusal(
                    400,
                    "context_length_exceeded",
                    f"the conversation has {node.end} tokens or more and model.max_context_tokens="
                    f"{self._max_context_tokens}; shorten it, or raise the limit",
                )
        if not turns:
            raise Refusal(400, "invalid_value", "no message is by the assistant: nothing to train")
        return tuple(turns)
