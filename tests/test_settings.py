"""Settings: sources, refusals and their sentences."""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import create_run, load_run
from outloop.buffer.settings import Settings, load_settings
from outloop.buffer.settings.section import Section


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


@pytest.mark.parametrize("name", ["profile_steps=[1]", "max_grad_spike=9.0", "is_colocated=true"])
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


@pytest.mark.parametrize(
    "text",
    [
        "[Trainer]\nnum_steps = 9\n[trainer]\ngroups_per_step = 4\n",
        "[TRAINER]\nnum_steps = 9\n",
        "[trainer]\nNum_steps = 9\n",
        "[trainer.Critic]\ngamma = 0.9\n",
    ],
)
def test_a_name_in_other_capitals_is_refused_in_a_file(tmp_path: Path, text: str) -> None:
    """Two spellings of one key never live side by side, one of them without effect."""
    config = write(tmp_path / "run.toml", f'{text}[model]\npath = "model"\n')
    with pytest.raises(SettingsError, match=r"unknown setting (trainer\.)?(\w+); did you mean"):
        load_settings(config)


@pytest.mark.parametrize("name", ["Trainer.num_steps", "trainer.Num_steps", "TRAINER.NUM_STEPS"])
def test_a_name_in_other_capitals_is_refused_in_an_override(config: Path, name: str) -> None:
    """The override is named, with the key that was meant."""
    with pytest.raises(SettingsError, match=f"--set {name}=7: unknown setting .*did you mean"):
        load_settings(config, (f"{name}=7",))


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("outloop_trainer__num_steps", "rename it to OUTLOOP_TRAINER__NUM_STEPS"),
        ("OUTLOOP_Trainer__num_steps", "rename it to OUTLOOP_TRAINER__NUM_STEPS"),
        ("OUTLOOP_TRAINR__NUM_STEPS", "unknown setting trainr; did you mean 'trainer'"),
        ("OUTLOOP_TRAINER__NUM_STEPZ", "unknown setting trainer.num_stepz; did you mean"),
        ("OUTLOOP_TRAINER__", "unknown setting trainer."),
    ],
)
def test_a_variable_that_names_no_setting_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, variable: str, sentence: str
) -> None:
    """A variable either sets what it names or stops the start, with its own name."""
    monkeypatch.setenv(variable, "7")
    with pytest.raises(SettingsError, match=sentence) as refused:
        load_settings(config)
    assert variable in str(refused.value)


