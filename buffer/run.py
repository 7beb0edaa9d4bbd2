"""What a process needs to join a run: the files of the run folder, settings and keys.

`settings.json` and `run.json` hold no secret that was given in a file; only the owner can read the
keys. A process with other settings than the run's cannot load it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.client import of_run
from outloop.buffer.redis.keys import hash_tag
from outloop.buffer.settings import Settings, build_settings, digest_of
from outloop.buffer.settings.buffer import BufferSettings, holds_password
from outloop.buffer.settings.section import Section
from outloop.buffer.whole_file import whole_file

TOKENIZER = "tokenizer.json"
"""In the folder of a model, and a copy in the folder of a run."""
HIDES_ALL = "*\n"
"""What .gitignore of a run's folder holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """The run's secrets; episode keys are derived from `episode_secret`."""

    runner_key: str
    admin_key: str
    episode_secret: str

    @property
    def server_key(self) -> str:
        """Bearer token of the run's own servers, derived from `episode_secret`."""
        return f"ol-server-{self._derived(b'outloop server key')}"

    @property
    def viewer_key(self) -> str:
        """Who has it may look at the run's page; derived from `episode_secret`."""
        return f"ol-viewer-{self._derived(b'outloop viewer key')[:32]}"

    def _derived(self, purpose: bytes) -> str:
        return hmac.new(self.episode_secret.encode(), purpose, hashlib.sha256).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a process needs to join: where the run lives, its settings, Redis and keys."""

    run_id: str
    dir: Path
    settings: Settings
    redis_url: str = field(repr=False)
    """redis://host:port/db or unix:///path/to/socket, with the password and the files of TLS; of a
    cluster with the hash tag of the run's keys."""
    keys: RunKeys = field(repr=False)

    @property
    def server_key(self) -> str | None:
        """Bearer token of this run's servers; None for attached servers without a key.

        Raises:
            SettingsError: server.api_key_file cannot be read.
        """
        server = self.settings.server
        if server.num_servers:
            return self.keys.server_key
        if server.api_key_file is None:
            return None
        return read_secret(server.api_key_file, "server.api_key_file")

    @property
    def keys_file(self) -> Path:
        """Where its keys are, as JSON."""
        return _keys_path(self.settings, self.dir)

    @property
    def redis_address(self) -> str:
        """`redis_url` without the password and the files of TLS, for logs and messages."""
        parts = urlsplit(self.redis_url)
        user, _, host = parts.netloc.rpartition("@")
        user = user.partition(":")[0]
        return parts._replace(netloc=f"{user}@{host}" if user else host, query="").geturl()


def create_run(settings: Settings, run_dir: Path, redis_url: str) -> Run:
    """Write the run's files and return its handle; an existing folder keeps its id and keys.

    The folder and what is written here are readable by their owner only.

    Raises:
        SettingsError: `redis_url` holds a password, or its file or variable is not there; or the
            folder cannot be written.
    """
    if holds_password(redis_url):
        raise SettingsError(
            "the URL of Redis holds a password; name its file as buffer.redis_password_file instead"
        )
    access = with_access(redis_url, settings.buffer)
    make_run_folder(settings, run_dir)
    run_path = run_dir / "run.json"
    if run_path.exists():
        run_id = json.loads(run_path.read_text())["run_id"]
    else:
        run_id = f"{settings.run.name}-{secrets.token_hex(4)}"
    keys = keep_keys(_keys_path(settings, run_dir))
    _keep_tokenizer(settings.model.path, run_dir)
    _write_private(run_dir / "settings.json", settings.model_dump_json(indent=1))
    facts = {"run_id": run_id, "redis_url": redis_url, "digest": settings.digest()}
    _write_private(run_path, json.dumps(facts))
    return Run(
        run_id=run_id,
        dir=run_dir,
        settings=settings,
        redis_url=of_run(access, hash_tag(run_id)),
        keys=keys,
    )


def _keep_tokenizer(model_path: Path, run_dir: Path) -> None:
    """Copy the policy's tokenizer, so that episodes can be read wherever the folder is."""
    source, kept = model_path / TOKENIZER, run_dir / TOKENIZER
    if source.is_file() and not kept.exists():
        with whole_file(kept) as writing:
            shutil.copyfile(source, writing)


def make_run_folder(settings: Settings, run_dir: Path) -> None:
    """Make the run's folder if needed: writable, and readable by its owner only.

    Raises:
        SettingsError: it cannot be made or written.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_dir.chmod(0o700)
        _write_private(run_dir / ".gitignore", HIDES_ALL)
    except OSError as error:
        raise SettingsError(
            f"run.dir={str(settings.run.dir)!r} run.name={settings.run.name!r}: the folder cannot "
            f"be written ({error}); give a run.dir that you may write"
        ) from error


def keep_keys(path: Path) -> RunKeys:
    """The keys in the file `path`; makes new ones (mode 0600) if there is no such file."""
    if path.exists():
        return RunKeys(**json.loads(path.read_text()))
    keys = RunKeys(
        runner_key="ol-runner-" + secrets.token_urlsafe(24),
        admin_key=_admin_key(),
        episode_secret=secrets.token_urlsafe(32),
    )
    _create_private(path, _keys_text(keys))
    return keys


def new_admin_key(run: Run) -> str:
    """Make an admin key and put it into the run's file of keys in place of the old one; routers
    that are up take it from `RunnerKeys.set_admin`.

    Raises:
        SettingsError: the file cannot be written.
    """
    path = _keys_path(run.settings, run.dir)
    key = _admin_key()
    try:
        _write_private(path, _keys_text(replace(run.keys, admin_key=key)))
    except OSError as error:
        raise SettingsError(
            f"the run's keys in {str(path)!r} cannot be written ({error}); where they are mounted, "
            "replace admin_key in what is mounted and start the run's parts again"
        ) from error
    return key


def _admin_key() -> str:
    return "ol-admin-" + secrets.token_urlsafe(24)


def _keys_text(keys: RunKeys) -> str:
    return json.dumps({name: getattr(keys, name) for name in RunKeys.__slots__})


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read; what was there stays until it is whole."""
    with whole_file(path) as writing:
        _create_private(writing, text)


