"""`outloop buffer`: inspect a run's buffer and act on what is stuck there.

Importing this module loads neither redis nor numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outloop.buffer.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from outloop.buffer.dead_letters import DeadLetterEpisode
    from outloop.buffer.records import Reward, Trajectory, Turn
    from outloop.buffer.store.ledger import Ledger

_RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the run, up or not.",
)
_FILE = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group()
def buffer() -> None:
    """Look at a run's episodes, groups and dead letters."""


@buffer.command()
@_RUN
def stats(run_dir: Path) -> None:
    """Counters since the run began, sizes now, and what happened to every attempt."""
    from outloop.buffer.open_run import joined
    from outloop.buffer.stats import STATS

    with joined(run_dir) as reader:
        numbers = reader.stats()
        ledger = reader.ledger()
    rows = [(name, f"{numbers[name]:g}", text) for name, text in STATS.items()]
    _print_table("buffer", ("name", "value", "meaning"), rows)
    _print_ledger(ledger)


@buffer.command()
@_RUN
@click.option("--pipeline-depth", help="Steps ahead of the trainer, or auto.")
@click.option("--max-staleness", type=int, help="Publishes that a trained token may be old.")
def limits(run_dir: Path, pipeline_depth: str | None, max_staleness: int | None) -> None:
    """Show how many groups may be started, or change it until the run is started again.

    What is too old under a lower --max-staleness is played again.
    """
    from outloop.buffer.open_run import joined
    from outloop.buffer.settings.buffer import beyond_age

    with joined(run_dir) as reader:
        now = reader.limits.change(
            pipeline_depth=_depth(pipeline_depth), max_staleness=max_staleness
        )
    if sentence := beyond_age(now.pipeline_depth, now.max_staleness):
        echo(sentence, err=True)
    depth = now.num_beyond / now.groups_per_step
    decided = f"; decided at the last take: {now.cause}" if now.cause else ""
    echo(
        f"pipeline_depth={now.pipeline_depth} max_staleness={now.max_staleness} "
        f"over_provision={now.over_provision:g}: {now.num_for_step} groups for a step and "
        f"{now.num_beyond} beyond them ({depth:g} steps) may be live, {now.num_live} are{decided}"
    )


