"""A run as files for `kubectl apply -k`.

Routers, runners, archiver and monitor are Deployments, servers and Redis StatefulSets (a server is
known to the run by its number), the trainer is a JobSet, whose pods start and restart together. An
init Job makes the run in its folder and in Redis; every part waits for the mark that it leaves,
whose name changes with the settings. Nothing but the trainer ends when the run is finished, since
Kubernetes would start it again. Secrets are named, never written: `create_secrets.sh` makes them in
the cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from outloop.buffer.errors import RANK_KILLED_EXIT_CODE, SETTINGS_EXIT_CODE, SettingsError
from outloop.buffer.redis.client import ports_of
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

ROUTER_PORT = 8000
SERVER_PORT = 30000
REDIS_PORT = 6379
_USER = 10001
_RUNS = "/outloop/runs"
_CONFIG = "/etc/outloop/run.toml"
_PASSWORD = "/keys/redis/password"
_KEYS = "/keys/run/keys.json"
_RUNNER_KEY = "/keys/runner/key"
_WEBHOOK = "/keys/webhook/url"
_SPOT_TAINTS = (
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
    "karpenter.sh/capacity-type",
    "outloop/spot",
)
"""Of machines that the cloud takes back, on three clouds; the last is for clusters of your own."""
_TRUSTED = ("router", "server", "trainer", "init", "archiver", "monitor")
"""Parts that hold the run's keys and the password of Redis."""
_LEAVE_ENDPOINTS_S = 5
"""Between the notice and SIGTERM: by then no service sends new requests to the pod."""
_STOP_S = 15
_CHECKPOINT_S = 60
_MAX_RESTARTS = 1000
"""JobSet has no `without limit`."""
_FINAL_EXIT_CODES = (1, SETTINGS_EXIT_CODE, 3)
"""A trainer that failed, refused its settings or hung would do so again."""

assert RANK_KILLED_EXIT_CODE not in _FINAL_EXIT_CODES

Tree = dict[str, Any]


def kubernetes_files(
    settings: Settings, config: Path, overrides: Sequence[str] = ()
) -> dict[str, str]:
    """Names and texts of the folder's files; none holds a secret.

    Args:
        config: the settings file.
        overrides: `--set` values of the person who deploys.

    Raises:
        SettingsError: deploy.image is missing, or the run's name is none for Kubernetes.
    """
    return _Manifests(settings, config.read_text(), overrides).files()