def _create_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read.

    Raises:
        FileExistsError: it is there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def load_run(run_dir: Path) -> Run:
    """Join the run in `run_dir`.

    Raises:
        SettingsError: as load_run_settings, or the file of the run's keys or of the password of
            Redis is not there.
    """
    settings = load_run_settings(run_dir)
    facts = json.loads((run_dir / "run.json").read_text())
    found = with_found_paths(settings, run_dir)
    keys_path = _keys_path(found, run_dir)
    return Run(
        run_id=facts["run_id"],
        dir=run_dir,
        settings=settings,
        redis_url=of_run(with_access(facts["redis_url"], found.buffer), hash_tag(facts["run_id"])),
        keys=RunKeys(**json.loads(read_secret(keys_path, "run.keys_file"))),
    )


def load_run_settings(run_dir: Path) -> Settings:
    """The settings of the run in `run_dir`, for a process that needs neither Redis nor its keys.

    Raises:
        SettingsError: the folder is not a run, its settings were changed since it was started, or
            it was started by a release with other settings.
    """
    run_path = run_dir / "run.json"
    if not run_path.is_file():
        raise SettingsError(
            f"run folder run_dir={str(run_dir)!r} holds no run.json; start one with "
            "`outloop train CONFIG` or `outloop serve CONFIG`, or make one with "
            "`outloop init CONFIG`"
        )
    started_with = json.loads(run_path.read_text())["digest"]
    tree = json.loads((run_dir / "settings.json").read_text())
    if digest_of(tree) != started_with:
        raise SettingsError(
            f"run_dir={str(run_dir)!r}: settings.json has digest={digest_of(tree)[:12]}, the run "
            f"was started with digest={started_with[:12]}; restart the run instead of editing it"
        )
    other_release = (
        f"run_dir={str(run_dir)!r}: the run was started by another release of outloop, which had "
        "other settings. Use that release to look at the run, or start the run again with this one"
    )
    try:
        settings = build_settings(tree, source=str(run_dir / "settings.json"))
    except SettingsError as error:
        raise SettingsError(f"{other_release}. What does not fit: {error}") from error
    if settings.digest() != started_with:
        raise SettingsError(other_release)
    return settings


def with_found_paths(settings: Settings, run_dir: Path) -> Settings:
    """Return the settings of the run in `run_dir` for a process in any folder: relative paths are
    those of the folder in which the run was started, where the files are still there.

    The digest of the result may differ from the run's.
    """
    own = settings.run.dir / settings.run.name
    parts = run_dir.absolute().parts
    root = settings.env.import_dir
    if not own.is_absolute() and parts[-len(own.parts) :] == own.parts:
        root = Path(*parts[: -len(own.parts)])
    return settings if root is None else _found_from(settings, root)


_Table = TypeVar("_Table", bound=Section)


def _found_from(section: _Table, root: Path) -> _Table:
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            changed[name] = _found_from(value, root)
        elif isinstance(value, Path) and not value.is_absolute() and (root / value).exists():
            changed[name] = root / value
    return section.model_copy(update=changed)


def read_secret(path: Path, name: str) -> str:
    """The secret in a file, without surrounding white space; `name` is the setting of the path.

    Raises:
        SettingsError: it cannot be read, or is empty.
    """
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{name}={str(path)!r} cannot be read ({error}); mount the file there, readable by "
            "this process"
        ) from error
    if not text:
        raise SettingsError(f"{name}={str(path)!r} is empty; write the secret into it")
    return text


def _keys_path(settings: Settings, run_dir: Path) -> Path:
    return settings.run.keys_file or run_dir / "secrets.json"


def with_access(url: str, buffer: BufferSettings) -> str:
    """`url` with the password and the files of TLS that the settings name.

    Raises:
        SettingsError: the password's file or variable is not there.
    """
    files = {
        "ssl_ca_certs": buffer.redis_ca_file,
        "ssl_certfile": buffer.redis_cert_file,
        "ssl_keyfile": buffer.redis_cert_key_file,
    }
    options = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    if options:
        parts = urlsplit(url)
        query = "&".join(filter(None, (parts.query, urlencode(options))))
        url = parts._replace(query=query).geturl()
    password = _password(buffer)
    if password is None:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


def _password(buffer: BufferSettings) -> str | None:
    if buffer.redis_password_file is not None:
        return read_secret(buffer.redis_password_file, "buffer.redis_password_file")
    name = buffer.redis_password_env
    if name is None:
        return None
    if not (password := os.environ.get(name)):
        raise SettingsError(
            f"buffer.redis_password_env={name!r} is not set; set it in the environment of every "
            "process of the run, or use buffer.redis_password_file"
        )
    return password
