"""The turn tree of one episode: which turn a request continues, and why not when it does not.

Owns: matching of conversations to recorded turns, causes of breaks. Does not own: rendering,
recording. Invariant: the ids along a node's path are what the server saw and generated; a plan's
prompt ids come after them. Correctness never rests on messages: a wrong match cannot happen,
because only our own answer, echoed, is continued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from outloop.buffer.records import Int32, Turn
from outloop.router.dialects.base import Message, is_echo
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.servers.generate_api import Prompt

Tools = Sequence[dict[str, Any]]


@dataclass(eq=False, kw_only=True, slots=True)
class Node:
    """A recorded turn and the messages of its request.

    `given` are the request's messages after those of `previous` and its answer are taken away,
    beginning with the echo of that answer; all messages when `previous` is None; None when only
    the ids are known, because another router process recorded the turn.
    """

    turn: Turn
    parent: Node | None
    end: int
    """Number of ids from the root to the end of this turn's output."""
    previous: Node | None = None
    given: tuple[Message, ...] | None = None
    answer: Message | None = None
    tools: Tools = ()
    num_messages: int = -1
    asked: tuple[Message, ...] | None = None
    """All messages of its request; given up when another turn goes on after it."""
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        found: list[Node] = []
        step: Node | None = self
        while step is not None:
            found.append(step)
            step = step.parent
        return found[::-1]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is served: new prompt ids after the path of `parent`, and the branch cause."""

    parent: Node | None
    previous: Node | None
    prompt_ids: list[int]
    cause: str
    knows_messages: bool = True
    """False: messages before it are known as ids only."""
    num_forced: int = 0
    """How many of the last prompt ids begin the answer: a call that the client forces, or what it
    wrote of the answer itself."""

    @property
    def forced_ids(self) -> list[int]:
        """The ids that begin the answer."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_forced :]

    @property
    def own_prompt_ids(self) -> list[int]:
        """The prompt ids before the answer."""
        return self.prompt_ids[: len(self.prompt_ids) - self.num_forced]

    @property
    def is_root(self) -> bool:
        """True if no recorded turn is continued."""
        return self.parent is None

    @property
    def is_break(self) -> bool:
        """True if this starts a branch although the episode already had one to continue."""
        return self.cause not in ("root", "extension")


