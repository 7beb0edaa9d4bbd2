"""Recorded turns of a lost attempt, replayed to the agent that plays it again.

Owns: which recorded turn answers which request. Does not own: loading them (buffer), recording and
answering (service). Invariant: a recorded turn answers only a request whose ids, sampling, model
and count of choices are those it was generated for, and only once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from outloop.buffer.records import Sampling, Turn
from outloop.router.servers.generate_api import Prompt
from outloop.router.servers.generation import Generated


class RecordedTurns:
    """What earlier episodes of an attempt recorded and this one has not asked for yet.

    Args:
        turns: parents before children, what is to be replayed first before the rest.
        before: turns of this episode, to which some of `turns` may be children.
    """

    def __init__(self, turns: Iterable[Turn], before: Iterable[Turn] = ()) -> None:
        self._by_prompt: dict[bytes, list[tuple[Turn, ...]]] = defaultdict(list)
        ends: dict[str | None, Prompt] = {None: Prompt()}
        for turn in before:
            self._end_of(turn, ends)
        choices: dict[tuple[bytes, float], list[Turn]] = defaultdict(list)
        for turn in turns:
            prompt = self._end_of(turn, ends)
            if prompt is not None:
                choices[_digest(prompt), turn.started_at].append(turn)
        for (digest, _), generated in choices.items():
            generated.sort(key=lambda turn: turn.choice_index)
            self._by_prompt[digest].append(tuple(generated))
        for together in self._by_prompt.values():
            # What the agent had received comes before what was generated for nobody.
            together.sort(key=lambda generated: any(map(_is_undelivered, generated)))

    def __len__(self) -> int:
        return sum(len(generated) for some in self._by_prompt.values() for generated in some)

    def pop(
        self,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        policy_version: int | None = None,
    ) -> tuple[Turn, ...]:
        """The turns that answer this request, by choice; () when it was not asked before.

        Args:
            samplings: what each choice is sampled with.
        """
        if not self._by_prompt:
            return ()
        waiting = self._by_prompt.get(_digest(prompt), [])
        for generated in waiting:
            indices = [turn.choice_index for turn in generated]
            if indices == list(range(len(samplings))) and all(
                turn.sampling == samplings[turn.choice_index]
                and _was_asked_of(turn, policy_version)
                for turn in generated
            ):
                waiting.remove(generated)
                return generated
        return ()

    def give_back(self, prompt: Prompt, generated: tuple[Turn, ...]) -> None:
        """What was popped for `prompt` did not come to be recorded."""
        if generated:
            self._by_prompt[_digest(prompt)].insert(0, generated)

    def discard(self, turn_id: str) -> None:
        """Another process replayed this turn."""
        for waiting in self._by_prompt.values():
            waiting[:] = [x for x in waiting if turn_id not in {turn.turn_id for turn in x}]

    @staticmethod
    def _end_of(turn: Turn, ends: dict[str | None, Prompt]) -> Prompt | None:
        """The ids that `turn` was generated after; enters those at its end."""
        start = ends.get(turn.parent_turn_id)
        if start is None:
            return None
        prompt = start.followed_by(turn.prompt_ids.tolist())
        ends[turn.turn_id] = prompt.followed_by(turn.output_ids.tolist())
        return prompt


def generated_before(turn: Turn, stop_text: str | None) -> Generated:
    """What a server generated for `turn`, as it was then; `stop_text` is the stop string in it."""
    logprobs: list[float | None] = []
    if turn.behavior_logprobs is not None:
        logprobs += turn.behavior_logprobs.tolist()
    if turn.mask_reason == "behavior_unknown":
        # Zeros stand for logprobs that no server gave.
        logprobs = [None] * len(turn.output_ids)
    return Generated(
        ids=turn.output_ids.tolist(),
        logprobs=logprobs,
        spans=list(turn.version_spans),
        finish="length" if turn.finish_reason == "length" else "stop",
        matched=stop_text,
        routes=turn.routed_experts,
        supports=turn.support.lists() if turn.support is not None else [],
    )


def _was_asked_of(turn: Turn, policy_version: int | None) -> bool:
    """True if it was asked of this version by name or, None, of the policy."""
    if turn.mask_reason != "frozen":
        return policy_version is None
    return all(span.policy_version == policy_version for span in turn.version_spans)


def _is_undelivered(turn: Turn) -> bool:
    return not turn.loss_spans and turn.mask_reason == "undelivered"


def _digest(prompt: Prompt) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for piece in prompt.pieces:
        hasher.update(piece)
    return hasher.digest()