class _Manifests:
    def __init__(self, settings: Settings, config: str, overrides: Sequence[str]) -> None:
        name = settings.run.name
        refuse_certificates(settings)
        if settings.deploy.image is None:
            raise SettingsError(
                "deploy.image is missing; give the image that holds outloop and, in /project, the "
                "folder of your settings file (docs/deploy.md)"
            )
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
            raise SettingsError(
                f"run.name={name!r} is no name for Kubernetes; up to 40 lower-case letters, digits "
                "and hyphens are allowed, beginning with a letter"
            )
        self.name = name
        self.settings = settings
        self.config = config
        self.has_redis = settings.buffer.redis_url is None
        self.is_sft = settings.trainer.mode != "rl"
        trainer_host = f"{name}-trainer-0-0.{name}"
        url = f"redis://{name}-redis:{REDIS_PORT}" if self.has_redis else None
        given = apart(settings, redis_url=url, trainer_host=trainer_host) | watched(settings)
        given |= {
            "run.dir": _RUNS,
            "run.keys_file": _KEYS,
            "env.import_dir": "/project",
            "deploy.image": settings.deploy.image,
        }
        if self.has_redis or settings.buffer.redis_password_file is not None:
            given["buffer.redis_password_file"] = _PASSWORD
        self.has_webhook = settings.alarms.enabled and settings.alarms.webhook_file is not None
        if self.has_webhook:
            given["alarms.webhook_file"] = _WEBHOOK
        port = given.get("telemetry.prometheus_port")
        self.page_port = port if isinstance(port, int) else None
        self.trainer_host = trainer_host
        self.sets = [f"--set={text}" for text in overrides] + override_words(given)
        mark = fingerprint(config, *self.sets)
        self.init_name = f"{name}-init-{mark}"
        self.mark = f"{_RUNS}/{name}/.made-{mark}"
        self.has_password = "buffer.redis_password_file" in given

    def files(self) -> dict[str, str]:
        documents: dict[str, list[Tree]] = {
            "run.yaml": [self._volume_claim(), self._init()],
            "router.yaml": [*self._router(), self._disruption("router")],
            "trainer.yaml": [self._trainer()],
            "network.yaml": self._policies(),
        }
        if self.has_redis:
            documents["redis.yaml"] = self._redis()
        if num_servers(self.settings):
            documents["server.yaml"] = [*self._server(), self._disruption("server")]
        if self.settings.env.num_runners and not self.is_sft:
            documents["runner.yaml"] = self._runner()
        if has_archiver(self.settings):
            documents["archiver.yaml"] = [self._archiver()]
        if has_monitor(self.settings):
            documents["monitor.yaml"] = self._monitor()
        kustomization: Tree = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": sorted(documents),
            "configMapGenerator": [{"name": f"{self.name}-config", "files": ["run.toml"]}],
        }
        texts = {name: as_yaml(items) for name, items in sorted(documents.items())}
        texts["kustomization.yaml"] = as_yaml([kustomization])
        texts["run.toml"] = self.config
        texts["create_secrets.sh"] = self._create_secrets()
        return texts

    # Pieces of every part.

    def _labels(self, part: str) -> Tree:
        return {"app.kubernetes.io/part-of": self.name, "app.kubernetes.io/component": part}

    def _meta(self, part: str, name: str | None = None) -> Tree:
        return {"name": name or f"{self.name}-{part}", "labels": self._labels(part)}

    def _selector(self, part: str) -> Tree:
        return {"matchLabels": self._labels(part)}

    def _container(self, part: str, command: Sequence[str], **more: Any) -> Tree:
        mounts: list[Tree] = [{"name": "tmp", "mountPath": "/tmp"}]
        if part != "redis":
            mounts.append({"name": "runs", "mountPath": _RUNS, "readOnly": part == "runner"})
        if part == "redis" or (part in _TRUSTED and self.has_password):
            mounts.append({"name": "redis-password", "mountPath": "/keys/redis", "readOnly": True})
        if part in _TRUSTED:
            mounts.append({"name": "run-keys", "mountPath": "/keys/run", "readOnly": True})
        if part in ("init", "monitor") and self.has_webhook:
            mounts.append({"name": "webhook", "mountPath": "/keys/webhook", "readOnly": True})
        if part == "runner":
            mounts.append({"name": "runner-key", "mountPath": "/keys/runner", "readOnly": True})
        mounts += more.pop("mounts", [])
        return {
            "name": part,
            "image": self.settings.deploy.image,
            "command": list(command),
            "workingDir": "/project",
            "env": [{"name": "HOME", "value": "/tmp"}, *more.pop("env", [])],
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            **more,
        }

    def _resources(self, part: Part, gpus: int = 0) -> Tree:
        given = self.settings.deploy.resources(part)
        requests: Tree = {"cpu": str(given.cpus), "memory": f"{given.memory_mb}Mi"}
        limits: Tree = {"memory": f"{given.memory_mb}Mi"}
        if gpus:
            limits["nvidia.com/gpu"] = str(gpus)
        return {"requests": requests, "limits": limits}

    def _pod(self, part: str, container: Tree, *, grace_s: float, waits: bool = True) -> Tree:
        volumes: list[Tree] = [{"name": "tmp", "emptyDir": {}}]
        if part != "redis":
            claim: Tree = {"claimName": f"{self.name}-runs"}
            volumes.append({"name": "runs", "persistentVolumeClaim": claim})
        for volume, suffix in (
            ("redis-password", "redis"),
            ("run-keys", "keys"),
            ("runner-key", "runner"),
            ("webhook", "webhook"),
        ):
            if any(mount["name"] == volume for mount in container["volumeMounts"]):
                secret = {"secretName": f"{self.name}-{suffix}", "defaultMode": 0o440}
                volumes.append({"name": volume, "secret": secret})
        spec: Tree = {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": int(grace_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        if part in self.settings.deploy.spot:
            spec["tolerations"] = [
                {"key": taint, "operator": "Exists", "effect": "NoSchedule"}
                for taint in _SPOT_TAINTS
            ]
        if waits:
            line = f"until test -f {shlex.quote(self.mark)}; do sleep 1; done"
            wait = self._container(part, ["sh", "-c", line])
            spec["initContainers"] = [wait | {"name": "wait-for-run"}]
        spec["containers"] = [container]
        spec["volumes"] = volumes
        return {"metadata": {"labels": self._labels(part)}, "spec": spec}

    def _service(self, part: str, port: int, *, headless: bool = False) -> Tree:
        spec: Tree = {
            "selector": self._labels(part),
            "ports": [{"name": part, "port": port, "targetPort": port}],
        }
        if headless:
            # Servers are entered in the run before they are ready for others.
            spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._meta(part), "spec": spec}

    def _disruption(self, part: str) -> Tree:
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": self._meta(part),
            "spec": {"maxUnavailable": 1, "selector": self._selector(part)},
        }

    # The run.

    def _volume_claim(self) -> Tree:
        deploy = self.settings.deploy
        spec: Tree = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{deploy.storage_gb}Gi"}},
        }
        if deploy.storage_class is not None:
            spec["storageClassName"] = deploy.storage_class
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": self._meta("runs"),
            "spec": spec,
        }

    def _init(self) -> Tree:
        make = shlex.join(["outloop", "init", _CONFIG, *self.sets])
        container = self._container(
            "init",
            ["sh", "-c", f"{make} && touch {shlex.quote(self.mark)}"],
            mounts=[{"name": "config", "mountPath": "/etc/outloop", "readOnly": True}],
            resources={"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        )
        pod = self._pod("init", container, grace_s=_STOP_S, waits=False)
        pod["spec"]["restartPolicy"] = "OnFailure"
        pod["spec"]["volumes"].append(
            {"name": "config", "configMap": {"name": f"{self.name}-config"}}
        )
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._meta("init", self.init_name),
            "spec": {"backoffLimit": 20, "template": pod},
        }

    # Parts.

    def _redis(self) -> list[Tree]:
        buffer = self.settings.buffer
        command = [
            *("outloop", "redis", "--dir=/data", "--host=0.0.0.0", f"--port={REDIS_PORT}"),
            *(f"--password-file={_PASSWORD}", f"--fsync={buffer.fsync}"),
            f"--max-memory-mb={buffer.max_memory_mb}",
        ]
        probe = {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 5}
        container = self._container(
            "redis",
            command,
            ports=[{"name": "redis", "containerPort": REDIS_PORT}],
            readinessProbe=probe,
            startupProbe=probe | {"failureThreshold": 120},
            livenessProbe=probe | {"failureThreshold": 6},
            resources=self._resources("redis"),
            mounts=[{"name": "data", "mountPath": "/data"}],
        )
        storage = f"{max(1, 4 * buffer.max_memory_mb // 1024)}Gi"
        claim = {
            "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": storage}},
            },
        }
        return [
            self._service("redis", REDIS_PORT),
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": self._meta("redis"),
                "spec": {
                    "replicas": 1,
                    "serviceName": f"{self.name}-redis",
                    "selector": self._selector("redis"),
                    "template": self._pod("redis", container, grace_s=_STOP_S * 2, waits=False),
                    "volumeClaimTemplates": [claim],
                },
            },
        ]

    def _router(self) -> list[Tree]:
        router = self.settings.router
        environment = [
            {"name": upstream.api_key_env, "valueFrom": self._secret_of(upstream.api_key_env)}
            for upstream in router.upstreams.values()
            if upstream.api_key_env is not None
        ]
        container = self._container(
            "router",
            [
                *("outloop", "router", f"--run={_RUNS}/{self.name}", f"--port={ROUTER_PORT}"),
                "--advertise=$(POD_IP)",
            ],
            env=[_POD_IP, *environment],
            ports=[{"name": "router", "containerPort": ROUTER_PORT}],
            startupProbe=_probe("/health", ROUTER_PORT, failureThreshold=60),
            livenessProbe=_probe("/health", ROUTER_PORT, failureThreshold=6),
            readinessProbe=_probe("/ready", ROUTER_PORT, failureThreshold=1),
            lifecycle={"preStop": {"exec": {"command": ["sleep", str(_LEAVE_ENDPOINTS_S)]}}},
            resources=self._resources("router"),
        )
        grace_s = _LEAVE_ENDPOINTS_S + router.drain_timeout_s + _STOP_S
        return [
            self._service("router", ROUTER_PORT),
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": self._meta("router"),
                "spec": {
                    "replicas": router.num_processes,
                    "selector": self._selector("router"),
                    "template": self._pod("router", container, grace_s=grace_s),
                },
            },
        ]

    def _secret_of(self, variable: str) -> Tree:
        return {"secretKeyRef": {"name": f"{self.name}-environment", "key": variable}}

    def _server(self) -> list[Tree]:
        server = self.settings.server
        line = (
            'exec outloop server --index "${POD_NAME##*-}" '
            f'--run {_RUNS}/{self.name} --port {SERVER_PORT} --advertise "$POD_IP"'
        )
        more: Tree = {}
        if server.num_servers:
            more = {
                "ports": [{"name": "server", "containerPort": SERVER_PORT}],
                "startupProbe": _probe(
                    "/health", SERVER_PORT, failureThreshold=int(server.start_timeout_s / 5) + 1
                ),
                "livenessProbe": _probe("/health", SERVER_PORT, failureThreshold=12),
                "readinessProbe": _probe("/health", SERVER_PORT, failureThreshold=2),
            }
        container = self._container(
            "server",
            ["sh", "-c", line],
            env=[_POD_NAME, _POD_IP],
            # It leaves the run's registry at SIGTERM, and routers go on with its turns elsewhere.
            lifecycle={"preStop": {"exec": {"command": ["sleep", "1"]}}},
            resources=self._resources("server", gpus_of_server(self.settings)),
            **more,
        )
        return [
            self._service("server", SERVER_PORT, headless=True),
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": self._meta("server"),
                "spec": {
                    "replicas": num_servers(self.settings),
                    "serviceName": f"{self.name}-server",
                    "podManagementPolicy": "Parallel",
                    "selector": self._selector("server"),
                    "template": self._pod("server", container, grace_s=_STOP_S * 2),
                },
            },
        ]

    def _trainer(self) -> Tree:
        nodes = self.settings.deploy.trainer_nodes
        command = ["outloop", "trainer", f"--run={_RUNS}/{self.name}"]
        ports = []
        if nodes > 1:
            command = [
                *("python", "-m", "torch.distributed.run", f"--nnodes={nodes}"),
                f"--nproc-per-node={ranks_of_node(self.settings)}",
                *("--rdzv-backend=c10d", "--rdzv-id=trainer"),
                f"--rdzv-endpoint={self.trainer_host}:{TRAINER_PORT}",
                *(*RANKS_MODULE, *command[1:]),
            ]
            ports = [{"name": "ranks", "containerPort": TRAINER_PORT}]
        container = self._container(
            "trainer",
            command,
            resources=self._resources("trainer", gpus_of_trainer_node(self.settings)),
            mounts=[{"name": "shared-memory", "mountPath": "/dev/shm"}],
            **({"ports": ports} if ports else {}),
        )
        grace_s = max(self.settings.deploy.notice_s, _CHECKPOINT_S + _STOP_S)
        pod = self._pod("trainer", container, grace_s=grace_s)
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"]["volumes"].append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        final = {
            "containerName": "trainer",
            "operator": "In",
            "values": sorted(_FINAL_EXIT_CODES),
        }
        job = {
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "parallelism": nodes,
            "completions": nodes,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
            "template": pod,
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._meta("trainer", self.name),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": self.name},
                "failurePolicy": {
                    "maxRestarts": _MAX_RESTARTS,
                    "rules": [
                        {
                            "name": "failed",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [{"name": "trainer", "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _runner(self) -> list[Tree]:
        env, deploy = self.settings.env, self.settings.deploy
        names = env.agent_environment
        container = self._container(
            "runner",
            [
                *("outloop", "runner", f"--run={_RUNS}/{self.name}"),
                f"--router-url=http://{self.name}-router:{ROUTER_PORT}",
                f"--runner-key-file={_RUNNER_KEY}",
                "--wait-when-finished",
            ],
            env=[{"name": name, "valueFrom": self._secret_of(name)} for name in names],
            resources=self._resources("runner"),
        )
        return [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": self._meta("runner"),
                "spec": {
                    # The autoscaler's to change: a count here would undo it at every apply.
                    "selector": self._selector("runner"),
                    "template": self._pod("runner", container, grace_s=_STOP_S * 2),
                },
            },
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": self._meta("runner"),
                "spec": {
                    "scaleTargetRef": {
                        "apiVersion": "apps/v1",
                        "kind": "Deployment",
                        "name": f"{self.name}-runner",
                    },
                    "minReplicas": env.num_runners,
                    "maxReplicas": max(deploy.max_runners or 4 * env.num_runners, env.num_runners),
                    "metrics": [
                        {
                            "type": "Resource",
                            "resource": {
                                "name": "cpu",
                                "target": {"type": "Utilization", "averageUtilization": 70},
                            },
                        }
                    ],
                },
            },
        ]

    # What looks at the run, without which it goes on.

    def _archiver(self) -> Tree:
        container = self._container(
            "archiver",
            ["outloop", "archiver", f"--run={_RUNS}/{self.name}"],
            resources=self._resources("archiver"),
        )
        return self._single("archiver", container)

    def _monitor(self) -> list[Tree]:
        more: Tree = {}
        if self.page_port is not None:
            more = {
                "ports": [{"name": "monitor", "containerPort": self.page_port}],
                "readinessProbe": _probe("/metrics", self.page_port, failureThreshold=2),
            }
        container = self._container(
            "monitor",
            ["outloop", "monitor", f"--run={_RUNS}/{self.name}"],
            resources=self._resources("monitor"),
            **more,
        )
        found = [self._single("monitor", container)]
        if self.page_port is not None:
            found.insert(0, self._service("monitor", self.page_port))
        return found

    def _single(self, part: Literal["archiver", "monitor"], container: Tree) -> Tree:
        """A Deployment of one pod: the old one ends before a new one starts."""
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": self._meta(part),
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": self._selector(part),
                "template": self._pod(part, container, grace_s=_STOP_S * 2),
            },
        }

    # Who reaches whom.

    def _policies(self) -> list[Tree]:
        redis = _port(REDIS_PORT)
        router, server = _port(ROUTER_PORT), _port(SERVER_PORT)
        weights = self.settings.publish.transport == "collective"
        to_redis: Tree = {"to": [self._peer("redis")], "ports": [redis]}
        if (url := self.settings.buffer.redis_url) is not None:
            # Its name is in the settings; which addresses that means is not known here.
            to_redis = {"ports": [_port(port) for port in ports_of(url)]}
        dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
        # The group of a broadcast and the ranks' own connections take any free port.
        to_trainer: list[Tree] = [{"to": [self._peer("trainer")]}] if weights else []
        from_server: list[Tree] = [{"from": [self._peer("server")]}] if weights else []
        both = [{"to": [self._peer("server")]}] if weights else []
        to_server: Tree = {"to": [self._peer("server")], "ports": [server]}
        anywhere: list[Tree] = [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]
        elsewhere: list[Tree] = []
        if self.settings.router.upstreams or self.settings.server.urls:
            elsewhere = anywhere
        peers: Tree = {"to": [self._peer("router")], "ports": [router]}
        outside = elsewhere if self.settings.server.urls else []
        rules: dict[str, tuple[list[Tree], list[Tree]]] = {
            "init": ([], [dns, to_redis]),
            "router": (
                [{"from": [self._peer("runner"), self._peer("router")], "ports": [router]}],
                [dns, to_redis, to_server, peers, *elsewhere],
            ),
            "server": (
                [
                    {"from": [self._peer("router"), self._peer("trainer")], "ports": [server]},
                    *([{"from": [self._peer("trainer")]}] if weights else []),
                ],
                [dns, to_redis, *to_trainer, *outside],
            ),
            "trainer": (
                [{"from": [self._peer("trainer")]}, *from_server],
                [dns, to_redis, to_server, *both, {"to": [self._peer("trainer")]}, *outside],
            ),
            "runner": ([], [dns, peers]),
        }
        if has_archiver(self.settings):
            rules["archiver"] = ([], [dns, to_redis])
        if has_monitor(self.settings):
            page: list[Tree] = []
            if self.page_port is not None:
                # Prometheus mostly has a namespace of its own.
                page = [{"from": [{"namespaceSelector": {}}], "ports": [_port(self.page_port)]}]
            rules["monitor"] = (page, [dns, to_redis, *(anywhere if self.has_webhook else [])])
        if self.has_redis:
            users = [self._peer(part) for part in _TRUSTED if part in rules]
            rules["redis"] = (
                [{"from": users, "ports": [redis]}],
                [],
            )
        return [
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": self._meta(part),
                "spec": {
                    "podSelector": self._selector(part),
                    "policyTypes": ["Ingress", "Egress"],
                    "ingress": incoming,
                    "egress": outgoing,
                },
            }
            for part, (incoming, outgoing) in rules.items()
        ]

    def _peer(self, part: str) -> Tree:
        return {"podSelector": self._selector(part)}

    # Secrets.

    def _create_secrets(self) -> str:
        names: dict[str, None] = {}
        for upstream in self.settings.router.upstreams.values():
            if upstream.api_key_env is not None:
                names[upstream.api_key_env] = None
        if not self.is_sft:
            names |= dict.fromkeys(self.settings.env.agent_environment)
        environment = ""
        if names:
            words = " ".join(f'--from-file={name}=<(printf %s "${name}")' for name in names)
            environment = f"create {self.name}-environment {words}\n"
        redis = ""
        if self.has_redis:
            redis = f'create {self.name}-redis --from-file=password=<(printf %s "$(secret)")\n'
        elif self.has_password:
            redis = (
                f"create {self.name}-redis --from-file=password="
                '"${REDIS_PASSWORD_FILE:?give the file with the password of Redis}"\n'
            )
        webhook = ""
        if self.has_webhook:
            webhook = (
                f"create {self.name}-webhook --from-file=url="
                '"${ALARM_WEBHOOK_FILE:?give the file with the URL that alarms are posted to}"\n'
            )
        return _SECRETS.format(
            name=self.name, redis=redis, webhook=webhook, environment=environment
        )


_POD_IP: Tree = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
_POD_NAME: Tree = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
_SECRETS = """\
#!/usr/bin/env bash
# Makes the secrets of the run {name} in the cluster; those that are there are kept. Arguments are
# for kubectl, for example --namespace NAME. Nothing is written to a file or a command line.
set -euo pipefail
options=("$@")
secret() {{ head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; }}
create() {{
    kubectl "${{options[@]}}" get secret "$1" > /dev/null 2>&1 ||
        kubectl "${{options[@]}}" create secret generic "$@"
}}
runner_key=ol-runner-$(secret)
keys='{{"runner_key": "%s", "admin_key": "%s", "episode_secret": "%s"}}'
if ! kubectl "${{options[@]}}" get secret {name}-keys > /dev/null 2>&1; then
    create {name}-runner --from-file=key=<(printf %s "$runner_key")
    create {name}-keys \\
        --from-file=keys.json=<(printf "$keys" "$runner_key" "ol-admin-$(secret)" "$(secret)")
fi
{redis}{webhook}{environment}"""


def _probe(path: str, port: int, *, failureThreshold: int) -> Tree:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failureThreshold,
    }


def _port(number: int) -> Tree:
    return {"protocol": "TCP", "port": number}
