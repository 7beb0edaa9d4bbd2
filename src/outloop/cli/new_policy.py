"""`outloop new-policy`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo


@click.command("new-policy")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--conversations",
    metavar="SOURCE",
    help="JSONL file or module:function to train the tokenizer on; without it every byte is a "
    "token, 265 in all.",
)
@click.option(
    "--import-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where SOURCE is looked for after the working directory.",
)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--vocab-size", default=640, show_default=True, help="At most; with --conversations alone."
)
@click.option("--hidden-size", default=64, show_default=True)
@click.option(
    "--head-size",
    default=16,
    show_default=True,
    help="Of each attention head; 64 for SGLang on a GPU.",
)
@click.option("--num-layers", default=2, show_default=True)
@click.option(
    "--max-context-tokens",
    default=2048,
    show_default=True,
    help="Prompt and answer together; a framework that describes tools takes hundreds.",
)
def new_policy(
    out: Path, conversations: str | None, import_dir: Path | None, seed: int, **sizes: int
) -> None:
    """Make a small random policy for a laptop, with a tokenizer of its own.

    A folder with another model is not changed.
    """
    from outloop.engine.models.random_init import Sizes, write_policy
    from outloop.envs.tasks.sft_conversations import read_conversations

    rows = (
        read_conversations(conversations, setting="--conversations", import_dir=import_dir)
        if conversations is not None
        else ()
    )
    echo(f"{out}: {write_policy(out, seed, rows, Sizes(**sizes))} random weights")
