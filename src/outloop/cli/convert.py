"""`outloop convert`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import check_writable
from outloop.cli.waiting import waiting

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("source", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option(
    "--config",
    type=_FOLDER,
    help="Folder with the model's config.json and tokenizer, for a checkpoint that has none.",
)
@click.option(
    "--max-shard-gb",
    default=4.0,
    show_default=True,
    help="A Hugging Face folder is cut into files of at most this size, with an index.",
)
def convert(source: Path, out: Path, config: Path | None, max_shard_gb: float) -> None:
    """Turn SOURCE into OUT: a Hugging Face folder into a Megatron checkpoint, or back.

    A Megatron checkpoint is a folder checkpoints/step_N of a run, or any distributed checkpoint of
    Megatron-core, of any layout of ranks. Only weights are converted, no optimizer state.
    """
    import warnings

    check_writable(out / "config.json", "OUT")
    warnings.filterwarnings("ignore", module="megatron")
    from outloop.engine.train.checkpoint import convert as converting

    with waiting(f"converting {source}"):
        if converting.is_huggingface(source):
            converting.to_megatron(source, out)
        else:
            bytes_per_shard = int(max_shard_gb * 2**30)
            converting.to_huggingface(source, out, config=config, max_shard_bytes=bytes_per_shard)
    echo(f"wrote {out}")
