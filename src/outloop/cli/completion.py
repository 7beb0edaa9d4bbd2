"""`outloop completion`, and what it completes beyond commands and options."""

from __future__ import annotations

import click

from outloop.buffer.terminal import echo


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete outloop's commands, options and settings.

    bash and zsh: eval "$(outloop completion bash)" in ~/.bashrc or ~/.zshrc.
    fish: outloop completion fish > ~/.config/fish/completions/outloop.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    program = click.get_current_context().find_root().command
    made = found(program, {}, "outloop", "_OUTLOOP_COMPLETE")
    # The check of bash's version that `source` makes would start bash.
    echo(made.source_template % made.source_vars())


def complete_setting(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of settings for `--set`, section by section."""
    from pydantic import BaseModel

    from outloop.buffer.settings import Settings

    section, dot, _ = incomplete.partition(".")
    if not dot:
        return [f"{name}." for name in Settings.model_fields if name.startswith(incomplete)]
    model = Settings.model_fields[section].annotation if section in Settings.model_fields else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    names = [f"{section}.{name}=" for name in model.model_fields]
    return [name for name in names if name.startswith(incomplete)]
