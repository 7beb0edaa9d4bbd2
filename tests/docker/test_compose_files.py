"""What the compose files and the Dockerfile promise; their scripts are run as they are."""

import http.server
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
import yaml

from outloop.buffer.redis.embedded import find_server
from outloop.buffer.settings import load_settings
from outloop.engine.train.megatron import release

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
STACK = yaml.safe_load((DOCKER / "compose.yaml").read_text())
GPU = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())
DOCKERFILES = {name: (DOCKER / name).read_text() for name in ("Dockerfile", "Dockerfile.gpu")}
SERVICES = {**STACK["services"], "sglang": GPU["services"]["sglang"]}
KEY_VOLUMES = {"redis-password", "run-keys", "runner-key"}


def mounts(service: str) -> dict[str, str]:
    """Source -> `target` or `target:ro`."""
    return dict(entry.split(":", 1) for entry in SERVICES[service].get("volumes", []))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_container_is_confined(name: str) -> None:
    """Not root, no capability, no way to gain one, an init, and it comes back when it crashes."""
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "on-failure"
    assert service.get("read_only") or name == "sglang"
    assert not {"privileged", "pid", "cap_add"} & service.keys()
    assert "docker.sock" not in str(service)


def test_start_order_is_gated_by_health() -> None:
    """Keys, Redis, the run, then servers and router, then the trainer and the runner."""
    order = {
        name: {on: how["condition"] for on, how in service.get("depends_on", {}).items()}
        for name, service in STACK["services"].items()
    }
    completed, healthy = "service_completed_successfully", "service_healthy"
    assert order == {
        "keys": {},
        "redis": {"keys": completed},
        "prepare": {"redis": healthy},
        "server": {"prepare": completed},
        "router": {"prepare": completed},
        "trainer": {"server": healthy},
        "runner": {"router": healthy},
        "archiver": {"prepare": completed},
        "monitor": {"prepare": completed},
        "viewer": {"prepare": completed},
        "prometheus": {},
        "grafana": {},
    }
    awaited = {on for links in order.values() for on, how in links.items() if how == healthy}
    assert all("test" in STACK["services"][name]["healthcheck"] for name in awaited)


def test_the_runner_reaches_the_router_only() -> None:
    """No network and no volume joins it to Redis, the servers or a key that is not its own."""
    assert SERVICES["runner"]["networks"] == ["front"]
    assert STACK["networks"]["back"] == {"internal": True}
    on_front = {name for name, s in SERVICES.items() if "front" in s.get("networks", [])}
    assert on_front == {"runner", "router"}
    assert KEY_VOLUMES & mounts("runner").keys() == {"runner-key"}
    assert mounts("runner")["runs"].endswith(":ro")


def test_secrets_are_files_and_written_by_one_service() -> None:
    """Every other service mounts them read-only, and none has one in its environment or command."""
    for name in STACK["services"]:
        for volume in KEY_VOLUMES & mounts(name).keys():
            assert mounts(name)[volume].endswith(":ro") == (name != "keys"), (name, volume)
        for key, value in SERVICES[name].get("environment", {}).items():
            assert "PASSWORD" not in key or value.startswith("/keys/"), (name, key)
    assert set(mounts("keys")) == KEY_VOLUMES


def test_agents_find_the_router_by_its_name() -> None:
    """http://sgl-router:8000 inside; outside it is published on the loopback interface alone."""
    router = SERVICES["router"]
    assert router["networks"]["front"]["aliases"] == ["sgl-router"]
    assert router["command"][router["command"].index("--port") + 1] == "8000"
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert "127.0.0.1:${OUTLOOP_PORT:-8000}:8000" in ports


def test_bases_are_pinned_and_overridable() -> None:
    """Each FROM is a build argument with a tag, and compose hands on the same default."""
    dockerfile = DOCKERFILES["Dockerfile"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    assert bases == ["${PYTHON_IMAGE}", "${REDIS_IMAGE}"]
    given = SERVICES["keys"]["build"]["args"]
    for name in ("PYTHON_IMAGE", "REDIS_IMAGE"):
        assert re.search(r":\d+\.\d+\.\d+", arguments[name])
        assert given[name] == f"${{{name}:-{arguments[name]}}}"
    assert given["TORCH_INDEX_URL"] == f"${{TORCH_INDEX_URL:-{arguments['TORCH_INDEX_URL']}}}"
    assert re.search(r":v\d+\.\d+\.\d+\}", SERVICES["sglang"]["image"])


def test_the_files_are_those_of_docker_compose_1_29_too() -> None:
    """It takes no other words at the top, and no check that is disabled over another one; the stack
    has its name by .env."""
    allowed = {"services", "networks", "volumes", "secrets", "configs", "version"}
    for file in (STACK, GPU):
        assert {word for word in file if not word.startswith("x-")} <= allowed
        checks = [service.get("healthcheck", {}) for service in file["services"].values()]
        assert not any("disable" in check or "NONE" in check.get("test", ()) for check in checks)
    assert (DOCKER / ".env").read_text() == "COMPOSE_PROJECT_NAME=outloop\n"


@pytest.mark.parametrize("dockerfile", DOCKERFILES.values(), ids=DOCKERFILES)
def test_what_the_dockerfile_copies_is_there(dockerfile: str) -> None:
    """Sources exist and .dockerignore lets them through; every part of the package is copied."""
    rules = (ROOT / ".dockerignore").read_text().split()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = [
        word
        for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source.split("/")[0], rule) for rule in allowed), source
    links = {path.name for path in (ROOT / "src/outloop").iterdir() if path.is_symlink()}
    assert links <= set(sources)


