"""Reads a Harbor task folder; refuses what would mean something else here.

Fields as of Harbor's task format 1.x. A field is supported, or has no effect on an attempt's score,
or is refused with its name: a task that is played otherwise than its author meant gives wrong
rewards without a word.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from outloop.buffer.errors import SettingsError

APP = PurePosixPath("/app")
_DEFAULT_TIMEOUT_S = 600.0
_IGNORED = {
    "": {"version", "schema_version", "metadata", "task", "source", "solution", "artifacts"},
    "agent": set[str](),
    "verifier": set[str](),
    "environment": {"build_timeout_sec", "cpus", "storage", "storage_mb"},
}
"""What has no effect on a score. The sandbox has limits of its own for processors and disk."""
_SUPPORTED = {
    "": {"agent", "verifier", "environment"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env"},
    "environment": {"memory", "memory_mb", "env"},
}
_ONLY: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("", "steps"): ([],),
    ("agent", "user"): ("root",),
    ("verifier", "user"): ("root",),
    ("verifier", "environment_mode"): ("shared",),
    ("environment", "allow_internet"): (False,),
    ("environment", "network_mode"): ("no-network",),
    ("environment", "gpus"): (0,),
    ("environment", "gpu_types"): ([],),
    ("environment", "os"): ("linux",),
    ("environment", "workdir"): (str(APP),),
    ("environment", "mcp_servers"): ([],),
}
"""Fields of which one value means what the sandbox does."""
_HARMLESS = {"cmd", "label", "expose", "maintainer"}
"""Instructions of a Dockerfile that change nothing for the programs in the container."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNREAD = ("docker-compose.yaml", "docker-compose.yml", ".dockerignore")


def read_task(folder: Path) -> dict[str, Any]:
    """The fields of the task in `folder`.

    Raises:
        SettingsError: it lacks a file, is malformed, or asks for what the sandbox does not do.
    """
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
        _check_fields(settings)
        seconds = {
            part: _number(settings, part, "timeout_sec", _DEFAULT_TIMEOUT_S)
            for part in ("agent", "verifier")
        }
        environment = _variables(settings, "environment")
        files, variables = _image(folder / "environment")
        if not (folder / "tests/test.sh").is_file():
            raise ValueError("tests/test.sh is missing")
        if (folder / "tests/Dockerfile").exists():
            raise ValueError("tests/Dockerfile: images are not built here")
        return {
            "folder": str(folder),
            "instruction": instruction,
            "agent_timeout_s": seconds["agent"],
            "verifier_timeout_s": seconds["verifier"],
            "memory_mb": _memory_mb(settings),
            "deadline_s": seconds["agent"] + seconds["verifier"],
            "files": files,
            "variables": variables | environment,
            "test_variables": _variables(settings, "verifier"),
        }
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"Harbor task {str(folder)!r}: {error}; play it by Harbor's own runner against the "
            "episode's endpoint (outloop.envs.adapters.remote_episodes), or change the task"
        ) from error


def _check_fields(settings: Mapping[str, Any]) -> None:
    for part in _SUPPORTED:
        table = settings.get(part, {}) if part else settings
        if not isinstance(table, dict):
            raise ValueError(f"{part}={table!r}; a table is allowed")
        for name, value in table.items():
            field = f"{part}.{name}" if part else name
            if name in _SUPPORTED[part] | _IGNORED[part]:
                continue
            # Compared with its type: False is 0 to Python.
            allowed = _ONLY.get((part, name), ())
            if any(type(value) is type(one) and value == one for one in allowed):
                continue
            sentence = f"{allowed[0]!r} is allowed" if allowed else "the sandbox does not do this"
            raise ValueError(f"task.toml: {field}={value!r}; {sentence}")


def _number(settings: Mapping[str, Any], part: str, name: str, default: float) -> float:
    value = settings.get(part, {}).get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"task.toml: {part}.{name}={value!r}; a number is allowed")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"task.toml: {part}.{name}={value!r}; a number above 0 is allowed")
    return float(value)


