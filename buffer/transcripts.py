"""Episodes as text, for a person to read: prompts, answers and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outloop.buffer.errors import SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.records import FailureKind, Outcome, Purpose, Turn
from outloop.buffer.run import TOKENIZER


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnText:
    """One model call as text, special tokens included."""

    prompt: str
    """What this turn added to its parent's tokens."""
    output: str
    finish_reason: str
    policy_versions: tuple[int, ...]
    """Versions of the weights that sampled it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """A closed episode as text."""

    episode_id: str
    task_id: str
    purpose: Purpose
    """train, eval or sft."""
    outcome: Outcome | None
    """completed, truncated, failed or aborted."""
    failure_kind: FailureKind | None
    """agent, environment or infrastructure; None: none of them failed."""
    reward: float | None
    error: str
    """Why it failed, in one sentence, with file and line if they are known."""
    output: str
    """The end of what an agent program wrote."""
    turns: tuple[TurnText, ...]
    """In the order in which they were recorded."""
    refused: dict[str, int] = field(default_factory=dict)
    """Model calls that the router refused, by the code of the refusal."""
    last_refusal: str = ""
    """The sentence of the last one."""

    @property
    def is_failed(self) -> bool:
        """True if the agent, its environment or the infrastructure failed."""
        return is_failure(self.outcome, self.failure_kind)


def is_failure(outcome: str | None, failure_kind: str | None) -> bool:
    """Whether an episode that ended so failed."""
    return outcome in ("failed", "aborted") or failure_kind is not None


def read_transcripts(
    reader: BufferReader, run_dir: Path, *, failed: bool = False
) -> Iterator[Transcript]:
    """Closed episodes that are still in Redis, each once; `failed`: only those that failed.

    The last 64 that failed come first; they are always kept. Others are freed when a checkpoint
    contains their group, or the group is dropped.

    Raises:
        SettingsError: the tokenizer in the run's folder cannot be read.
    """
    for transcript in Transcripts(reader, run_dir).read_new():
        if transcript.is_failed or not failed:
            yield transcript


class Transcripts:
    """Closed episodes of a run as text, while it goes on."""

    def __init__(self, reader: BufferReader, run_dir: Path) -> None:
        """Raises SettingsError if the tokenizer in the run's folder cannot be read."""
        self._reader = reader
        self._decode = _Decoder(run_dir / TOKENIZER)
        self._seen: set[str] = set()

    def read_new(self) -> Iterator[Transcript]:
        """Those in Redis that no earlier call gave."""
        for episode_id in self._new_ids():
            found = self._reader.load_episode(episode_id)
            if found is None or not found.is_closed:
                continue
            yield Transcript(
                episode_id=episode_id,
                task_id=found.opening.task_id,
                purpose=found.opening.purpose,
                outcome=found.outcome,
                failure_kind=found.failure_kind,
                reward=None if found.reward is None else found.reward.value,
                error=found.error,
                output=found.output,
                turns=tuple(self._decode.turn(turn) for turn in found.turns),
                refused=found.refusals.counts,
                last_refusal=found.refusals.last,
            )

    def skip_old(self) -> None:
        """Have `read_new` leave out what is in Redis now."""
        for _ in self._new_ids():
            pass

    def _new_ids(self) -> Iterator[str]:
        listed = set()
        for episode_id in self._reader.archive.episode_ids():
            listed.add(episode_id)
            if episode_id not in self._seen:
                self._seen.add(episode_id)
                yield episode_id
        # What is in no list any more does not come again.
        self._seen &= listed


class _Decoder:
    """Token ids as text, by the policy's tokenizer."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise SettingsError(
                f"{path} cannot be read ({error}); copy the tokenizer.json of the run's model.path "
                "there"
            ) from error

    def turn(self, turn: Turn) -> TurnText:
        versions = {span.policy_version for span in turn.version_spans}
        return TurnText(
            prompt=self._text(turn.prompt_ids.tolist()),
            output=self._text(turn.output_ids.tolist()),
            finish_reason=turn.finish_reason,
            policy_versions=tuple(sorted(versions)),
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
