"""The files for Kubernetes: against the published schemas, and what parts need of each other."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fakes.torchrun_words import program_of
from outloop.buffer.errors import SettingsError
from outloop.buffer.run import keep_keys
from outloop.buffer.settings import Settings, load_settings
from outloop.cli import cli
from outloop.engine.launch.deploy.kubernetes import kubernetes_files

Tree = dict[str, Any]
Written = Callable[..., tuple[Settings, Path]]


def objects(files: dict[str, str]) -> dict[tuple[str, str], Tree]:
    """By kind and name."""
    found = {}
    for name, text in files.items():
        if name.endswith(".yaml") and name != "kustomization.yaml":
            for item in yaml.safe_load_all(text):
                found[item["kind"], item["metadata"]["name"]] = item
    return found


def pod_of(item: Tree) -> Tree:
    """The pod's specification in an object that makes pods."""
    if item["kind"] == "JobSet":
        (replicated,) = item["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"]
    return item["spec"]["template"]["spec"]


PARTS = {
    "redis": ("StatefulSet", "walk-redis"),
    "router": ("Deployment", "walk-router"),
    "server": ("StatefulSet", "walk-server"),
    "trainer": ("JobSet", "walk"),
    "runner": ("Deployment", "walk-runner"),
    "archiver": ("Deployment", "walk-archiver"),
    "monitor": ("Deployment", "walk-monitor"),
}


def init_words(found: dict[tuple[str, str], Tree]) -> list[str]:
    """The words of `outloop init` in the init Job."""
    init = next(item for (kind, _), item in found.items() if kind == "Job")
    line = pod_of(init)["containers"][0]["command"][2]
    return shlex.split(line.partition(" && ")[0])


@pytest.fixture
def cluster(written: Written) -> dict[tuple[str, str], Tree]:
    """Every object of the run."""
    settings, config = written()
    return objects(kubernetes_files(settings, config))


@pytest.mark.medium
@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_every_object_follows_the_published_schema(
    written: Written, version: str, transport: str
) -> None:
    """Strictly: a field that does not exist is an error. A JobSet's job is held as a Job."""
    page = "telemetry.prometheus_port=0"
    settings, config = written(f"publish.transport={transport}", page)
    found = objects(kubernetes_files(settings, config))
    assert len(found) > 20
    for item in found.values():
        if item["kind"] == "JobSet":
            job = item["spec"]["replicatedJobs"][0]["template"]
            item = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "t"}, **job}
        kubernetes_validate.validate(item, version, strict=True)


