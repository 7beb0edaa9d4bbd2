"""Metrics as TensorBoard shows them, in the run's folder `tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tensorboardX import SummaryWriter

from outloop.buffer.trackers.samples import COLUMNS, Samples, row_of
from outloop.buffer.trackers.tracker import RunFacts, SeenEpisode


class TensorBoard:
    """Event files."""

    needs_turns = False

    def __init__(self, run: RunFacts) -> None:
        self._writer = SummaryWriter(str(run.dir / "tensorboard"), flush_secs=5)
        self._writer.add_text("settings", f"```json\n{json.dumps(run.settings, indent=1)}\n```", 0)
        self._samples = Samples.of(run)

    def log_metrics(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One scalar for each name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def log_episodes(self, episodes: Sequence[SeenEpisode]) -> None:
        """A table in Markdown for each version."""
        for version, chosen in self._samples.choose(episodes):
            lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
            lines += [" | ".join(_cell(value) for value in row_of(one)) for one in chosen]
            self._writer.add_text("episodes", "\n".join(lines), version)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _cell(value: object) -> str:
    """Text of a policy must not leave its cell."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")
