"""The folder of a run: who may read it, and what is never written into it."""

import json
import stat
from pathlib import Path

import pytest

from fakes.full_disk import longest_file
from outloop.buffer.errors import SettingsError
from outloop.buffer.run import create_run, load_run, load_run_settings
from outloop.buffer.settings import build_settings, digest_of, load_settings

SECRET = "s3cret-pass"


def settings_with(folder: Path, **buffer: object) -> object:
    """Settings of a run in `folder`."""
    tree = {"run": {"dir": str(folder)}, "model": {"path": str(folder)}, "buffer": buffer}
    return build_settings(tree, source="test")


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Prompts, answers, hidden fields and logs lie in it; git leaves it alone."""
    folder = tmp_path / "runs" / "a"
    create_run(settings_with(tmp_path), folder, "redis://h:1/0")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert (folder / ".gitignore").read_text() == "*\n"


def test_a_start_on_a_full_disk_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """With room again it is the same run."""
    folder = tmp_path / "a"
    before = create_run(settings_with(tmp_path), folder, "redis://h:1/0")
    names = set(folder.iterdir())
    with longest_file(4), pytest.raises(OSError, match="File too large"):
        create_run(settings_with(tmp_path, group_size=4), folder, "redis://h:1/0")
    assert set(folder.iterdir()) == names
    assert load_run(folder).settings == before.settings
    assert create_run(settings_with(tmp_path), folder, "redis://h:1/0").run_id == before.run_id


def test_a_folder_of_an_earlier_release_is_closed(tmp_path: Path) -> None:
    """When its run is started again."""
    folder = tmp_path / "a"
    create_run(settings_with(tmp_path), folder, "redis://h:1/0")
    for path in (folder, folder / "settings.json", folder / "run.json"):
        path.chmod(0o755)
    create_run(settings_with(tmp_path), folder, "redis://h:1/0")
    for path in (folder, folder / "settings.json", folder / "run.json"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h:6379/0",
        f"rediss://user:{SECRET}@h:6379/0",
        f"redis://h:6379/0?password={SECRET}",
        f"unix://user:{SECRET}@/tmp/socket",
    ],
)
def test_a_password_in_the_url_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """From a file, the environment or a flag: settings are written down, a password must not be."""
    with pytest.raises(SettingsError, match="redis_password_file") as caught:
        settings_with(tmp_path, redis_url=url)
    assert SECRET not in str(caught.value)
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"\n')
    monkeypatch.setenv("OUTLOOP_BUFFER__REDIS_URL", url)
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "run.toml")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_password_reaches_no_file_and_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It is in the URL that clients are made with, and in nothing that is shown or written."""
    (tmp_path / "password").write_text(SECRET)
    monkeypatch.setenv("OUR_REDIS_PASSWORD", SECRET)
    given = (
        {"redis_password_file": str(tmp_path / "password")}
        if source == "file"
        else {"redis_password_env": "OUR_REDIS_PASSWORD"}
    )
    url = "redis://user@h:1/0"
    folder = tmp_path / "a"
    create_run(settings_with(tmp_path, redis_url=url, **given), folder, url)
    run = load_run(folder)
    assert run.redis_url == f"redis://user:{SECRET}@h:1/0"
    assert run.redis_address == url
    assert SECRET not in repr(run)
    for path in folder.iterdir():
        assert SECRET not in path.read_text(), path


def test_a_password_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """Which variable is missing; and one source at most."""
    settings = settings_with(tmp_path, redis_url="redis://h:1/0", redis_password_env="NOT_SET_HERE")
    with pytest.raises(SettingsError, match="redis_password_env='NOT_SET_HERE' is not set"):
        create_run(settings, tmp_path / "a", "redis://h:1/0")
    with pytest.raises(SettingsError, match="one of them"):
        settings_with(
            tmp_path, redis_url="redis://h:1/0", redis_password_env="A", redis_password_file="b"
        )


def test_a_run_of_another_release_is_distinguished_from_an_edited_one(tmp_path: Path) -> None:
    """Who reads the run is not sent to look for an edit that was never made."""
    folder = tmp_path / "a"
    path, facts_path = folder / "settings.json", folder / "run.json"
    create_run(settings_with(tmp_path), folder, "redis://h:1/0")
    facts, tree = json.loads(facts_path.read_text()), json.loads(path.read_text())
    lacks_one = {**tree, "eval": {k: v for k, v in tree["eval"].items() if k != "every"}}
    has_another = {**tree, "eval": {**tree["eval"], "evry": 3}}
    for written, sentence in ((lacks_one, "with this one"), (has_another, "eval.evry")):
        path.write_text(json.dumps(written))
        facts_path.write_text(json.dumps({**facts, "digest": digest_of(written)}))
        with pytest.raises(SettingsError, match=f"another release.*{sentence}"):
            load_run_settings(folder)
    facts_path.write_text(json.dumps(facts))
    with pytest.raises(SettingsError, match="restart the run instead of editing it"):
        load_run_settings(folder)