def test_the_jobset_restarts_its_pods_together(cluster: dict[tuple[str, str], Tree]) -> None:
    """The fields of jobset.x-k8s.io/v1alpha2 that are used, and the ranks' way to each other."""
    jobset = cluster[PARTS["trainer"]]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = jobset["spec"]
    assert set(spec) == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "walk"}
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (1, 2, 2)
    assert job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    assert "--rdzv-endpoint=walk-trainer-0-0.walk:29500" in container["command"]
    assert "--nproc-per-node=4" in container["command"]
    assert program_of(container["command"])[:2] == ["outloop.cli", "trainer"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_every_part_has_the_files_that_its_command_names(
    cluster: dict[tuple[str, str], Tree],
) -> None:
    """Volumes exist, and the run's folder, the password and the keys are where they are read."""
    for part, key in PARTS.items():
        pod = pod_of(cluster[key])
        volumes = {volume["name"] for volume in pod["volumes"]}
        claims = cluster[key]["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes
            command = shlex.join(container["command"])
            for path in re.findall(r"/(?:keys|outloop|data)[a-z/]*", command):
                assert any(path.startswith(where) for where in mounts.values()), (part, path)
    init = next(item for (kind, _), item in cluster.items() if kind == "Job")
    (container,) = pod_of(init)["containers"]
    for path in ("/keys/redis", "/keys/run", "/etc/outloop", "/outloop/runs"):
        assert path in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.medium
def test_what_init_is_given_are_settings(written: Written, tmp_path: Path) -> None:
    """The flags of the init Job load, and lead where services and volumes are."""
    settings, config = written("trainer.num_steps=7", "publish.transport=collective")
    files = kubernetes_files(settings, config, ("trainer.num_steps=7",))
    words = init_words(objects(files))
    assert words[:3] == ["outloop", "init", "/etc/outloop/run.toml"]
    (tmp_path / "again.toml").write_text(files["run.toml"])
    sets = tuple(word.removeprefix("--set=") for word in words[3:])
    loaded = load_settings(tmp_path / "again.toml", (*sets, "publish.transport=collective"))
    assert loaded.trainer.num_steps == 7
    assert loaded.buffer.redis_url == "redis://walk-redis:6379"
    assert ("Service", "walk-redis") in objects(files)
    assert loaded.publish.host == "walk-trainer-0-0.walk"
    assert (loaded.router.host, str(loaded.env.import_dir)) == ("0.0.0.0", "/project")


def test_parts_wait_for_the_run_of_these_settings(written: Written) -> None:
    """Other settings, another mark: a part does not start with what the last run was made from."""
    marks = []
    for steps in (1, 2):
        settings, config = written(f"trainer.num_steps={steps}")
        found = objects(kubernetes_files(settings, config, (f"trainer.num_steps={steps}",)))
        init = next(item for (kind, _), item in found.items() if kind == "Job")
        made = pod_of(init)["containers"][0]["command"][2].rpartition(" ")[2]
        for part in PARTS.keys() - {"redis"}:
            (wait,) = pod_of(found[PARTS[part]])["initContainers"]
            assert f"test -f {made}" in wait["command"][2]
        marks.append((made, init["metadata"]["name"]))
    assert len(set(marks)) == 2


def test_no_secret_is_in_a_file_and_each_part_has_its_own(written: Written) -> None:
    """The runner holds its key only; who makes a secret is the script, in the cluster."""
    settings, config = written()
    files = kubernetes_files(settings, config)
    found = objects(files)
    assert not [kind for kind, _ in found if kind == "Secret"]

    def secrets(part: str) -> set[str]:
        pod = pod_of(found[PARTS[part]])
        names = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        for variable in pod["containers"][0]["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                names.add(f"{reference['name']}:{reference['key']}")
        return names

    assert secrets("runner") == {"walk-runner", "walk-environment:SEARCH_KEY"}
    assert secrets("router") == {"walk-redis", "walk-keys", "walk-environment:JUDGE_KEY"}
    for part in ("server", "trainer", "archiver", "monitor"):
        assert secrets(part) == {"walk-redis", "walk-keys"}
    assert secrets("redis") == {"walk-redis"}
    made = set(re.findall(r"create (walk-[a-z]+) ", files["create_secrets.sh"]))
    assert made == {"walk-redis", "walk-keys", "walk-runner", "walk-environment"}


def test_the_script_makes_keys_that_a_run_can_read(written: Written, tmp_path: Path) -> None:
    """With a kubectl that keeps what it is given: the files have the names that are mounted."""
    settings, config = written()
    script = tmp_path / "create_secrets.sh"
    script.write_text(kubernetes_files(settings, config)["create_secrets.sh"])
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        "#!/bin/bash\n"
        'echo "$@" >> calls\n'
        '[ "$1" != get ] || { test -e "made-$3"; exit; }\n'
        'touch "made-$4"\n'
        'for word in "${@:5}"; do file=${word#--from-file=}; cat "${file#*=}" > "$4:${file%%=*}"\n'
        "done\n"
    )
    kubectl.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JUDGE_KEY": "judge!", "SEARCH_KEY": "s"}

    def make() -> None:
        subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=True)

    make()
    keys = keep_keys(tmp_path / "walk-keys:keys.json")
    assert (tmp_path / "walk-runner:key").read_text() == keys.runner_key
    assert len(keys.episode_secret) == len((tmp_path / "walk-redis:password").read_text()) == 64
    assert (tmp_path / "walk-environment:JUDGE_KEY").read_text() == "judge!"
    assert keys.runner_key not in (tmp_path / "calls").read_text()
    make()
    assert keep_keys(tmp_path / "walk-keys:keys.json") == keys


def test_only_the_router_is_reached_by_runners(cluster: dict[tuple[str, str], Tree]) -> None:
    """Who may open which port to whom, from both sides; every part has a policy."""

    def peers(rules: list[Tree], side: str) -> set[tuple[str, int]]:
        return {
            (peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], port["port"])
            for rule in rules
            for peer in rule.get(side, [])
            if "podSelector" in peer
            for port in rule.get("ports", [{"port": 0}])
        }

    policies = {key[1]: item["spec"] for key, item in cluster.items() if key[0] == "NetworkPolicy"}
    assert set(policies) == {f"walk-{part}" for part in (*PARTS, "init")}
    assert all(spec["policyTypes"] == ["Ingress", "Egress"] for spec in policies.values())
    into = {name: peers(spec["ingress"], "from") for name, spec in policies.items()}
    out = {name: peers(spec["egress"], "to") for name, spec in policies.items()}
    assert into["walk-router"] == {("runner", 8000), ("router", 8000)}
    assert into["walk-server"] == {("router", 30000), ("trainer", 30000)}
    assert {part for part, _ in into["walk-redis"]} == {*PARTS, "init"} - {"redis", "runner"}
    assert into["walk-runner"] == set()
    assert out["walk-runner"] == {("router", 8000)}
    assert out["walk-redis"] == set()
    for part in ("router", "server", "trainer"):
        assert ("redis", 6379) in out[f"walk-{part}"]
    for part in ("archiver", "monitor"):
        assert (into[f"walk-{part}"], out[f"walk-{part}"]) == (set(), {("redis", 6379)})
        assert "0.0.0.0/0" not in str(policies[f"walk-{part}"])


