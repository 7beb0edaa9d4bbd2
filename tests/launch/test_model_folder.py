"""A policy that is named as a repository of the Hugging Face hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.model_hub import COMMIT, model_hub
from outloop.engine.models.random_init import Sizes, write_policy

RESOLVE = """
import sys
from pathlib import Path
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import load_settings
from outloop.engine.launch.model_folder import with_model_folder
try:
    print(with_model_folder(load_settings(Path("run.toml"))).model.model_dump_json())
except SettingsError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """It has one repository, acme/tiny, and one for those whom its owner admits."""
    folder = tmp_path / "repository"
    write_policy(folder, 0, (), Sizes(hidden_size=32, num_layers=1))
    (folder / "modeling.py").write_text("raise SystemExit('code of a repository was run')")
    with model_hub({"acme/tiny": folder}, gated=("acme/gated",)) as url:
        yield url


def resolve(
    folder: Path, endpoint: str, lines: str, *command: str
) -> subprocess.CompletedProcess[str]:
    """What a process with that hub makes of [model], or what `outloop command` says of it; its
    cache is in `folder`."""
    (folder / "run.toml").write_text(f'[run]\ndir = "runs"\n[model]\n{lines}\n')
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *(("-m", "outloop.cli", *command) if command else ("-c", RESOLVE))],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.medium
def test_a_repository_is_downloaded_once(hub: str, tmp_path: Path) -> None:
    """Into the cache, without its code; the settings name folder and commit. Later it needs no hub,
    and a run of that name keeps its commit. A folder of that name wins."""
    found = resolve(tmp_path, hub, 'path = "acme/tiny"')
    model = json.loads(found.stdout)
    assert (model["repository"], model["revision"]) == ("acme/tiny", COMMIT)
    folder = Path(model["path"])
    assert folder.is_relative_to(tmp_path / "cache")
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(os.listdir(folder))
    assert "modeling.py" not in os.listdir(folder)
    nobody = "http://127.0.0.1:9"
    assert json.loads(resolve(tmp_path, nobody, 'path = "acme/tiny"').stdout) == model
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    kept = {"model": {"repository": "acme/tiny", "revision": "f" * 40}}
    (run / "settings.json").write_text(json.dumps(kept))
    assert f"model.revision='{'f' * 40}'" in resolve(tmp_path, hub, 'path = "acme/tiny"').stderr
    (tmp_path / "acme/tiny").mkdir(parents=True)
    assert json.loads(resolve(tmp_path, hub, 'path = "acme/tiny"').stdout)["path"] == "acme/tiny"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('path = "acme/none"', ["neither a folder here nor a repository", "HF_TOKEN"]),
        ('path = "acme/gated"', ["ask for access at", "/acme/gated", "HF_TOKEN"]),
        ('path = "acme/tiny"\nrevision = "v9"', ["model.revision='v9'", "a branch, a tag"]),
        ('path = "/acme"\nrevision = "v9"', ["model.revision='v9' has no effect"]),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(
    lines: str, words: list[str], hub: str, tmp_path: Path
) -> None:
    """That names the repository and what to do."""
    found = resolve(tmp_path, hub, lines)
    assert found.returncode == 1
    assert lines.split('"')[1] in found.stderr
    assert [word for word in words if word not in found.stderr] == []
    assert len(found.stderr.strip().splitlines()) == 1


@pytest.mark.medium
def test_no_network_is_a_sentence(tmp_path: Path) -> None:
    """With the command for a machine that has one."""
    found = resolve(tmp_path, "http://127.0.0.1:9", 'path = "acme/tiny"')
    for words in ("'acme/tiny'", "cannot be reached", "hf download acme/tiny --local-dir DIR"):
        assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "code"),
    [("train", 2), ("serve", 2), ("init", 2), ("submit slurm", 2), ("doctor --config", 1)],
)
def test_a_command_begins_with_the_download(
    command: str, code: int, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused next is not the model, but a limit that its config.json says."""
    monkeypatch.setenv("COLUMNS", "800")
    lines = 'path = "acme/tiny"\nmax_context_tokens = 4096'
    found = resolve(tmp_path, hub, lines, *command.split(), "run.toml")
    assert found.returncode == code
    said = found.stderr + found.stdout
    assert "exceeds max_position_embeddings=512" in said
    assert f"{COMMIT}/config.json" in said


@pytest.mark.medium
def test_check_downloads_no_weights(hub: str, tmp_path: Path) -> None:
    """It names the commit whose sizes it counted."""
    found = resolve(tmp_path, hub, 'path = "acme/tiny"', "check", "run.toml")
    assert found.returncode == 0
    assert f"model: acme/tiny at {COMMIT}" in found.stdout
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
