"""A run as a SkyPilot job group: `sky jobs launch FILE`.

One task holds Redis, the router, the archiver and the monitor, one the trainer, and each server and
each runner is a task of its own, so that a spot machine that is taken back is replaced alone. Tasks
of a group reach each other as TASK-NODE.GROUP. They share the run's folder in a bucket; Redis
writes its file on the disk of its machine. Secrets are declared and never written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.buffer.settings.deploy import Part
from outloop.engine.launch.deploy.files import as_yaml
from outloop.engine.launch.deploy.parts import (
    RANKS_MODULE,
    TRAINER_PORT,
    apart,
    fingerprint,
    gpus_of_server,
    gpus_of_trainer_node,
    has_archiver,
    has_monitor,
    num_servers,
    override_words,
    ranks_of_node,
    refuse_certificates,
    watched,
)

REDIS_PORT = 6379
ROUTER_PORT = 8000
SERVER_PORT = 30000
_RUNS = "/outloop-runs"
_KEYS = "/tmp/outloop-keys/keys.json"
_RUNNER_KEY = "/tmp/outloop-keys/runner"
_AGAIN_S = 5
"""Before an archiver or a monitor that ended is started again."""
PASSWORD_SECRET = "OUTLOOP_REDIS_PASSWORD"
KEYS_SECRET = "OUTLOOP_KEYS"
RUNNER_SECRET = "OUTLOOP_RUNNER_KEY"


def job_group(settings: Settings, config: Path, overrides: Sequence[str] = ()) -> str:
    """The text of the YAML file; it holds no secret.

    Args:
        config: the settings file; its folder is copied to every machine.
        overrides: `--set` values of the person who deploys.

    Raises:
        SettingsError: deploy.image or deploy.gpu_type is missing, the run's name is none for
            SkyPilot, or the settings bring a Redis of their own with a password in a file.
    """
    return as_yaml(_JobGroup(settings, config, overrides).documents())


class _JobGroup:
    def __init__(self, settings: Settings, config: Path, overrides: Sequence[str]) -> None:
        self.settings = settings
        self.name = settings.run.name
        refuse_certificates(settings)
        if settings.deploy.image is None:
            raise SettingsError(
                "deploy.image is missing; give the image that holds outloop in /opt/venv, as "
                "docker/Dockerfile makes it (docs/deploy.md)"
            )
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise SettingsError(
                f"run.name={self.name!r} becomes a host name; up to 40 lower-case letters, digits "
                "and hyphens are allowed, beginning with a letter"
            )
        needs_gpus = gpus_of_server(settings) or gpus_of_trainer_node(settings)
        if needs_gpus and settings.deploy.gpu_type is None:
            raise SettingsError(
                "deploy.gpu_type is missing; name the kind of GPU as `sky show-gpus` does, for "
                "example H100"
            )
        if settings.buffer.redis_password_file is not None:
            raise SettingsError(
                "buffer.redis_password_file is a file of this machine; leave it out, the password "
                f"is the secret {PASSWORD_SECRET}"
            )
        self.config = config
        self.has_redis = settings.buffer.redis_url is None
        url = f"redis://control-0.{self.name}:{REDIS_PORT}" if self.has_redis else None
        self.trainer_host = f"trainer-0.{self.name}"
        given = apart(settings, redis_url=url, trainer_host=self.trainer_host) | watched(settings)
        given |= {"run.dir": _RUNS, "run.keys_file": _KEYS, "env.import_dir": "."}
        if self.has_redis:
            given["buffer.redis_password_env"] = PASSWORD_SECRET
        if given.get("publish.transport") == "disk":
            # A bucket is slow, and what others wrote there is seen late.
            given |= {"publish.transport": "collective", "publish.host": self.trainer_host}
        self.sets = [f"--set={text}" for text in overrides] + override_words(given)
        mark = fingerprint(config.read_text(), *self.sets)
        self.mark = f"{_RUNS}/{self.name}/.made-{mark}"

    def documents(self) -> list[dict[str, Any]]:
        header = {
            "name": self.name,
            "execution": "parallel",
            "primary_tasks": ["trainer"],
            "termination_delay": "60s",
        }
        tasks = [self._control(), self._trainer()]
        tasks += [self._server(index) for index in range(num_servers(self.settings))]
        if self.settings.trainer.mode == "rl":
            tasks += [self._runner(index) for index in range(self.settings.env.num_runners)]
        return [header, *tasks]

    def _task(
        self,
        name: str,
        lines: Sequence[str],
        *,
        part: Part,
        secrets: Sequence[str],
        gpus: int = 0,
        num_nodes: int = 1,
        more_cpus: int = 0,
        more_memory_mb: int = 0,
    ) -> dict[str, Any]:
        deploy = self.settings.deploy
        given = deploy.resources(part)
        memory_mb = given.memory_mb + more_memory_mb
        resources: dict[str, Any] = {
            "cpus": f"{given.cpus + more_cpus}+",
            "memory": f"{-(-memory_mb // 1024)}+",
            "image_id": f"docker:{deploy.image}",
            "use_spot": part in deploy.spot and name != "control",
        }
        if gpus:
            resources["accelerators"] = f"{deploy.gpu_type}:{gpus}"
        head = ["set -eu", "umask 077", "export PATH=/opt/venv/bin:$PATH"]
        return {
            "name": name,
            "workdir": str(self.config.absolute().parent),
            "num_nodes": num_nodes,
            "resources": resources,
            "file_mounts": {_RUNS: {"name": f"outloop-{self.name}", "mode": "MOUNT_CACHED"}},
            "secrets": dict.fromkeys(secrets),
            "run": "\n".join([*head, *lines]) + "\n",
        }

    @property
    def _trusted(self) -> list[str]:
        return [KEYS_SECRET, *([PASSWORD_SECRET] if self.has_redis else [])]

    def _write(self, path: str, secret: str) -> list[str]:
        return [f"mkdir -p {Path(path).parent}", f'printf %s "${secret}" > {path}']

    def _wait(self) -> str:
        return f"until test -f {shlex.quote(self.mark)}; do sleep 2; done"

    def _control(self) -> dict[str, Any]:
        buffer, deploy = self.settings.buffer, self.settings.deploy
        beside = [deploy.resources("router")]
        lines = self._write(_KEYS, KEYS_SECRET)
        if self.has_redis:
            lines += [
                f'printf %s "${PASSWORD_SECRET}" > /tmp/outloop-keys/redis',
                f"outloop redis --dir ~/outloop-redis --host 0.0.0.0 --port {REDIS_PORT} "
                f"--password-file /tmp/outloop-keys/redis --fsync {buffer.fsync} "
                f"--max-memory-mb {buffer.max_memory_mb} &",
            ]
        make = shlex.join(["outloop", "init", self.config.name, *self.sets])
        lines += [
            f"for attempt in $(seq 30); do {make} && break; sleep 2; done",
            f"touch {shlex.quote(self.mark)}",
            f"outloop router --run {_RUNS}/{self.name} --port {ROUTER_PORT} "
            f"--advertise control-0.{self.name} &",
        ]
        watchers: list[tuple[Part, bool]] = [
            ("archiver", has_archiver(self.settings)),
            ("monitor", has_monitor(self.settings)),
        ]
        for part, is_wanted in watchers:
            if is_wanted:
                beside.append(deploy.resources(part))
                # The run goes on without it, so that its end is not that of Redis and router.
                command = f"outloop {part} --run {_RUNS}/{self.name}"
                lines.append(f"while true; do {command} || true; sleep {_AGAIN_S}; done &")
        # Redis or the router ended: SkyPilot starts all of them again.
        lines.append("wait -n")
        return self._task(
            "control",
            lines,
            part="redis",
            secrets=self._trusted,
            more_cpus=sum(given.cpus for given in beside),
            more_memory_mb=sum(given.memory_mb for given in beside),
        )

    def _trainer(self) -> dict[str, Any]:
        nodes = self.settings.deploy.trainer_nodes
        run = f"--run {_RUNS}/{self.name}"
        command = f"exec outloop trainer {run}"
        if nodes > 1:
            command = (
                f"exec python -m torch.distributed.run --nnodes={nodes} "
                f"--nproc-per-node={ranks_of_node(self.settings)} --rdzv-backend=c10d "
                f"--rdzv-id=trainer --rdzv-endpoint={self.trainer_host}:{TRAINER_PORT} "
                f"{' '.join(RANKS_MODULE)} trainer {run}"
            )
        return self._task(
            "trainer",
            [*self._write(_KEYS, KEYS_SECRET), self._wait(), command],
            part="trainer",
            secrets=self._trusted,
            gpus=gpus_of_trainer_node(self.settings),
            num_nodes=nodes,
        )

    def _server(self, index: int) -> dict[str, Any]:
        name = f"server-{index}"
        command = (
            f"exec outloop server --run {_RUNS}/{self.name} --index {index} --port {SERVER_PORT} "
            f"--advertise {name}-0.{self.name}"
        )
        return self._task(
            name,
            [*self._write(_KEYS, KEYS_SECRET), self._wait(), command],
            part="server",
            secrets=self._trusted,
            gpus=gpus_of_server(self.settings),
        )

    def _runner(self, index: int) -> dict[str, Any]:
        others = " ".join(self._trusted)
        return self._task(
            f"runner-{index}",
            [
                *self._write(_RUNNER_KEY, RUNNER_SECRET),
                # --secret gives every task of a group all secrets.
                f"unset {others} {RUNNER_SECRET}",
                self._wait(),
                f"exec outloop runner --run {_RUNS}/{self.name} "
                f"--router-url http://control-0.{self.name}:{ROUTER_PORT} "
                f"--runner-key-file {_RUNNER_KEY}",
            ],
            part="runner",
            secrets=[RUNNER_SECRET],
        )