def test_what_looks_at_a_run_is_one_pod_that_may_write_its_folder(
    cluster: dict[tuple[str, str], Tree],
) -> None:
    """Two archivers never at once; each has what it asks for, and its command is one of ours."""
    for part, memory in (("archiver", "2048Mi"), ("monitor", "1024Mi")):
        deployment = cluster[PARTS[part]]
        assert deployment["spec"]["replicas"] == 1
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}
        (container,) = pod_of(deployment)["containers"]
        assert container["resources"]["limits"] == {"memory": memory}
        (runs,) = (mount for mount in container["volumeMounts"] if mount["name"] == "runs")
        assert not runs["readOnly"]
        assert container["command"] == ["outloop", part, "--run=/outloop/runs/walk"]
        assert part in cli.commands
    assert ("Service", "walk-monitor") not in cluster


@pytest.mark.parametrize(("asked", "port"), [(0, 9100), (9464, 9464)])
def test_the_page_for_prometheus_is_a_service(written: Written, asked: int, port: int) -> None:
    """Open to the whole cluster, at the port that the monitor is told to listen on."""
    settings, config = written(f"telemetry.prometheus_port={asked}")
    found = objects(kubernetes_files(settings, config))
    service = found["Service", "walk-monitor"]["spec"]
    assert [entry["targetPort"] for entry in service["ports"]] == [port]
    pod = found[PARTS["monitor"]]["spec"]["template"]
    assert service["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    assert [entry["containerPort"] for entry in container["ports"]] == [port]
    assert container["readinessProbe"]["httpGet"] == {"path": "/metrics", "port": port}
    (rule,) = found["NetworkPolicy", "walk-monitor"]["spec"]["ingress"]
    assert [entry["port"] for entry in rule["ports"]] == [port]
    assert rule["from"] == [{"namespaceSelector": {}}]
    sets = init_words(found)
    assert {
        '--set=telemetry.prometheus_host="0.0.0.0"',
        f"--set=telemetry.prometheus_port={port}",
    } <= {*sets}


@pytest.mark.medium
def test_what_nobody_wants_is_left_out(written: Written) -> None:
    """No trajectories, no alarms and no page: neither a part nor a policy names them."""
    settings, config = written("trajectories.enabled=false", "alarms.enabled=false")
    files = kubernetes_files(settings, config)
    assert not {"archiver.yaml", "monitor.yaml"} & files.keys()
    assert "archiver" not in files["network.yaml"]
    assert not [word for word in init_words(objects(files)) if "trajectories" in word]
    settings, config = written()
    assert "--set=trajectories.enabled=true" in init_words(
        objects(kubernetes_files(settings, config))
    )


@pytest.mark.medium
def test_alarms_are_posted_beyond_the_cluster(written: Written, tmp_path: Path) -> None:
    """The way out is open to the one that needs it; the webhook's address is a secret."""
    settings, config = written(f'alarms.webhook_file="{tmp_path / "hook"}"')
    files = kubernetes_files(settings, config)
    found = objects(files)
    policies = {name: str(item) for (kind, name), item in found.items() if kind == "NetworkPolicy"}
    assert "0.0.0.0/0" in policies["walk-monitor"]
    assert "0.0.0.0/0" not in policies["walk-archiver"]
    assert "create walk-webhook --from-file=url=" in files["create_secrets.sh"]
    init = next(item for (kind, _), item in found.items() if kind == "Job")
    for item in (init, found[PARTS["monitor"]]):
        (container,) = pod_of(item)["containers"]
        assert "/keys/webhook" in {mount["mountPath"] for mount in container["volumeMounts"]}
        names = {v["secret"]["secretName"] for v in pod_of(item)["volumes"] if "secret" in v}
        assert "walk-webhook" in names
    assert '--set=alarms.webhook_file="/keys/webhook/url"' in init_words(found)


def test_a_runner_does_not_end_with_its_run(cluster: dict[tuple[str, str], Tree]) -> None:
    """A Deployment would start it again and again; the flag is one that the command has."""
    (container,) = pod_of(cluster[PARTS["runner"]])["containers"]
    parsed = cli.commands["runner"].make_context("runner", container["command"][2:])
    assert parsed.params["wait_when_finished"] is True


def test_probes_drain_and_spot(cluster: dict[tuple[str, str], Tree]) -> None:
    """Each port that is probed is open; a router has the time to end its turns."""
    for part in ("router", "server"):
        pod = pod_of(cluster[PARTS[part]])
        (container,) = pod["containers"]
        (port,) = (entry["containerPort"] for entry in container["ports"])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] == port
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert str(port) in shlex.join(container["command"])
        assert "preStop" in container["lifecycle"]
        assert ("Service", f"walk-{part}") in cluster
    router = pod_of(cluster[PARTS["router"]])
    assert router["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert router["terminationGracePeriodSeconds"] == 5 + 20 + 15
    assert pod_of(cluster[PARTS["trainer"]])["terminationGracePeriodSeconds"] == 90
    tolerant = {part for part, key in PARTS.items() if "tolerations" in pod_of(cluster[key])}
    assert tolerant == {"server", "runner"}
    scaler = cluster["HorizontalPodAutoscaler", "walk-runner"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 12)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (('run.name="Two_Words"',), "no name for Kubernetes"),
        (("trainer.num_ranks=7",), "choose a multiple"),
        (
            ('router.tls_cert_file="a"', 'router.tls_key_file="b"'),
            "put a proxy or an ingress with TLS",
        ),
    ],
)
def test_what_cannot_be_deployed_is_a_sentence(
    written: Written, overrides: tuple[str, ...], sentence: str
) -> None:
    """Before a file is written."""
    settings, config = written(*overrides)
    with pytest.raises(SettingsError, match=sentence):
        kubernetes_files(settings, config)
