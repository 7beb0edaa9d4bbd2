"""The folder of the policy: one of this machine, or a repository of the Hugging Face hub.

A repository is downloaded once, into huggingface_hub's own cache, before anything is started. What
comes back names the folder and the commit, so that a run's settings say which weights it began
with. Only tensors, configuration and tokenizer are downloaded, no code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings, build_settings
from outloop.engine.launch.known_models import KNOWN_CONFIGS

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
_CONFIGURATION = ("config.json", "tokenizer_config.json", "generation_config.json")
_NOT_BELOW = ("*/*",)
"""Other formats of the same weights lie in folders of the repository."""


def repository_of(path: Path) -> str | None:
    """The repository that `model.path` names; None where it can only be a folder.

    A folder that is there wins, and so does a path into a folder that is there.
    """
    name = path.as_posix()
    is_folder = path.exists() or path.parent.exists()
    return None if is_folder or not _REPOSITORY.fullmatch(name) else name


def with_model_folder(settings: Settings, *, with_weights: bool = True) -> Settings:
    """`settings` with the folder of the policy as model.path, downloaded if it is a repository.

    A run that goes on keeps the commit that it began with.

    Args:
        with_weights: False: only what describes the model is downloaded.

    Raises:
        SettingsError: there is no such repository or revision, it may not be read, or it is not in
            the cache and the hub cannot be reached.
    """
    model = settings.model
    repository = repository_of(model.path)
    if repository is None:
        if model.revision is not None and model.repository is None:
            raise SettingsError(
                f"model.revision={model.revision!r} has no effect: model.path={str(model.path)!r} "
                "is no repository of the Hugging Face hub; leave it out"
            )
        return settings
    revision = model.revision or _revision_of_run(settings, repository)
    patterns = _WEIGHTS if with_weights else _CONFIGURATION
    folder = download(repository, revision, patterns)
    tree = settings.model_dump(mode="json")
    tree["model"] |= {"path": str(folder), "repository": repository, "revision": folder.name}
    return build_settings(tree, source="model.path")


def download(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The snapshot of a repository in huggingface_hub's cache, named by its commit.

    Raises:
        SettingsError: as with_model_folder.
    """
    # Hundreds of milliseconds, which only a run with a repository has to spend.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named, hub = f"model.path={repository!r}", constants.ENDPOINT
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_NOT_BELOW),
            )
        )
    except GatedRepoError as error:
        raise SettingsError(
            f"{named}: {hub} gives this repository only to those whom its owner admits; ask for "
            f"access at {hub}/{repository}, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise SettingsError(
            f"{named} is neither a folder here nor a repository that {hub} shows; check the name, "
            "and for a private repository run `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SettingsError(
            f"{named} has no model.revision={revision!r} at {hub}; give a branch, a tag or a "
            "commit of it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise SettingsError(
            f"{named} is no folder here and not in the cache {constants.HF_HUB_CACHE}, and {hub} "
            "cannot be reached. Give this machine a network (HTTPS_PROXY, HF_ENDPOINT; "
            f"HF_HUB_OFFLINE unset), or run `hf download {repository} --local-dir DIR` where there "
            "is one and set model.path to the folder"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise SettingsError(
            f"{named}: {hub} answered status={status}; try again later, or check the token "
            "(`hf auth whoami`)"
        ) from error
    except OSError as error:
        raise SettingsError(
            f"{named} could not be downloaded from {hub} into {constants.HF_HUB_CACHE} ({error}); "
            "restore the connection or make room there (HF_HOME names another folder)"
        ) from error


def _revision_of_run(settings: Settings, repository: str) -> str | None:
    """The commit that a run of this name began with; None: it begins now."""
    try:
        path = settings.run.dir / settings.run.name / "settings.json"
        model = json.loads(path.read_text())["model"]
    except (OSError, ValueError, KeyError):
        return None
    return model.get("revision") if model.get("repository") == repository else None


def read_model_config(settings: Settings) -> tuple[dict[str, Any], str]:
    """The policy's config.json and where it came from: its folder, `KNOWN_CONFIGS`, or the hub.

    Raises:
        SettingsError: it cannot be read, or as with_model_folder.
    """
    model = settings.model
    repository = repository_of(model.path)
    if repository is not None and repository in KNOWN_CONFIGS and model.revision is None:
        return dict(KNOWN_CONFIGS[repository]), f"{repository}, sizes built in"
    model = with_model_folder(settings, with_weights=False).model
    path = model.path / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model.path={str(model.path)!r}: config.json cannot be read ({error}); give a Hugging "
            'Face folder, or a repository such as "Qwen/Qwen3-8B"'
        ) from error
    return found, f"{model.repository} at {model.revision}" if model.repository else str(path)
