"""`outloop reward-server`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from outloop.buffer.terminal import echo
from outloop.cli.options import CONFIG, SET
from outloop.cli.parts import run_until_signalled


@click.command("reward-server")
@CONFIG
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--conversation",
    "conversation_path",
    help="package.module:function, def conversation(task, answer) -> {messages, tools}; "
    "left out: the task's question and the answer.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, help="0, the default: any free one.")
@click.option("--key-file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@SET
def reward_server(
    config: Path,
    folder: Path,
    conversation_path: str | None,
    host: str,
    port: int,
    key_file: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Serve the reward model in FOLDER, trained by CONFIG: POST /score, POST /load.

    `/score` takes {"task", "answer"}, as the verifier RewardModel sends them, or {"messages",
    "tools"}, and gives {"score", "version"}. `/load` {"path"} takes the weights of another folder.
    """
    import warnings

    warnings.filterwarnings("ignore", module="megatron")
    from outloop.buffer.errors import RecordError, SettingsError
    from outloop.buffer.settings import load_settings
    from outloop.buffer.telemetry import configure_logging
    from outloop.buffer.user_code import import_object
    from outloop.engine.train.reward_server import question_and_answer, serve_reward_model
    from outloop.router.episodes.sft import ConversationRenderer
    from outloop.router.errors import Refusal
    from outloop.router.rendering.renderer import PolicyRenderer

    model_path = f"model.path={json.dumps(str(folder))}"
    settings = load_settings(config, (*overrides, model_path))
    if settings.trainer.reward_model is None:
        raise SettingsError(
            f"{config} has no trainer.reward_model; give the settings that trained {folder}"
        )
    configure_logging("reward-server", settings.telemetry.log_level)
    conversation = question_and_answer
    if conversation_path is not None:
        conversation = import_object(
            conversation_path, setting="--conversation", import_dir=settings.env.import_dir
        )
    conversations = ConversationRenderer(
        PolicyRenderer(settings.model), max_context_tokens=settings.model.max_context_tokens
    )

    def render(messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        no_metadata: dict[str, str] = {}
        row = (json.dumps(list(messages)).encode(), json.dumps(list(tools)).encode(), no_metadata)
        try:
            (trajectory,) = conversations.render_all([row], "score")
        except Refusal as error:
            raise RecordError(str(error)) from error
        branch = trajectory.branches()[-1]
        return [
            int(i) for turn in branch for ids in (turn.prompt_ids, turn.output_ids) for i in ids
        ]

    run_until_signalled(
        lambda stop: serve_reward_model(
            settings,
            folder,
            render=render,
            conversation=conversation,
            stop=stop,
            on_ready=lambda url: echo(f"reward model at {url}/score"),
            host=host,
            port=port,
            key=key_file.read_text().strip() if key_file is not None else None,
        )
    )