def _memory_mb(settings: Mapping[str, Any]) -> float:
    older = settings.get("environment", {}).get("memory")
    if older is None:
        return _number(settings, "environment", "memory_mb", 2048)
    read = re.fullmatch(r"([0-9]+)([MG])i?B?", str(older))
    if read is None:
        raise ValueError(f"task.toml: environment.memory={older!r}; '2G' or '512M' is allowed")
    return float(read[1]) * (1024 if read[2] == "G" else 1)


def _variables(settings: Mapping[str, Any], part: str) -> dict[str, str]:
    found = settings.get(part, {}).get("env", {})
    if not isinstance(found, dict):
        raise ValueError(f"task.toml: {part}.env={found!r}; a table is allowed")
    for name, value in found.items():
        _check_variable(f"task.toml: {part}.env.", name, value)
    return dict(found)


def _check_variable(place: str, name: str, value: object) -> None:
    if not _NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{place}{name}={value!r}; a name and a text are allowed")
    if "$" in value:
        raise ValueError(f"{place}{name}={value!r}; a text without $, which is not replaced here")


def _image(environment: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a Dockerfile puts into /app, path -> path below `environment`, and its variables.

    Without a Dockerfile: all files.
    """
    for name in _UNREAD:
        if (environment / name).exists():
            raise ValueError(f"environment/{name} is not read here")
    dockerfile = environment / "Dockerfile"
    if not dockerfile.is_file():
        return {name: name for name in _below(environment)}, {}
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    folder: PurePosixPath | None = None
    num_stages = 0
    text = re.sub(r"^\s*#.*\n?", "", dockerfile.read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        kind, rest = instruction.lower(), rest.strip()
        place = f"environment/Dockerfile: {line.strip()!r}"
        if kind == "from":
            num_stages += 1
        elif kind == "workdir":
            folder = PurePosixPath(rest)
        elif kind == "env":
            variables |= _env(rest, place)
        elif kind == "copy":
            files |= _copy(environment, rest, folder, place)
        elif kind and kind not in _HARMLESS and not (kind == "user" and rest == "root"):
            raise ValueError(f"{place}; images are not built here")
        if num_stages > 1 or folder not in (None, APP):
            raise ValueError(f"{place}; one FROM, and WORKDIR {APP}, are allowed")
    return files, variables


def _env(rest: str, place: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the older form: ENV NAME VALUE
        words = ["=".join(rest.split(None, 1))]
    found = {}
    for word in words:
        name, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{place}; ENV NAME=VALUE is allowed")
        _check_variable(f"{place}: ", name, value)
        found[name] = value
    return found


def _copy(environment: Path, rest: str, folder: PurePosixPath | None, place: str) -> dict[str, str]:
    words = shlex.split(rest)
    if len(words) < 2 or rest.startswith("[") or any("$" in word for word in words):
        raise ValueError(f"{place}; COPY NAME... FOLDER is allowed")
    if any(word.startswith("--") for word in words):
        raise ValueError(f"{place}; COPY without options is allowed")
    *sources, target = words
    at = _normal(PurePosixPath(folder or "/") / target)
    if at != APP and APP not in at.parents:
        raise ValueError(f"{place}; a target in {APP} is allowed")
    is_folder = target.endswith("/") or target in (".", "./") or at == APP or len(sources) > 1
    copied: dict[str, str] = {}
    for source in sources:
        name = str(_normal(PurePosixPath("/") / source).relative_to("/"))
        path = environment / name
        if path.is_dir():
            names = {str(at / below): f"{name}/{below}" for below in _below(path)}
        elif path.is_file():
            names = {str(at / path.name if is_folder else at): name}
        else:
            raise ValueError(f"{place}; environment/ has no {source!r}")
        copied |= {
            str(PurePosixPath(put).relative_to(APP)): str(PurePosixPath(taken))
            for put, taken in names.items()
        }
    return copied


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return PurePosixPath("/", *parts)


def _below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.glob("**/*")) if path.is_file()]


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The files below `folder`: path -> (mode, content)."""
    return {name: file_at(folder / name) for name in _below(folder)}


def file_at(path: Path) -> tuple[int, bytes]:
    """A file's mode and content."""
    return path.stat().st_mode & 0o777, path.read_bytes()
