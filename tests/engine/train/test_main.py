"""What is refused before anything is built."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from fakes.families import make_family
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import CheckpointMark
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings, TrainerSettings
from outloop.engine.train.checkpoint.async_writer import save_checkpoint
from outloop.engine.train.main import check_settings, join_ranks
from outloop.engine.train.megatron import cpu_backend, model_and_optimizer
from outloop.engine.train.megatron.value_head import ValueHead


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"trainer": {"num_ranks": 2}}, r"trainer\.num_ranks=2, but .*WORLD_SIZE=1"),
        ({"trainer": {"device": "cuda"}}, r"trainer\.device='cuda'"),
        (
            {
                "model": {"path": "m", "max_context_tokens": 99},
                "trainer": {"max_microbatch_tokens": 98},
            },
            r"max_context_tokens=99 exceeds trainer\.max_microbatch_tokens=98",
        ),
    ],
)
def test_impossible_settings_are_refused(sections: dict[str, Any], sentence: str) -> None:
    """Each with what, value and what to do."""
    with pytest.raises(SettingsError, match=sentence):
        check_settings(Settings(**({"model": {"path": "m"}} | sections)))


@pytest.mark.parametrize("setting", ["server.start_timeout_s", "publish.phase_timeout_s"])
def test_ranks_wait_for_longer_than_one_of_them_waits_for_servers(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would end while it waits."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    section, name = setting.split(".")
    tree: dict[str, Any] = {"model": {"path": "m"}, section: {name: 50.0}}
    others = {"server": {"start_timeout_s": 1.0}, "publish": {"phase_timeout_s": 1.0}}
    tree = others | tree | {"trainer": {"num_ranks": 2, "rank_timeout_s": 50.0}}
    with pytest.raises(SettingsError, match=rf"rank_timeout_s=50\.0 does not exceed {setting}"):
        check_settings(Settings(**tree))


def test_the_defaults_are_accepted(tiny_folder: Callable[..., Path]) -> None:
    """On a machine without CUDA."""
    check_settings(Settings(model={"path": tiny_folder()}))


def test_releases_of_megatron_that_were_not_tried_are_refused() -> None:
    """The sentence names those that were, and the command that installs one."""
    with pytest.raises(SettingsError, match=r"0\.16\.1 and 0\.19\.2 are allowed.*pip install"):
        cpu_backend.install("0.17.0")


@pytest.fixture
def join(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., None]:
    """A rank's start, up to the process group: `join("qwen3", kl="k3")`."""

    def no_group(**_: Any) -> None:
        raise AssertionError("a process group is formed")

    def start(kind: str = "qwen3", **trainer: Any) -> None:
        settings = Settings(model={"path": tiny_folder(kind)}, trainer=trainer)
        with ExitStack() as stack:
            run = create_run(settings, tmp_path / "run", "unix:///nowhere")
            join_ranks(run, stack, join_group=no_group)

    return start


def test_what_the_trainer_computes_with_is_logged(join: Callable[..., None]) -> None:
    """First of all: a Transformer Engine that cannot be imported is replaced without an error."""
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(AssertionError, match="a process group is formed"),
    ):
        join()
    (line,) = [line for line in logs if line["event"] == "trainer_model"]
    assert (line["device"], line["dtype"], line["layers"]) == ("cpu", "float32", "local")


