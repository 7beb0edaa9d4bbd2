"""outloop: reinforcement learning for agents, with the loop outside.

    import outloop

    run = outloop.train("run.toml", settings={"trainer.num_steps": 20})
    run.metrics()[-1]["train/reward_mean"]
    run.episodes(failed=True)

    with outloop.serve("run.toml") as served:
        ...  # served.base_url, served.admin_url, served.runner_key

The command line calls the same functions. Importing this package loads none of its parts.
"""

from outloop.runs import Run, Serving, serve, train

__version__ = "0.2.0"
__all__ = ["Run", "Serving", "__version__", "serve", "train"]