class TurnTree:
    """Turns of one episode, in the order they were recorded."""

    def __init__(self, renderer: PolicyRenderer) -> None:
        self._renderer = renderer
        self._roots: list[Node] = []
        self._by_num_messages: dict[int, list[Node]] = defaultdict(list)
        self._texts: dict[str, str] = {}
        self._last_path: tuple[Node | None, Prompt] = (None, Prompt())
        """A node and what its server was given."""
        self._last_asked: tuple[Plan | None, Prompt] = (None, Prompt())
        self.nodes: dict[str, Node] = {}

    def plan(self, messages: tuple[Message, ...], tools: Tools) -> Plan:
        """Continue a recorded turn where that is exact; otherwise render in full.

        Raises:
            Refusal: 400, the conversation cannot be rendered.
        """
        last = _last_assistant(messages)
        previous = self._find_answered(messages, tools, last)
        if previous is not None:
            ids = self._renderer.bridge(
                previous.turn.prompt_ids.tolist(),
                previous.turn.output_ids.tolist(),
                messages[last + 1 :],
                tools,
            )
            if ids is not None:
                cause = "extension" if not previous.children else "resampled"
                return Plan(parent=previous, previous=previous, prompt_ids=ids, cause=cause)
        ids = self._renderer.render(messages, tools)
        extended = self._longest_prefix(ids, preferred=previous)
        if extended is not None:
            ids = ids[extended.end :]
        if extended is not None and not extended.children:
            cause = "extension"
        elif previous is None:
            cause = self._classify(messages, tools, last)
        else:
            cause = "resampled" if extended is previous else "template"
        return Plan(parent=extended, previous=None, prompt_ids=ids, cause=cause)

    def conversation_after(self, node: Node) -> list[Message] | None:
        """Every message up to `node`'s answer; None when another process recorded part of it."""
        return _conversation(node)

    def plan_after(self, node: Node, new: tuple[Message, ...], tools: Tools) -> Plan | None:
        """Go on after `node` by its ids alone; None where the format needs the messages."""
        turn = node.turn
        ids = self._renderer.bridge(turn.prompt_ids.tolist(), turn.output_ids.tolist(), new, tools)
        if ids is None:
            return None
        cause = "extension" if not node.children else "resampled"
        return Plan(parent=node, previous=None, prompt_ids=ids, cause=cause, knows_messages=False)

    def plan_prompt(self, prompt: str | tuple[int, ...]) -> Plan:
        """Continue a recorded turn whose ids, or whose text, `prompt` begins with.

        Raises:
            Refusal: 400, ids that the policy does not have.
        """
        if isinstance(prompt, str):
            found, text = self._longest_text(prompt)
            rest = self._renderer.tokenizer.encode(text)
        else:
            self._renderer.check_ids(prompt)
            found, rest = self._longest_prefix(list(prompt)), list(prompt)
            rest = rest[found.end :] if found is not None else rest
        if found is not None:
            cause = "extension" if not found.children else "resampled"
        else:
            cause = "root" if not self.nodes else "new_conversation"
        return Plan(parent=found, previous=None, prompt_ids=rest, cause=cause)

    def add(
        self,
        turn: Turn,
        *,
        plan: Plan | None = None,
        messages: tuple[Message, ...] | None = None,
        answer: Message | None = None,
        tools: Tools = (),
    ) -> Node:
        """Append a recorded turn; without `messages` only its ids are known.

        One that is there already is known better afterwards.
        """
        parent = self.nodes[turn.parent_turn_id] if turn.parent_turn_id is not None else None
        previous = plan.previous if plan is not None else None
        given = messages
        if messages is not None and previous is not None:
            given = messages[previous.num_messages :]
            previous.asked = None
        node = self.nodes.get(turn.turn_id)
        if node is None:
            node = self.nodes[turn.turn_id] = Node(
                turn=turn,
                parent=parent,
                end=(parent.end if parent else 0) + len(turn.prompt_ids) + len(turn.output_ids),
            )
            (parent.children if parent else self._roots).append(node)
        # Else it was read back from the buffer while this process waited to hear that it was
        # recorded, and may have turns after it.
        node.previous, node.given, node.answer = previous, given, answer
        node.tools, node.asked = tools, messages
        node.num_messages = len(messages) if messages is not None else -1
        asked, prompt = self._last_asked
        if asked is not None and asked is plan:
            # The next turn most likely goes on after this one.
            self._last_path = (node, prompt)
            self._last_asked = (None, Prompt())
        if messages is not None:
            self._by_num_messages[len(messages)].append(node)
        return node

    def prompt(self, plan: Plan) -> Prompt:
        """Every id that the server is given: the path of the plan's parent, then its own."""
        parent, ids = plan.parent, plan.prompt_ids
        if parent is not None:
            ids = parent.turn.output_ids.tolist() + ids
        prompt = self._path(parent).followed_by(ids)
        self._last_asked = (plan, prompt)
        return prompt

    def recorded_under(self, retry_key: str) -> list[Node]:
        """The turns of requests with this key, in the order they were recorded."""
        return [node for node in self.nodes.values() if node.turn.retry_key == retry_key]

    def _path(self, node: Node | None) -> Prompt:
        """The ids from the root to where `node` was generated; the last one asked for is kept."""
        missing: list[Node] = []
        known, prompt = self._last_path
        step = node
        while step is not None and step is not known:
            missing.append(step)
            step = step.parent
        if step is None:
            prompt = Prompt()
        for one in reversed(missing):
            before = one.parent.turn.output_ids.tolist() if one.parent is not None else []
            prompt = prompt.followed_by(before + one.turn.prompt_ids.tolist())
        self._last_path = (node, prompt)
        return prompt

    @property
    def num_branches(self) -> int:
        """Number of leaves."""
        return sum(not node.children for node in self.nodes.values())

    def _find_answered(self, messages: tuple[Message, ...], tools: Tools, last: int) -> Node | None:
        if last < 0 or last == len(messages) - 1:
            return None
        for node in reversed(self._by_num_messages.get(last, ())):
            if (
                node.answer is not None
                and is_echo(messages[last], node.answer)
                and node.tools == tools
                and _was_asked(node, messages, last)
            ):
                return node
        return None

    def _longest_prefix(self, ids: list[int], preferred: Node | None = None) -> Node | None:
        """The longest path that `ids` extend: one answer may begin as another does.

        Of equal paths, such as equal choices, `preferred`.
        """
        found: Node | None = None
        array = np.asarray(ids, dtype=np.int32)
        levels = [(self._roots, 0)]
        while levels:
            level, start = levels.pop()
            for node in level:
                if _extends(array, node, start):
                    is_equal = found is not None and node.end == found.end
                    if found is None or node.end > found.end or (is_equal and node is preferred):
                        found = node
                    levels.append((node.children, node.end))
        return found

    def _longest_text(self, text: str) -> tuple[Node | None, str]:
        """The node whose path's text `text` begins with, and what comes after it."""
        found: Node | None = None
        rest = text
        levels = [(self._roots, text)]
        while levels:
            level, left = levels.pop()
            for node in level:
                own = self._text_of(node)
                if own != left and left.startswith(own):
                    if found is None or len(left) - len(own) < len(rest):
                        found, rest = node, left[len(own) :]
                    levels.append((node.children, left[len(own) :]))
        return found, rest

    def _text_of(self, node: Node) -> str:
        """The text of a turn's own ids; a character cut at a border belongs to no text."""
        text = self._texts.get(node.turn.turn_id)
        if text is None:
            tokenizer, turn = self._renderer.tokenizer, node.turn
            text = tokenizer.decode(turn.prompt_ids.tolist())
            text += tokenizer.decode_on(turn.output_ids.tolist())
            self._texts[node.turn.turn_id] = text
        return text

    def _classify(self, messages: tuple[Message, ...], tools: Tools, last: int) -> str:
        """Why no recorded turn is continued; the nearest recorded conversation decides."""
        if not self.nodes:
            return "root"
        if last == len(messages) - 1:
            return "prefill"
        best = "new_conversation"
        for node in reversed(self.nodes.values()):
            earlier = _conversation(node)
            if earlier is None:
                best = "history_unknown"
                continue
            shared = _num_shared(earlier, messages)
            if shared == len(earlier) or shared == len(messages):
                if node.tools != tools:
                    return "tools_changed"
                return "resampled" if len(earlier) > len(messages) else "history_rewritten"
            if any(m.role != "system" for m in messages[:shared]):
                return "history_rewritten" if node.tools == tools else "tools_changed"
            if _num_shared(_without_system(earlier), _without_system(messages)):
                best = "system_changed"
        if best == "new_conversation" and self._is_retold(messages):
            return "history_rewritten"
        return best

    def _is_retold(self, messages: Sequence[Message]) -> bool:
        """True if an answer or a tool's result of a recorded conversation is among `messages`, or
        what its user said under the same system message: it was cut or summarised before that."""
        own_system, systems = _system_of(messages), dict[str, Message | None]()
        known: set[tuple[str, ...]] = set()
        for name, node in self.nodes.items():
            given, before = node.given or (), node.previous
            system = _system_of(given) if before is None else systems[before.turn.turn_id]
            systems[name] = system
            answer = (node.answer,) if node.answer is not None else ()
            known.update(_traces((*given, *answer), has_users=system == own_system))
        return not known.isdisjoint(_traces(messages, has_users=True))