def test_the_gpu_image_is_upstreams_sglang_with_the_trainer_beside_it() -> None:
    """One base for both containers, an environment of its own, SGLang's NCCL; user, entry point and
    places to write are the CPU image's, and its commands are those of a shell."""
    dockerfile = DOCKERFILES["Dockerfile.gpu"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S*)$", dockerfile, re.MULTILINE))
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${SGLANG_IMAGE}"]
    build = GPU["services"]["keys"]["build"]
    assert (ROOT / build["dockerfile"]).read_text() == dockerfile
    for name in ("SGLANG_IMAGE", "TORCH_PIP_ARGS", "NCCL", "TRANSFORMER_ENGINE"):
        assert build["args"][name] == f"${{{name}:-{arguments[name]}}}"
    assert build["args"]["SGLANG_IMAGE"] == SERVICES["sglang"]["image"]
    commands = re.findall(r"^RUN ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE)
    assert commands[0] == "/usr/bin/python3 -m venv /opt/venv"
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)
    ends = [text[text.index("COPY docker/prepare.sh") :].split() for text in DOCKERFILES.values()]
    shared = [word for word in ends[1] if word in ends[0]]
    for word in ("10001:10001", '["outloop"]', "HOME=/tmp", "/opt/outloop/", "/outloop/runs"):
        assert word in shared


def flags(words: list[str]) -> tuple[str, ...]:
    """The SECTION.KEY=VALUE of every --set."""
    joined = " ".join(shlex.quote(word) for word in words).replace("--set ", "--set=")
    return tuple(
        word.removeprefix("--set=") for word in shlex.split(joined) if word.startswith("--set=")
    )


def with_defaults(words: list[str]) -> list[str]:
    """What compose makes of `${NAME:-default}` where nothing is set."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


def test_the_gpu_stack_agrees_with_sglang() -> None:
    """Ranks, NCCL and caches: one number for both sides, an image of its own, a place to write."""
    services = GPU["services"]
    command = services["sglang"]["command"]
    assert "--tp-size=${SGLANG_TP_SIZE:-1}" in command
    prepare = services["prepare"]["command"]
    assert "--set=server.tensor_parallel_size=${SGLANG_TP_SIZE:-1}" in prepare
    ours = {name for name, service in SERVICES.items() if "outloop:dev" in service.get("image", "")}
    assert {"keys", "prepare", "server", "router", "trainer", "runner"} <= ours
    for name in ours:
        assert services[name]["image"] == "${OUTLOOP_IMAGE:-outloop:dev-gpu}"
    assert "nvidia-nccl" in services["keys"]["build"]["args"]["NCCL"]
    assert services["sglang"]["environment"]["HOME"] == "/tmp"
    for service in services.values():
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in service.get("environment", {})


@pytest.mark.parametrize("project", ["examples/calculator", "tests/docker/project"])
def test_the_stacks_settings_load(project: str) -> None:
    """What prepare.sh sets, and the GPU file on top, are settings that exist and agree."""
    script = (DOCKER / "prepare.sh").read_text().replace("\\\n", " ")
    words = next(line for line in script.splitlines() if line.startswith("exec outloop init"))
    own = flags(shlex.split(words))
    settings = load_settings(ROOT / project / "run.toml", own)
    assert settings.publish.transport == "disk"
    assert str(settings.buffer.redis_password_file) == "/keys/redis/password"
    stack = [f"{word}" for word in SERVICES["server"]["command"]]
    assert f"{settings.run.dir}/{settings.run.name}" in stack
    with_gpu = load_settings(
        ROOT / project / "run.toml",
        own + flags(with_defaults(GPU["services"]["prepare"]["command"])),
    )
    assert with_gpu.server.tensor_parallel_size == 1
    assert (with_gpu.server.kind, with_gpu.server.num_servers) == ("sglang", 0)
    assert (with_gpu.publish.transport, with_gpu.publish.host) == ("collective", "trainer")
    assert with_gpu.publish.host in STACK["services"]
    port = next(w for w in SERVICES["sglang"]["command"] if w.startswith("--port="))
    assert with_gpu.server.urls == (f"http://sglang:{port.removeprefix('--port=')}",)


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """.ci/lock.py, which writes the lock of the images."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci/lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_install_what_the_package_needs_by_hash(lock: ModuleType) -> None:
    """In the releases of the checkout's lock, after `make lock`. Neither has PyTorch, which its
    index brings, nor what only a build for CUDA needs."""
    lines = [line for line in lock.IMAGES.read_text().splitlines() if line[0] != "#"]
    releases = {line.split()[0] for line in lines}
    names = {name.partition("==")[0] for name in releases}
    needed = {name for name in lock.needed_by(*lock.EXTRAS) if not lock.LEFT_OUT.match(name)}
    assert names == needed | {"setuptools"}
    checkout = {line.split()[0] for line in lock.LOCK.read_text().splitlines()}
    assert {name.partition("==")[0] for name in releases - checkout} == {"setuptools"}
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}$", line) for line in lines)
    (megatron,) = (name for name in releases if name.startswith("megatron-core=="))
    assert {"3.11", "3.12"} <= {*release.TRIED[megatron.partition("==")[2]]}