@pytest.mark.parametrize(
    ("setting", "trainer"),
    [
        ("trainer.reference_path", lambda path: {"kl": "k3", "reference_path": path}),
        ("trainer.critic.path", lambda path: {"recipe": "ppo", "critic": {"path": path}}),
        ("trainer.teacher.path", lambda path: {"recipe": "distill", "teacher": {"path": path}}),
    ],
)
def test_another_model_that_does_not_belong_is_refused_first(
    setting: str,
    trainer: Callable[[Path], dict[str, Any]],
    join: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Before a process group is formed, by a sentence that names its setting."""
    make_family("llama", tmp_path / "other", is_tied=True, vocab_size=300)
    with pytest.raises(SettingsError, match=rf"^{setting}=.*vocab_size=300, .* has 400"):
        join(**trainer(tmp_path / "other"))
    with pytest.raises(SettingsError, match=rf"^{setting}='.*nothing' holds no config.json"):
        join(**trainer(tmp_path / "nothing"))


def test_a_reference_without_effect_is_refused(join: Callable[..., None], tmp_path: Path) -> None:
    """Without a KL term it is looked at by nothing."""
    with pytest.raises(ValueError, match="has no effect: it needs a trainer.kl"):
        join(reference_path=tmp_path / "reference")


def test_a_checkpoint_with_a_critic_of_another_size_is_refused_first(
    join: Callable[..., None],
    make_policy: Callable[..., model_and_optimizer.Policy],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Before a process group is formed; the policy of the checkpoint is the run's."""
    mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
    config = model_and_optimizer.read_config(tiny_folder("llama3"), {})
    critic = model_and_optimizer.build_critic(
        config, TrainerSettings(advantage="gae"), num_updates=1
    )
    folder = tmp_path / "run" / "checkpoints"
    save_checkpoint(make_policy("qwen3"), folder, step=1, mark=mark, keep=1, critic=critic)
    words = r"holds a critic of another model \(checkpoint, trainer.critic.path\): .*qk_layernorm"
    with pytest.raises(SettingsError, match=words):
        join("qwen3", recipe="ppo")
    with pytest.raises(AssertionError, match="a process group is formed"):
        join("qwen3", recipe="ppo", critic={"path": tiny_folder("llama3")})


def test_a_checkpoint_with_another_kind_of_critic_is_refused_first(
    join: Callable[..., None],
    make_policy: Callable[..., model_and_optimizer.Policy],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A head where the run wants a model, a model where it wants a head, none at all."""
    mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
    config = model_and_optimizer.read_config(tiny_folder("qwen3"), {})
    settings = TrainerSettings(advantage="gae")
    folder = tmp_path / "run" / "checkpoints"
    head = ValueHead(config.hidden_size, settings, num_updates=1)
    save_checkpoint(make_policy("qwen3"), folder, step=1, mark=mark, keep=1, critic=head)
    with pytest.raises(SettingsError, match='kind="head", and the run has trainer.*="model"'):
        join("qwen3", recipe="ppo")
    with pytest.raises(AssertionError, match="a process group is formed"):
        join("qwen3", recipe="ppo", critic={"kind": "head"})
    model = model_and_optimizer.build_critic(config, settings, num_updates=1)
    save_checkpoint(make_policy("qwen3"), folder, step=2, mark=mark, keep=1, critic=model)
    with pytest.raises(SettingsError, match='kind="model", and the run has trainer.*="head"'):
        join("qwen3", recipe="ppo", critic={"kind": "head"})
    save_checkpoint(make_policy("qwen3"), folder, step=3, mark=mark, keep=1)
    with pytest.raises(SettingsError, match="holds no critic"):
        join("qwen3", recipe="ppo", critic={"kind": "head"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({}, "another model .*qk_layernorm"), ({"schema": 9}, "schema=9; this release reads 3")],
)
def test_a_checkpoint_that_does_not_belong_is_refused_first(
    change: dict[str, Any],
    sentence: str,
    join: Callable[..., None],
    make_policy: Callable[..., model_and_optimizer.Policy],
    tmp_path: Path,
) -> None:
    """One of another model, or of a newer release: before a process group is formed."""
    mark = CheckpointMark(fence=1, group_ids=(), next_slot=0, policy_version=1)
    folder = tmp_path / "run" / "checkpoints"
    path = save_checkpoint(make_policy("qwen3"), folder, step=1, mark=mark, keep=1)
    text = json.dumps(json.loads((path / "state.json").read_text()) | change)
    (path / "state.json").write_text(text)
    sizes = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps(sizes | {"state.json": len(text)}))
    with pytest.raises(SettingsError, match=sentence):
        join("llama")
    with pytest.raises(AssertionError, match="a process group is formed"):
        join("llama", resume=False)
