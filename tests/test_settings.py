"""Settings: sources, refusals and their sentences."""

from pathlib import Path

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import create_run, load_run
from outloop.buffer.settings import load_settings


def write(path: Path, text: str) -> Path:
    """Write a settings file and return its path."""
    path.write_text(text)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A minimal settings file."""
    return write(tmp_path / "run.toml", '[model]\npath = "model"\n[trainer]\nnum_steps = 3\n')


def test_later_sources_win(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, then environment, then --set."""
    assert load_settings(config).trainer.num_steps == 3
    monkeypatch.setenv("OUTLOOP_TRAINER__NUM_STEPS", "4")
    assert load_settings(config).trainer.num_steps == 4
    assert load_settings(config, ("trainer.num_steps=5",)).trainer.num_steps == 5


def test_an_unknown_key_names_the_nearest(config: Path) -> None:
    """A misspelt key is refused with the key that was probably meant."""
    with pytest.raises(SettingsError, match="unknown setting trainer.num_stepz.*'num_steps'"):
        load_settings(config, ("trainer.num_stepz=5",))


def test_a_wrong_type_names_the_value(config: Path) -> None:
    """A value of the wrong type is shown with its name."""
    with pytest.raises(SettingsError, match="buffer.group_size='many'"):
        load_settings(config, ("buffer.group_size=many",))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A settings file that is not there is named in the error."""
    with pytest.raises(SettingsError, match=r"nothing\.toml"):
        load_settings(tmp_path / "nothing.toml")


def test_broken_toml_is_a_sentence(tmp_path: Path) -> None:
    """A file that is not TOML is refused with the parser's position."""
    with pytest.raises(SettingsError, match="is not TOML"):
        load_settings(write(tmp_path / "bad.toml", "[model\n"))


def test_contradictions_are_refused(config: Path) -> None:
    """A group of one has no baseline, unless the take's episodes are one."""
    alone = "buffer.group_size=1"
    with pytest.raises(SettingsError, match=r"buffer\.group_size=1"):
        load_settings(config, (alone,))
    with pytest.raises(SettingsError, match=r"buffer\.group_size=1"):
        load_settings(config, (alone, "trainer.advantage=reinforce_pp_baseline"))
    plus = "trainer.advantage=reinforce_pp"
    assert load_settings(config, (alone, plus)).buffer.group_size == 1
    with pytest.raises(SettingsError, match=r"trainer\.groups_per_step=1"):
        load_settings(config, (alone, plus, "trainer.groups_per_step=1"))


def test_scores_of_turns_need_an_advantage_that_looks_at_them(config: Path) -> None:
    """Trained in name alone would be a silent loss."""
    scored = "env.turn_scores=train"
    with pytest.raises(SettingsError, match=r'turn_scores="train" with trainer\.advantage="grpo"'):
        load_settings(config, (scored,))
    for used in ("trainer.advantage=reward_to_go", "trainer.advantage_path=mine:function"):
        assert load_settings(config, (scored, used)).env.turn_scores == "train"


@pytest.mark.parametrize("name", ["dump_steps=[1]", "max_grad_spike=9.0", "is_colocated=true"])
def test_what_works_on_one_rank_is_allowed_on_several(config: Path, name: str) -> None:
    """Looking into steps and leaving the device are every rank's."""
    assert load_settings(config, ("trainer.num_ranks=2", f"trainer.{name}")).trainer.num_ranks == 2


def test_an_override_without_equals_is_a_sentence(config: Path) -> None:
    """--set needs section.key=value."""
    with pytest.raises(SettingsError, match=r"section\.key=value"):
        load_settings(config, ("trainer",))


def test_settings_are_frozen(config: Path) -> None:
    """Nobody can change settings after they were resolved."""
    with pytest.raises(ValueError, match="frozen"):
        load_settings(config).trainer.num_steps = 9  # type: ignore[misc]


def test_a_run_is_joined_with_the_same_settings_only(config: Path, tmp_path: Path) -> None:
    """A process that finds edited settings refuses to join; secrets are the owner's alone."""
    run = create_run(load_settings(config), tmp_path / "r", "redis://x")
    assert load_run(tmp_path / "r") == run
    assert (tmp_path / "r/secrets.json").stat().st_mode & 0o077 == 0
    assert run.keys.runner_key not in (tmp_path / "r/settings.json").read_text()
    text = (tmp_path / "r/settings.json").read_text()
    (tmp_path / "r/settings.json").write_text(text.replace('"num_steps": 3', '"num_steps": 4'))
    with pytest.raises(SettingsError, match="digest"):
        load_run(tmp_path / "r")


def test_a_second_start_keeps_identity_and_keys(config: Path, tmp_path: Path) -> None:
    """Resuming a run changes neither its id nor its keys."""
    first = create_run(load_settings(config), tmp_path / "r", "redis://x")
    second = create_run(
        load_settings(config, ("trainer.num_steps=9",)), tmp_path / "r", "redis://y"
    )
    assert (second.run_id, second.keys) == (first.run_id, first.keys)