@pytest.mark.parametrize("dockerfile", DOCKERFILES.values(), ids=DOCKERFILES)
def test_images_take_packages_of_one_index_or_by_hash(dockerfile: str) -> None:
    """No package may come from a second index under a name of the first; builds fetch nothing."""
    commands = " ".join(dockerfile.replace("\\\n", " ").split())
    installs = re.findall(r"pip install (.*?)(?= && | RUN | COPY | ARG | #|$)", commands)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(
        line for line in project["optional-dependencies"]["train"] if line.startswith("torch==")
    )
    assert installs
    for install in installs:
        assert "--extra-index-url" not in install
        is_torch = install.split()[-1] == torch
        is_chosen = re.search(r'"\$(NCCL|TRANSFORMER_ENGINE)"$', install)
        by_hash = "--no-deps --require-hashes -r docker-requirements.lock"
        is_own = install.startswith("--no-deps --no-build-isolation .")
        assert is_torch or is_chosen or is_own or install == by_hash, install


@pytest.mark.medium
def test_keys_are_made_once_and_apart(tmp_path: Path) -> None:
    """Three places, files for their owner alone, the same after a second run."""
    for name in ("redis", "run", "runner"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "KEYS_DIR": str(tmp_path)}

    def make() -> dict[str, str]:
        subprocess.run([sys.executable, str(DOCKER / "keys.py")], env=environment, check=True)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert all(path.stat().st_mode & 0o077 == 0 for path in files)
        return {str(path.relative_to(tmp_path)): path.read_text() for path in files}

    first = make()
    assert first.keys() == {"redis/password", "run/keys.json", "runner/key"}
    assert first["runner/key"] == json.loads(first["run/keys.json"])["runner_key"]
    assert len(first["redis/password"]) > 30
    assert make() == first


@pytest.fixture
def served_by_script(tmp_path: Path, free_port: int) -> Iterator[int]:
    """redis.sh as the container runs it, with the server that is at hand."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(find_server())
    (tmp_path / "password").write_text("secret-of-the-stack\n")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "REDIS_PASSWORD_FILE": str(tmp_path / "password"),
        "REDIS_DIR": str(tmp_path),
        "REDIS_PORT": str(free_port),
    }
    command = ["sh", str(DOCKER / "redis.sh"), "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        yield free_port
        process.terminate()


@pytest.mark.medium
def test_redis_asks_for_the_password_and_evicts_nothing(served_by_script: int) -> None:
    """The script's server keeps what it acknowledged on disk, and lets nobody in without it."""
    port = served_by_script
    client = redis.Redis(port=port, password="secret-of-the-stack")
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            continue
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
    assert {name: client.config_get(name)[name] for name in wanted} == wanted
    client.close()


@pytest.mark.medium
@pytest.mark.parametrize(("path", "code"), [("ok", 0), ("broken", 1)])
def test_the_health_check_tells_well_from_unwell(path: str, code: int) -> None:
    """Exit code 0 for a 200, another for anything else, as for nobody there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ok" else 503)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check = [sys.executable, "-IS", str(DOCKER / "healthy.py")]
        address = f"127.0.0.1:{server.server_port}"
        answer = subprocess.run([*check, f"{address}/{path}"], stderr=subprocess.DEVNULL)
        server.shutdown()
    assert answer.returncode == code
    gone = subprocess.run([*check, f"{address}/ok"], stderr=subprocess.DEVNULL, check=False)
    assert gone.returncode != 0
