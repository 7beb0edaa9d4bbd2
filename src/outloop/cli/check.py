"""`outloop check`."""

from __future__ import annotations

from pathlib import Path

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET, print_table


@click.command()
@CONFIG
@SET
@click.option("--gpu-memory-gib", default=80.0, show_default=True, help="Of each GPU.")
@click.option("--gpu-tflops", default=989.0, show_default=True, help="Its peak in bfloat16.")
@click.option("--mfu", default=0.3, show_default=True, help="Share of it that is reached.")
@click.option("--gpu-tb-per-s", default=2.0, show_default=True, help="Of its memory, as reached.")
@click.option("--publish-gb-per-s", default=25.0, show_default=True, help="Into one server.")
def check(
    config: Path,
    overrides: tuple[str, ...],
    gpu_memory_gib: float,
    gpu_tflops: float,
    mfu: float,
    gpu_tb_per_s: float,
    publish_gb_per_s: float,
) -> None:
    """Say whether CONFIG fits its GPUs, and about how long a step takes; no GPU is touched.

    The defaults are those of an H100's data sheet. Of a model that is not here only config.json is
    downloaded. Exit code 2: it does not fit.
    """
    from outloop.buffer.errors import SettingsError
    from outloop.buffer.settings import load_settings
    from outloop.engine.launch.model_folder import read_model_config
    from outloop.engine.launch.plan.fit import Gpus, fit
    from outloop.engine.launch.plan.report import fit_tables
    from outloop.engine.train.megatron.parallel_config import read_sizes

    settings = load_settings(config, overrides)
    # Which layers the trainer will have is not known here; these have every direction.
    trainer = settings.trainer
    read_sizes(trainer.megatron, num_ranks=trainer.num_ranks, layers="transformer_engine")
    found, source = read_model_config(settings)
    gpus = Gpus(
        memory_gib=gpu_memory_gib,
        tflops=gpu_tflops,
        mfu=mfu,
        tb_per_s=gpu_tb_per_s,
        publish_gb_per_s=publish_gb_per_s,
    )
    fits = fit(settings, found, gpus, source=source)
    echo(f"model: {source}")
    for table in fit_tables(fits, gpus, settings):
        print_table(table)
    if fits.refusals:
        raise SettingsError("; and ".join(fits.refusals))
    echo("it fits, by these formulas; leave room for what they do not count (docs/gpu.md)")