def test_values_from_environment_and_flags_have_the_type_of_their_setting(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of digits stays text; numbers, tables and lists are read as TOML or JSON."""
    monkeypatch.setenv("OUTLOOP_RUN__NAME", "2024")
    monkeypatch.setenv("OUTLOOP_BUFFER__PIPELINE_DEPTH", "0.5")
    monkeypatch.setenv("OUTLOOP_ENV__SPLIT", '{"train": 8, "validation": 1}')
    monkeypatch.setenv("OUTLOOP_SERVER__KIND", "sglang")
    monkeypatch.setenv("OUTLOOP_SERVER__SGLANG__CHUNKED_PREFILL_SIZE", "512")
    monkeypatch.setenv("OUTLOOP_MODEL", "not a setting: it names no key of a section")
    settings = load_settings(config, ("model.name=1e3", "trainer.profile_steps=[1, 2]"))
    assert settings.run.name == "2024"
    assert settings.model.name == "1e3"
    assert settings.buffer.pipeline_depth == 0.5
    assert settings.env.split == {"train": 8.0, "validation": 1.0}
    assert settings.server.sglang == {"chunked_prefill_size": 512}
    assert settings.trainer.profile_steps == (1, 2)


@pytest.mark.parametrize("name", [".", "..", "...", ".hidden", "-x", "", "a/b", "x" * 65])
def test_a_run_s_name_is_a_folder_of_its_own(config: Path, name: str) -> None:
    """A run is never written over the folder that it was started in."""
    with pytest.raises(SettingsError, match=r"run\.name="):
        load_settings(config, (f'run.name="{name}"',))


def numbers(model: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, type) of every setting that takes a number and no truth value."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        tables = [
            one
            for one in (annotation, *get_args(annotation))
            if isinstance(one, type) and issubclass(one, Section)
        ]
        if tables:
            if get_origin(annotation) is not dict:
                yield from numbers(tables[0], f"{prefix}{name}.")
            continue
        union = get_origin(annotation) in (Union, UnionType)
        kinds = set(get_args(annotation)) if union else {annotation}
        if kinds & {int, float} and bool not in kinds:
            yield f"{prefix}{name}", annotation


NUMBERS = sorted(numbers(Settings))


@pytest.mark.parametrize("value", ["true", "false", "nan", "inf", "-inf"])
@pytest.mark.parametrize("name", [name for name, _ in NUMBERS])
def test_a_number_is_a_finite_number(config: Path, name: str, value: str) -> None:
    """True is not 1 in any setting, and none is infinite."""
    with pytest.raises(SettingsError, match=name):
        load_settings(config, (f"{name}={value}",))


def test_the_table_of_numbers_holds_the_settings() -> None:
    """The table above is not empty by mistake."""
    assert len(NUMBERS) > 120


@pytest.mark.parametrize(
    "override",
    ["server.gpus=[true]", "env.reward_weights={a = true}", "env.reward_weights={a = nan}"],
)
def test_numbers_in_lists_and_tables_are_finite_numbers(config: Path, override: str) -> None:
    """The rule holds inside of lists and tables."""
    with pytest.raises(SettingsError, match=override.partition("=")[0]):
        load_settings(config, (override,))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    """Editors of other systems write the mark."""
    path = tmp_path / "run.toml"
    path.write_bytes('[model]\npath = "größe"\n'.encode(encoding))
    assert load_settings(path).model.path == Path("größe")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_a_file_in_another_encoding_is_a_sentence(tmp_path: Path, encoding: str) -> None:
    """A file that is not UTF-8 is named, with what to do."""
    path = tmp_path / "run.toml"
    path.write_bytes('[model]\npath = "größe"\n'.encode(encoding))
    with pytest.raises(SettingsError, match="is not UTF-8 text.*save it as UTF-8"):
        load_settings(path)


def test_an_empty_table_as_an_override_empties_the_setting(tmp_path: Path) -> None:
    """An override is never without effect: `{}` takes the file's table away."""
    config = write(
        tmp_path / "run.toml",
        '[model]\npath = "m"\nrenderer_options = { enable_thinking = false }\n',
    )
    assert load_settings(config).model.renderer_options == {"enable_thinking": False}
    assert load_settings(config, ("model.renderer_options={}",)).model.renderer_options == {}


@pytest.mark.parametrize(
    "name",
    [
        "profile_steps=[1]",
        "max_grad_spike=9.0",
        "is_colocated=true",
        "checkpoint_every=5",
        "keep_checkpoints=1",
        "trains_while_saving=false",
        "resume=false",
        "kl=k3",
    ],
)
def test_settings_without_effect_on_supervised_training_are_refused(
    config: Path, name: str
) -> None:
    """A setting of RL alone is not taken in silence."""
    with pytest.raises(SettingsError, match='has no effect with trainer.mode="sft"'):
        load_settings(config, ("trainer.mode=sft", f"trainer.{name}"))


@pytest.mark.parametrize(
    ("table", "one", "other"),
    [
        ("server.sglang", "mem-fraction-static", "mem_fraction_static"),
        ("deploy.slurm", "cpu-bind", "cpu_bind"),
    ],
)
def test_two_spellings_of_an_option_are_refused(
    config: Path, table: str, one: str, other: str
) -> None:
    """Options of other programs may have hyphens or underscores, but not both."""
    both = f'{table}={{"{one}" = 1, "{other}" = 2}}'
    with pytest.raises(SettingsError, match=f"{table} has both {one} and {other}"):
        load_settings(config, ("server.kind=sglang", both))


def test_an_unknown_setting_lists_near_names_alone(config: Path) -> None:
    """Seventy names are no answer."""
    with pytest.raises(SettingsError) as refused:
        load_settings(config, ("trainer.learing_rate=1e-3",))
    assert "'learning_rate'" in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("given", "between", "at_the_ends"),
    [
        ({}, (128, 1), (128, 1)),
        ({"num_episodes": 84}, (84, 0), (84, 0)),
        ({"num_episodes": 84, "final_num_episodes": 200}, (84, 0), (200, 0)),
        ({"final_num_episodes": 200}, (128, 1), (200, 0)),
        ({"samples_per_task": 3}, (126, 3), (126, 3)),
        ({"samples_per_task": 200}, (200, 200), (200, 200)),
        ({"num_episodes": 12, "samples_per_task": 4}, (12, 4), (12, 4)),
    ],
)
def test_evaluations_have_the_same_episodes_at_all_steps_unless_asked(
    config: Path, given: dict[str, int], between: tuple[int, int], at_the_ends: tuple[int, int]
) -> None:
    """(episodes, plays of each task); without a number no task is played twice."""
    overrides = tuple(f"eval.{name}={value}" for name, value in given.items())
    plan = load_settings(config, overrides).eval
    assert plan.episodes(is_end=False) == between
    assert plan.episodes(is_end=True) == at_the_ends
