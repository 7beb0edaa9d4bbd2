"""`outloop init`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import SET


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@SET
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Answer 1: a new folder.")
@click.option("--agent", type=click.Choice(["function", "program"]), help="Answer 2.")
@click.option("--policy", help="Answer 3: random, a folder, or a repository of the hub.")
def init(
    config: Path | None,
    overrides: tuple[str, ...],
    folder: Path | None,
    agent: str | None,
    policy: str | None,
) -> None:
    """Begin: without CONFIG ask three questions and write a folder that trains.

    With CONFIG: make its run in its folder and in Redis, for parts that are started elsewhere.
    """
    if config is None:
        _new_folder(folder, agent, policy)
        return
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch.model_folder import with_model_folder
    from outloop.engine.launch.run_entry import make_run
    from outloop.engine.launch.settings_checks import check_before_start

    settings = with_model_folder(load_settings(config, overrides))
    check_before_start(settings)
    echo(make_run(settings).dir)


def _new_folder(folder: Path | None, agent: str | None, policy: str | None) -> None:
    from outloop.project.write import write_project

    if folder is None:
        answer = click.prompt("1. Name of a new folder", default="my-agent")
        folder = Path(answer)
    if agent is None:
        echo("2. How does your agent run? function: async Python, hundreds of episodes at")
        echo("   once. program: any command line, a process for each episode.")
        agent = click.prompt(
            "   ", type=click.Choice(["function", "program"]), default="function", prompt_suffix=""
        )
    if policy is None:
        echo("3. Which policy? random: a tiny one for a laptop. Otherwise a Hugging Face")
        policy = click.prompt("   folder or repository, such as Qwen/Qwen3-0.6B", default="random")
    assert agent is not None
    assert policy is not None
    write_project(folder, agent=agent, policy=policy)
    echo(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    echo(f"now: cd {folder} && outloop train run.toml")