def _depth(text: str | None) -> Any:
    """A number, or what the limits refuse if it is not "auto"."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@buffer.command()
@click.argument("episode")
@_RUN
def show(episode: str, run_dir: Path) -> None:
    """One episode with its turns."""
    from outloop.buffer.errors import NotFound
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        found = reader.load_episode(episode)
    if found is None:
        raise NotFound(
            f"no episode_id={episode}; episodes are kept until a checkpoint contains their group, "
            "or the group is dropped"
        )
    what = found.opening
    facts = (what.task_id, what.group_id, what.attempt, what.purpose, found.outcome or "open")
    score = None if found.reward is None else found.reward.value
    names = ("task", "group", "attempt", "purpose", "outcome", "reward")
    _print_table(f"episode {episode}", names, [[*map(_cell, facts), _cell(score)]])
    _print_scores(found.reward)
    _print_turns(found.turns)
    if found.resumes is not None:
        echo(f"resumes the lost episode {found.resumes}, whose turns it replays where it can")
    if found.error:
        echo(f"error: {found.error}")
    if found.output:
        echo(f"the end of what the agent wrote:\n{found.output}")


@buffer.group()
def dead() -> None:
    """Groups that were dropped as failed or malformed."""


@dead.command("list")
@_RUN
def list_all(run_dir: Path) -> None:
    """Every dead letter, oldest first."""
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        letters = reader.dead_letters.list_all()
    rows = [
        (x.group_id, _cell(x.slot), x.task_id, x.reason, _time(x.dropped_at), x.error)
        for x in letters
    ]
    _print_table("dead letters", ("group", "slot", "task", "reason", "dropped", "why"), rows)


@dead.command("inspect")
@click.argument("group")
@_RUN
@click.option(
    "--save",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the stored bytes of every record into this folder.",
)
def inspect_dead_letter(group: str, run_dir: Path, folder: Path | None) -> None:
    """One dead letter with its scored episodes."""
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        letter, episodes = reader.dead_letters.read(group)
    rows = [
        ("slot", _cell(letter.slot)),
        ("task", letter.task_id),
        ("reason", letter.reason),
        ("why", letter.error),
        ("last failure", letter.last_failure),
        ("dropped", _time(letter.dropped_at)),
        ("attempts", f"{letter.num_scored} of {letter.group_size} scored, {letter.num_replaced} "
         f"replaced, {letter.num_lost} given up"),
    ]  # fmt: skip
    _print_table(f"dead letter {group}", ("field", "value"), rows)
    for item in episodes:
        echo(f"episode {item.episode_id}, {item.num_bytes} bytes: {item.error or 'whole'}")
        if item.trajectory is not None:
            _print_turns(item.trajectory.turns)
        if folder is not None:
            _save_records(item, folder)


@dead.command("requeue")
@click.argument("groups", nargs=-1, required=True)
@_RUN
def requeue_dead_letters(groups: tuple[str, ...], run_dir: Path) -> None:
    """Have the slots of dead letters played again, before new ones."""
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        for group_id in groups:
            reader.dead_letters.requeue(group_id)
            echo(f"{group_id}: its slot is played again")


@dead.command("drop")
@click.argument("groups", nargs=-1, required=True)
@_RUN
def drop_dead_letters(groups: tuple[str, ...], run_dir: Path) -> None:
    """Forget dead letters and their episodes."""
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        for group_id in groups:
            reader.dead_letters.discard(group_id)
            echo(f"{group_id}: dropped")


@buffer.command("export")
@_FILE
@_RUN
def export_file(file: Path, run_dir: Path) -> None:
    """Write every trajectory that is in Redis to FILE, as JSONL.

    Evaluation episodes are included; those that a client opened by itself are kept for an hour
    after their end. Groups that a checkpoint contains are not in Redis any more.
    """
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        number, damaged = reader.archive.write(file)
    echo(f"{number} trajectories written to {file}, {damaged} damaged ones left out")


@buffer.command("import")
@_FILE
@_RUN
@click.option("--skip-bad", is_flag=True, help="Leave out lines that are no trajectories for SFT.")
@click.option("--final", is_flag=True, help="No more trajectories for SFT will come.")
def import_file(file: Path, run_dir: Path, skip_bad: bool, final: bool) -> None:
    """Store the trajectories for SFT of FILE, as written by export."""
    from outloop.buffer.open_run import joined

    with joined(run_dir) as reader:
        stored, left_out = reader.archive.read(file, skip_bad=skip_bad, final=final)
    echo(f"{stored} trajectories stored, {left_out} lines left out")


@buffer.command()
@_RUN
@click.confirmation_option(prompt="Remove all data of this run from Redis?")
def purge(run_dir: Path) -> None:
    """Remove a stopped run's data from Redis; its checkpoints stay.

    If the run is started again, it resumes from its last checkpoint; other groups are lost.
    """
    from outloop.buffer.open_run import purge as purge_run

    echo(f"{purge_run(run_dir)} keys removed")


def _print_ledger(ledger: Ledger) -> None:
    rows = []
    for name, column in ledger.columns.items():
        number = column.num_attempts
        mean_s, mean_tokens = column.duration_s / number, column.num_tokens / number
        is_open = name == "open"
        rows.append(
            (
                name,
                str(number),
                "-" if is_open else f"{mean_s:.1f} s",
                _buckets(column.by_duration, " s"),
                "-" if is_open else f"{mean_tokens:.0f}",
                _buckets(column.by_tokens, ""),
            )
        )
    names = ("column", "attempts", "mean", "by duration", "mean tokens", "by sampled tokens")
    _print_table(f"{ledger.num_started} attempts started", names, rows)
    ledger.check()


def _buckets(buckets: Mapping[float, int], unit: str) -> str:
    """Number of attempts in each bucket: `<=10 s: 3, <=30 s: 1, more: 2`."""
    return ", ".join(
        f"more: {number}" if bound == float("inf") else f"<={bound:g}{unit}: {number}"
        for bound, number in buckets.items()
    )


def _save_records(item: DeadLetterEpisode, folder: Path) -> None:
    from urllib.parse import quote

    # Any id becomes the name of one folder below this one.
    own = folder / quote(item.episode_id, safe="").replace(".", "%2E")
    own.mkdir(parents=True, exist_ok=True)
    for name, data in item.records.items():
        (own / name).write_bytes(data)
    echo(f"{len(item.records)} records written to {own}")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    from outloop.buffer.rich_terminal import PlainTable, show_table

    table = PlainTable(title=title, title_justify="left")
    for name in columns:
        table.add_plain_column(name, overflow="fold")
    for row in rows:
        table.add_plain_row(row)
    show_table(Console(), table)


def _print_scores(reward: Reward | None) -> None:
    if reward is None:
        return
    rows = [
        (kind, name, f"{number:g}")
        for kind, numbers in (
            ("component", reward.components),
            ("turn", reward.turns),
            ("branch", reward.branches),
            ("tokens", {f"{s.turn_id}[{s.start}:{s.end}]": s.value for s in reward.tokens}),
        )
        for name, number in numbers.items()
    ]
    if rows:
        _print_table("scores", ("of", "name", "value"), rows)


def _print_turns(turns: Sequence[Turn]) -> None:
    rows = [
        (
            str(number),
            turn.turn_id,
            _cell(turn.parent_turn_id),
            turn.branch_cause,
            str(len(turn.prompt_ids)),
            str(len(turn.output_ids)),
            str(sum(end - start for start, end in turn.loss_spans)),
            " ".join(sorted({str(span.policy_version) for span in turn.version_spans})),
            turn.finish_reason,
            turn.mask_reason,
        )
        for number, turn in enumerate(turns)
    ]
    names = ("", "turn", "parent", "branch", "prompt", "output", "trained", "versions", "finish",
             "masked")  # fmt: skip
    _print_table(f"{len(turns)} turns, in tokens", names, rows)


def show_drift(run_dir: Path) -> None:
    """Print what broke episodes into branches, what it cost, and what to change."""
    from outloop.buffer.branch_report import measure

    drift = measure(_all_trajectories(run_dir))
    echo(
        f"{drift.num_episodes} episodes, {drift.num_turns} turns, "
        f"{drift.num_branches} branches ({drift.num_branches / max(1, drift.num_episodes):.2f} an "
        f"episode); broken branches made {drift.cost_share:.0%} of {drift.num_prompt_tokens} "
        "prompt tokens necessary"
    )
    rows = [
        (c.cause, str(c.num_turns), str(c.num_episodes), str(c.num_prompt_tokens))
        for c in drift.costs
    ]
    if rows:
        _print_table("breaks", ("cause", "turns", "episodes", "prompt tokens"), rows)
    for cost in drift.costs:
        echo(f"{cost.cause}: {cost.explanation}\n  -> {cost.advice}")
    if drift.refused:
        codes = ", ".join(f"{number} {code}" for code, number in drift.refused.items())
        echo(
            f"refused model calls: {codes}; `outloop episodes --run {run_dir}` shows the sentences"
        )
    if not drift.num_turns:
        echo("no turn was recorded, so nothing can be said of branches")
    elif not drift.costs:
        echo("every turn continued its episode's one branch")
    for reason, number in drift.masked.items():
        echo(f"not trained: {number} output tokens, {reason}")


def _all_trajectories(run_dir: Path) -> Iterator[Trajectory]:
    """Those in the archive, then those that only Redis has, if it is there."""
    import importlib.util

    from outloop.buffer.errors import BufferUnavailable
    from outloop.buffer.open_run import joined
    from outloop.buffer.records import Trajectory
    from outloop.buffer.trajectories.folder import FOLDER, MANIFEST

    folder, seen = run_dir / FOLDER, set[str]()
    if (folder / MANIFEST).exists() and importlib.util.find_spec("pyarrow") is not None:
        from outloop.buffer.trajectories.reading import read_trajectories

        for trajectory in read_trajectories(folder):
            seen.add(trajectory.episode.episode_id)
            yield trajectory
    try:
        with joined(run_dir) as reader:
            for item in reader.archive.trajectories():
                if isinstance(item, Trajectory) and item.episode.episode_id not in seen:
                    yield item
    except BufferUnavailable:
        if not seen:
            raise


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _time(unix_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="seconds")
