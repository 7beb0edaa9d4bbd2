"""`outloop episodes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outloop.buffer.foreign_text import one_line
from outloop.buffer.terminal import echo
from outloop.cli.options import RUN

if TYPE_CHECKING:
    from outloop.buffer.transcripts import Transcript

MAX_CHARS = 300


@click.command()
@click.argument("episode", required=False)
@RUN
@click.option("--failed", is_flag=True, help="Only episodes that failed.")
@click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(min=0),
    help="The last so many; 0: all.",
)
@click.option("--full", is_flag=True, help="Do not shorten texts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def episodes(
    episode: str | None, run_dir: Path, failed: bool, limit: int, full: bool, as_json: bool
) -> None:
    """List episodes with prompts, answers and rewards, and why they failed.

    With EPISODE, an id or its beginning, that episode is shown in full.

    The run need not be up. Without an archive of trajectories only the last 64 episodes that failed
    are kept; others are freed when a checkpoint contains their group, or the group is dropped.
    """
    from dataclasses import asdict

    import outloop

    at_most = None if episode is not None or limit == 0 else limit
    shown = outloop.Run(run_dir).episodes(failed=failed, limit=at_most)
    if episode is not None:
        shown = [one for one in shown if one.episode_id.startswith(episode)]
        full = True
    for transcript in shown:
        if as_json:
            echo(json.dumps(asdict(transcript)))
        else:
            print_transcript(transcript, None if full else MAX_CHARS)
    kind = ("failed " if failed else "") + ("episode" if len(shown) == 1 else "episodes")
    more = "; --limit 0 shows all" if len(shown) == at_most else ""
    echo(f"{len(shown)} {kind} shown{more}", err=as_json)


def print_transcript(transcript: Transcript, max_chars: int | None) -> None:
    """Write an episode to the terminal; texts are shortened to `max_chars`."""
    outcome: str = transcript.outcome or "open"
    if transcript.failure_kind is not None:
        outcome = f"{outcome} ({transcript.failure_kind})"
    reward = "no reward" if transcript.reward is None else f"reward {transcript.reward:.3f}"
    echo(
        f"{transcript.episode_id}  {transcript.purpose}  task {transcript.task_id}  {outcome}  "
        f"{reward}  {len(transcript.turns)} turns",
        bold=True,
    )
    if transcript.error:
        echo(f"  error: {one_line(transcript.error)}")
    for number, turn in enumerate(transcript.turns):
        versions = ",".join(map(str, turn.policy_versions))
        echo(f"  turn {number} prompt: {_short(turn.prompt, max_chars)}")
        echo(
            f"  turn {number} output (version {versions}, {turn.finish_reason}): "
            f"{_short(turn.output, max_chars)}"
        )
    if transcript.refused:
        codes = ", ".join(f"{number} {code}" for code, number in transcript.refused.items())
        echo(f"  refused model calls: {codes}; the last: {one_line(transcript.last_refusal)}")
    if transcript.output:
        echo("  the end of what the agent wrote:")
        for line in _tail(transcript.output, max_chars).splitlines():
            echo(f"    {one_line(line)}")


def _short(text: str, max_chars: int | None) -> str:
    """The beginning and end of a text, on one line."""
    if max_chars is not None and len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
    return repr(text)


def _tail(text: str, max_chars: int | None) -> str:
    return text if max_chars is None else text[-2 * max_chars :]