def _last_assistant(messages: Sequence[Message]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant":
            return index
    return -1


def _was_asked(node: Node | None, messages: tuple[Message, ...], end: int) -> bool:
    """True if messages[:end] are the ones that `node` answered."""
    while node is not None:
        if node.asked is not None:
            return _are_same(messages[:end], node.asked)
        if node.given is None:
            return False
        start = end - len(node.given)
        if start < 0 or not _are_same(messages[start:end], node.given):
            return False
        node, end = node.previous, start
    return end == 0


def _are_same(sent: tuple[Message, ...], earlier: tuple[Message, ...]) -> bool:
    """True if `sent` is `earlier` again, whatever clients leave out of an answer."""
    if sent == earlier:
        return True
    return len(sent) == len(earlier) == _num_shared(earlier, sent)


def _extends(ids: Int32, node: Node, start: int) -> bool:
    turn = node.turn
    border = start + len(turn.prompt_ids)
    return (
        node.end < len(ids)
        and np.array_equal(ids[start:border], turn.prompt_ids)
        and np.array_equal(ids[border : node.end], turn.output_ids)
    )


def _conversation(node: Node) -> list[Message] | None:
    """The messages that `node` answered, and its answer."""
    tail = [node.answer] if node.answer is not None else []
    pieces: list[Message] = []
    step: Node | None = node
    while step is not None:
        if step.given is None:
            return None
        pieces = [*step.given, *pieces]
        step = step.previous
    return pieces + tail


def _num_shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right and not is_echo(right, left):
            return index
    return min(len(one), len(other))


def _system_of(messages: Sequence[Message]) -> Message | None:
    """The system message at the beginning."""
    return messages[0] if messages and messages[0].role == "system" else None


def _traces(messages: Sequence[Message], *, has_users: bool) -> Iterator[tuple[str, ...]]:
    """Marks by which a message is known in another conversation."""
    for message in messages:
        if message.role == "assistant" and (message.text.strip() or message.tool_calls):
            yield ("assistant", message.text.strip(), *(call.id for call in message.tool_calls))
        elif message.role == "tool" and message.tool_call_id:
            yield ("tool", message.tool_call_id)
        elif message.role == "user" and has_users:
            yield ("user", message.text)


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages if _system_of(messages) is None else messages[1:]
