"""Trajectories that were played and recorded elsewhere, as the turns that the buffer holds.

Owns: what such a trajectory must have to be trained like one of our own, and turning rows of tokens
into turns. Does not own: admission, groups, staleness (buffer), rewards. Invariant: a token that is
trained was sampled by a published version under a known distribution, and belongs to one turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from outloop.buffer.records import Opening, Turn, VersionSpan, check_turns
from outloop.buffer.settings import Settings
from outloop.buffer.tasks.validation import check_id
from outloop.router.errors import Refusal
from outloop.router.rendering.renderer import PolicyRenderer
from outloop.router.routes.schemas import PostedSample, PostedTurn
from outloop.router.turns.sampling import loss_spans

_MAX_LOGPROB = 1e-3
"""Above 0 by what rounding may add."""


class PostedTrajectories:
    """Checks trajectories against the run."""

    def __init__(self, settings: Settings, renderer: PolicyRenderer) -> None:
        self._settings = settings
        self._renderer = renderer
        config = json.loads((settings.model.path / "config.json").read_bytes())
        # A model may have more ids than its tokenizer, never fewer that are used.
        self._vocab_size = max(int(config.get("vocab_size", 0)), renderer.tokenizer.num_ids)

    def turns(
        self,
        opening: Opening,
        turns: Sequence[PostedTurn] | None,
        samples: Sequence[PostedSample] | None,
        *,
        newest_version: int,
    ) -> tuple[Turn, ...]:
        """The turns of one trajectory, from its turns or its samples.

        Args:
            newest_version: the last that was announced.

        Raises:
            Refusal: 400, an id outside the vocabulary, too many turns or tokens, a version that no
                server ever had, lists of unequal lengths, a token that two samples train.
            RecordError: arrays that do not fit each other, or an unknown parent.
        """
        if turns is None:
            turns = tuple(_turns_of(opening.episode_id, samples or ()))
        limit = self._settings.router.max_turns_per_episode
        if len(turns) > limit:
            raise _refused(f"{len(turns)} turns; router.max_turns_per_episode={limit} are allowed")
        made = tuple(
            self._turn(opening, turn, index, newest_version) for index, turn in enumerate(turns)
        )
        if len({turn.turn_id for turn in made}) < len(made):
            raise _refused("two turns have the same turn_id")
        check_turns(opening.episode_id, made)
        self._check_lengths(made)
        return made

    def _turn(self, opening: Opening, posted: PostedTurn, index: int, newest: int) -> Turn:
        num_output = len(posted.output_ids)
        for name, ids in (("prompt_ids", posted.prompt_ids), ("output_ids", posted.output_ids)):
            if ids and max(ids) >= self._vocab_size:
                raise _refused(
                    f"{name} of turns[{index}] has id={max(ids)}; below vocab_size="
                    f"{self._vocab_size} is allowed. Was it recorded with another model?"
                )
        if posted.parent_turn_id is None and not posted.prompt_ids:
            raise _refused(f"turns[{index}] begins a branch without prompt_ids")
        if (highest := max(posted.behavior_logprobs, default=0.0)) > _MAX_LOGPROB:
            raise _refused(
                f"behavior_logprobs of turns[{index}] has {highest}; at most 0 is allowed"
            )
        spans = tuple(posted.version_spans)
        if not spans and posted.policy_version is not None:
            spans = (VersionSpan(posted.policy_version, 0, num_output),)
        self._check_versions(opening, spans, index, newest)
        allowed, reason = loss_spans(
            num_output=num_output,
            num_until_stop=min(len(self._renderer.until_stop(posted.output_ids)) + 1, num_output),
            undelivered_from=None,
            is_delivered=True,
            is_behavior_known=posted.sampling.is_plain,
            is_frozen=False,
            purpose=opening.purpose,
        )
        if any(not 0 <= first <= last <= num_output for first, last in posted.loss_spans or ()):
            raise _refused(
                f"loss_spans={posted.loss_spans} of turns[{index}]; ranges in 0 to {num_output}, "
                "the number of its output_ids, are allowed"
            )
        if posted.loss_spans is not None and allowed:
            # It may train less than it could, never more.
            wanted = _common(posted.loss_spans, allowed[0][1])
            allowed, reason = wanted, reason or ("posted" if wanted != allowed else "")
        cause = "posted" if posted.parent_turn_id is None and index else "root"
        return Turn(
            turn_id=check_id(posted.turn_id or f"{opening.episode_id}-{index}", "turn_id"),
            episode_id=opening.episode_id,
            parent_turn_id=posted.parent_turn_id,
            choice_index=posted.choice_index,
            prompt_ids=np.asarray(posted.prompt_ids, np.int32),
            output_ids=np.asarray(posted.output_ids, np.int32),
            behavior_logprobs=np.asarray(posted.behavior_logprobs, np.float32),
            version_spans=spans,
            loss_spans=allowed,
            mask_reason=reason,
            sampling=posted.sampling,
            finish_reason=posted.finish_reason,
            branch_cause="extension" if posted.parent_turn_id is not None else cause,
            started_at=posted.started_at or opening.opened_at,
            finished_at=posted.finished_at or opening.opened_at,
        )

    def _check_versions(
        self, opening: Opening, spans: Sequence[VersionSpan], index: int, newest: int
    ) -> None:
        versions = {span.policy_version for span in spans}
        if unknown := [version for version in versions if not 0 <= version <= newest]:
            raise _refused(
                f"policy_version={unknown[0]} of turns[{index}]; 0 to {newest}, the newest that "
                "this run has announced, are allowed"
            )
        # An evaluation may be played while training goes on: later versions are counted as such.
        asked = opening.eval_name.partition(":")[0]
        if asked.isdecimal() and any(version < int(asked) for version in versions):
            raise _refused(
                f"turns[{index}] of evaluation {opening.eval_name!r} is of policy_version="
                f"{sorted(versions)}; {asked} or newer is allowed"
            )

    def _check_lengths(self, turns: Sequence[Turn]) -> None:
        context = self._settings.model.max_context_tokens
        ends: dict[str, int] = {}
        for turn in turns:
            before = ends[turn.parent_turn_id] if turn.parent_turn_id is not None else 0
            end = before + len(turn.prompt_ids) + len(turn.output_ids)
            ends[turn.turn_id] = end
            if end > context:
                raise Refusal(
                    400,
                    "context_length_exceeded",
                    f"turn {turn.turn_id} ends at {end} tokens; model.max_context_tokens={context} "
                    "are allowed",
                )
        limit = self._settings.router.max_tokens_per_episode
        total = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns)
        if limit is not None and total > limit:
            raise _refused(f"{total} ids; router.max_tokens_per_episode={limit} are allowed")


def _turns_of(episode_id: str, samples: Sequence[PostedSample]) -> Iterator[PostedTurn]:
    """Each run of trained tokens of a row is a turn; the tokens before it are its prompt."""
    seen: set[bytes] = set()
    num_turns = 0
    for row, sample in enumerate(samples):
        size = len(sample.token_ids)
        versions = sample.policy_versions
        versions = [versions] * size if isinstance(versions, int) else versions
        lengths = (len(sample.loss_mask), len(sample.behavior_logprobs), len(versions))
        if lengths != (size, size, size):
            raise _refused(
                f"samples[{row}]: loss_mask, behavior_logprobs and policy_versions have {lengths} "
                f"items and token_ids {size}; they must be equal"
            )
        parent, end = None, 0
        for start, stop in _trained_runs(sample.loss_mask):
            # A branch that goes on from another has the other's tokens as context.
            path = hashlib.blake2b(np.asarray(sample.token_ids[:stop], np.int64).tobytes())
            owner = path.digest() + start.to_bytes(8, "little")
            if owner in seen:
                raise _refused(
                    f"samples[{row}] trains the tokens {start}..{stop} after the same tokens as "
                    "another sample of its trajectory: set loss_mask to 0 in one of them, or post "
                    "`turns`, whose tokens have one owner"
                )
            seen.add(owner)
            turn_id = f"{episode_id}-{num_turns}"
            num_turns += 1
            yield PostedTurn(
                turn_id=turn_id,
                parent_turn_id=parent,
                prompt_ids=sample.token_ids[end:start],
                output_ids=sample.token_ids[start:stop],
                behavior_logprobs=sample.behavior_logprobs[start:stop],
                version_spans=list(_spans(versions[start:stop])),
                sampling=sample.sampling,
                finish_reason=sample.finish_reason,
            )
            parent, end = turn_id, stop


def _trained_runs(mask: Sequence[bool | int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges in which the mask is true."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, bool), prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _spans(versions: Sequence[int]) -> Iterator[VersionSpan]:
    """Runs of equal versions."""
    edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1])]
    for start, end in pairwise([*edges, len(versions)]):
        yield VersionSpan(versions[start], start, end)


def _common(spans: Sequence[tuple[int, int]], end: int) -> tuple[tuple[int, int], ...]:
    """The parts of spans before `end`."""
    return tuple((first, min(last, end)) for first, last in spans if first < min(last, end))


def _refused(sentence: str) -> Refusal:
    return Refusal(400, "invalid_value", sentence, param="trajectories")
