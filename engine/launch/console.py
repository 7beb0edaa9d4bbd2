"""Live progress of a run in the terminal, from metrics.jsonl and the parts' statuses.

On anything but a terminal it prints one line a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from outloop.buffer.foreign_text import one_line
from outloop.buffer.json_lines import rows_of
from outloop.buffer.rich_terminal import LabelColumn, PlainTable, plain, show

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "train/reward_mean", ".3f"),
    ("signal", "train/groups_with_signal_share", ".2f"),
    ("failed", "train/failed_share", ".2f"),
    ("staleness", "train/staleness_mean", ".2f"),
    ("tokens/s", "train/tokens_per_s", ".0f"),
    ("logprob gap", "train/logprob_gap_mean", ".1e"),
    ("loss", "train/loss", ".4f"),
    ("step s", "train/step_s", ".1f"),
)
_ONLY_ABOVE_ZERO = frozenset({"train/failed_share"})
_NUM_ROWS = 10
_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 60


class _Tail:
    """New complete rows of metrics.jsonl since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return rows_of(data[:end])


class RunProgress:
    """Shows steps as they are recorded and, between them, what is being waited for."""

    def __init__(self, run_dir: Path, *, num_steps: int, console: Console) -> None:
        self._tail = _Tail(run_dir / "metrics.jsonl")
        self._console = console
        self._num_steps = num_steps
        self._rows: list[dict[str, Any]] = []
        """The last that are shown: a run may make a million."""
        self._rewards: list[float] = []
        self._evals: list[str] = []
        self._status = "starting"
        self._warnings: dict[str, str] = {}
        self._bar = Progress(
            LabelColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=num_steps or None)
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            self._live.stop()

    def update(self, statuses: Mapping[str, Mapping[str, str]]) -> bool:
        """Read what is new and show it; True once a step was made. `statuses`: part -> fields."""
        for row in self._tail.read():
            self._show(row)
        for part, fields in sorted(statuses.items()):
            warning = fields.get("warning")
            if warning and self._warnings.get(part) != warning:
                self._warnings[part] = warning
                show(self._console, f"warning from {part}: {one_line(warning)}", style="yellow")
        for fields in statuses.values():
            # Supervised training learns from the conversations how many steps there are.
            step, slash, total = fields.get("step", "").partition("/")
            if slash and total.isdecimal():
                self._num_steps = int(total)
                self._bar.update(self._task, completed=int(step), total=self._num_steps)
        waits = [
            f"{part}: {fields['waiting_for']}"
            for part, fields in sorted(statuses.items())
            if fields.get("waiting_for")
        ]
        status = one_line("; ".join(waits))
        # Off a terminal another kind of wait gets a line, another count does not.
        is_new = _without_digits(status) != _without_digits(self._status)
        if is_new and status and self._live is None and not self._rows:
            show(self._console, f"waiting for {status}")
        self._status = status
        if self._live is not None:
            self._live.update(self._picture())
        return bool(self._rows)

    def _show(self, row: dict[str, Any]) -> None:
        sampled, greedy = row.get("eval/sampled_reward"), row.get("eval/greedy_reward")
        if sampled is not None or greedy is not None:
            parts = [f"evaluation at step {row['step']}{_versions(row)}:"]
            if sampled is not None:
                parts.append(f"sampled {sampled:.3f} +- {row.get('eval/sampled_se') or 0:.3f}")
            if greedy is not None:
                parts.append(f"greedy {greedy:.3f} +- {row.get('eval/greedy_se') or 0:.3f}")
            text = " ".join(parts)
            self._evals.append(text)
            if self._live is None:
                show(self._console, text)
        if "train/loss" in row:
            self._rows = [*self._rows, row][-_NUM_ROWS:]
            if row.get("train/reward_mean") is not None:
                self._rewards.append(row["train/reward_mean"])
            self._bar.update(self._task, completed=row["step"])
            if self._live is None:
                left = time_left(self._rows, self._num_steps)
                line = "  ".join(text for text in (_line(row), left) if text)
                show(self._console, line)

    def _picture(self) -> Group:
        table = PlainTable(box=None, pad_edge=False, show_header=bool(self._rows))
        table.add_plain_column("step", justify="right")
        shown = self._rows
        columns = [c for c in _COLUMNS if any(_is_shown(row, c[1]) for row in shown)]
        for heading, _, _ in columns:
            table.add_plain_column(heading, justify="right")
        for row in shown:
            cells = (_cell(row, name, form) for _, name, form in columns)
            table.add_plain_row((str(row["step"]), *cells))
        status = f"waiting for {self._status}" if self._status else ""
        rewards = self._rewards
        curve = f"reward {sparkline(rewards)} {rewards[-1]:.3f}" if len(rewards) > 1 else ""
        left = time_left(self._rows, self._num_steps)
        lines = (line for line in (curve, *self._evals[-3:]) if line)
        last = " · ".join(one for one in (left, status) if one)
        return Group(table, *map(plain, lines), self._bar, plain(last))


def sparkline(values: Sequence[float]) -> str:
    """A curve of one line: means of neighbours where there are many values, lowest to highest."""
    if not values:
        return ""
    size = max(1, -(-len(values) // _SPARKS))
    means = [fmean(values[first : first + size]) for first in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def time_left(rows: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """How long the rest takes, by the median of the last ten steps; empty at the end."""
    times = [row["train/step_s"] for row in rows[-10:] if row.get("train/step_s") is not None]
    steps_left = num_steps - int(rows[-1]["step"]) if rows else 0
    if not times or steps_left <= 0:
        return ""
    seconds = median(times) * steps_left
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


def _versions(row: Mapping[str, Any]) -> str:
    """Which versions an evaluation is of, where they are several."""
    if not row.get("eval/mixed_share"):
        return ""
    # A row of an older release has no such versions.
    first, last = (row.get(f"eval/{name}_version") for name in ("oldest", "newest"))
    if first is None or last is None:
        return " (of several versions)"
    return f" (sampled by versions {first:.0f} to {last:.0f}, not by that step's alone)"


def _without_digits(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())


def _is_shown(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return value is not None and (value > 0 or name not in _ONLY_ABOVE_ZERO)


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, form)


def _line(row: Mapping[str, Any]) -> str:
    cells = [
        f"{heading} {_cell(row, name, form)}"
        for heading, name, form in _COLUMNS
        if _is_shown(row, name)
    ]
    return f"step {row['step']}: " + "  ".join(cells)
