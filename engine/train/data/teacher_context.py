"""Text that only a teacher sees, as the ids that stand in front of an episode's rows."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import TEACHER_CONTEXT, Trajectory
from outloop.buffer.settings import Settings


class TeacherContexts:
    """Reads trainer.teacher.context_key's text of episodes with the policy's tokenizer."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            SettingsError: the model folder has no tokenizer.json.
        """
        assert settings.trainer.teacher is not None
        self._template = settings.trainer.teacher.context_template
        path = settings.model.path / "tokenizer.json"
        if not path.is_file():
            raise SettingsError(
                f"trainer.teacher.context_key={settings.trainer.teacher.context_key!r} needs a "
                f"tokenizer, and model.path={str(settings.model.path)!r} holds no tokenizer.json; "
                "add it, or leave context_key out"
            )
        self._tokenizer = Tokenizer.from_file(str(path))

    def ids_of(self, trajectory: Trajectory) -> tuple[int, ...]:
        """What stands in front of the episode's rows; () without such a text."""
        text = trajectory.episode.metadata.get(TEACHER_CONTEXT, "")
        if not text:
            return ()
        whole = self._template.replace("{context}", text)
        found: Sequence[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids
        return tuple(found)
